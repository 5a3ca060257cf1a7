"""The engines' figures, and tenants' limits, on the admin listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gateway.config.quotas import QuotaLimits
from gateway.operators import engines
from gateway.operators.engines import ENGINES, EVERY_S
from gateway.operators.operations import query_of
from gateway.operators.tenant_limits import LIMITS, LimitsQuery
from shared.wire.errors import InvalidRequest
from tests.fakes import VirtualClock
from tests.gateway.conftest import House, Open
from tests.gateway.operators.test_admin import OPERATOR, operator_keys

pytestmark = pytest.mark.parametrize("protocol", ["http1"], indirect=True)


async def ask(house: House, path: str, status: int = 200) -> Any:
    url = f"http://127.0.0.1:{house.gateway.admin_port}{path}"
    async with house.client.get(url, headers=OPERATOR) as answer:
        assert answer.status == status
        return await answer.json()


class Metrics:
    """An engine that tells its metrics, and nothing else."""

    def __init__(self) -> None:
        self.text = "penstock_engine_running_sequences 3.0\npenstock_engine_generated_tokens_total 100.0\n"
        self.asked = 0
        self.gate: asyncio.Event | None = None
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/metrics":
            self.asked += 1
            if self.gate is not None:
                await self.gate.wait()
        return web.Response(text=self.text)


@asynccontextmanager
async def telling() -> AsyncIterator[Metrics]:
    metrics = Metrics()
    runner = web.ServerRunner(web.Server(metrics.handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    metrics.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield metrics
    finally:
        await runner.cleanup()


def of(told: Any, url: str) -> Any:
    """What is told of the engine at a URL."""
    return next(one for one in told["data"] if one["id"] == url.removeprefix("http://"))


async def test_engines_are_asked_while_somebody_looks_and_once_a_second_at_most(open_house: Open) -> None:
    clock = VirtualClock()
    async with telling() as metrics:
        house = await open_house(metrics.url, admin=operator_keys(), clock=clock)
        assert metrics.asked == 0
        pages = await asyncio.gather(*(ask(house, ENGINES) for _ in range(8)))
        assert metrics.asked == 1
        assert of(pages[0], metrics.url)["figures"] == {"running": 3}
        assert of(pages[0], house.engine.url)["problem"]  # the fake engine tells none
        clock.advance(2 * EVERY_S)
        metrics.text = metrics.text.replace("100.0", "150.0")
        told = of(await ask(house, ENGINES), metrics.url)
        assert told["figures"] == {"running": 3, "generated_per_s": 25.0}
        assert told["models"] == ["tiny"]


async def test_an_engine_that_is_slow_or_of_another_make_costs_its_own_figures_alone(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ASK_S", 0.2)
    async with telling() as slow, telling() as foreign:
        house = await open_house(slow.url, foreign.url, admin=operator_keys())
        slow.gate, foreign.text = asyncio.Event(), "vllm:num_requests_running 3\n"
        told = await ask(house, ENGINES)
        slow.gate.set()
        assert "did not answer" in of(told, slow.url)["problem"]
        assert "another make" in of(told, foreign.url)["problem"]
        assert not told["has_more"]


async def test_the_engines_that_are_asked_are_bounded(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ENGINES_MAX", 1)
    async with telling() as metrics:
        house = await open_house(metrics.url, admin=operator_keys())
        told = await ask(house, ENGINES)
        assert (len(told["data"]), told["has_more"]) == (1, True)


# -- limits ---------------------------------------------------------------------------------------


async def test_limits_are_told_with_what_is_used_of_them(open_house: Open) -> None:
    limits = {"requests_per_min": 10, "tokens_per_day": 1000, "concurrent": 4}
    house = await open_house(admin=operator_keys(), tenant={"limits": limits})
    async with house.chat() as answer:
        assert answer.status == 200
        await answer.read()
    told = await ask(house, LIMITS)
    acme, other = told["data"]
    assert (acme["tenant"], acme["live"], acme["limits"]["concurrent"]) == ("acme", 0, 4)
    assert (acme["windows"]["requests"]["limit"], acme["windows"]["requests"]["remaining"]) == (10, 9)
    assert acme["windows"]["day"]["remaining"] == 1000 - 13
    assert acme["windows"]["tokens"] is None
    assert set(other["limits"]) == set(QuotaLimits.__dataclass_fields__)
    assert other["windows"] == {"requests": None, "tokens": None, "day": None, "month": None}


async def test_limits_come_in_pages(open_house: Open) -> None:
    house = await open_house(admin=operator_keys())
    told = await ask(house, f"{LIMITS}?limit=1")
    assert ([one["tenant"] for one in told["data"]], told["has_more"]) == (["acme"], True)
    told = await ask(house, f"{LIMITS}?after=acme")
    assert ([one["tenant"] for one in told["data"]], told["has_more"]) == (["other"], False)
    told = await ask(house, f"{LIMITS}?tenant=other")
    assert [one["tenant"] for one in told["data"]] == ["other"]
    assert (await ask(house, f"{LIMITS}?color=red", 400))["error"]["param"] == "color"


@pytest.mark.parametrize(
    "parameters", [{"limit": "0"}, {"limit": "201"}, {"limit": "x"}, {"after": "a" * 513}]
)
def test_a_wrong_question_about_limits_names_its_parameter(parameters: dict[str, str], protocol: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        query_of(LimitsQuery, parameters)
    assert refused.value.param == next(iter(parameters))
