"""Replicas on the admin listener: what is shown, what is drained, and what is refused."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import pytest

from gateway.operators.replicas import PAGE_MAX
from gateway.routing.members import Listed
from tests.gateway.conftest import House, Open, until
from tests.gateway.fake_engine import FakeEngine, byte_bundle, unary
from tests.gateway.operators.test_admin import OPERATOR, ask, operator_keys

PATH = "/admin/v1/replicas"


@pytest.fixture
async def house(open_house: Open) -> House:
    house = await open_house("http://127.0.0.1:1/a", admin=operator_keys())
    assert isinstance(house, House)
    house.engine.script = unary()
    return house


def id_of(house: House) -> str:
    return house.engine.url.removeprefix("http://")


async def told(house: House, method: str, path: str) -> tuple[int, Any]:
    async with ask(house, method, path, **OPERATOR) as answer:
        return answer.status, await answer.json()


async def test_replicas_are_listed_with_what_is_known_of_them(house: House) -> None:
    async with house.chat() as answer:
        assert answer.status == 200
    status, page = await told(house, "GET", PATH)
    assert (status, page["has_more"]) == (200, False)
    shown = {one["id"]: one for one in page["data"]}
    mine = shown[id_of(house)]
    assert (mine["phase"], mine["models"], mine["requests"]) == ("ready", ["tiny"], 0)
    assert (mine["health"], mine["ejections"]) == ("well", 0)
    assert sum(mine["routes"].values()) == 1
    assert shown["127.0.0.1:1/a"]["url"] == "http://127.0.0.1:1/a"
    assert await told(house, "GET", f"{PATH}/{id_of(house)}") == (200, mine)


async def test_the_list_comes_in_pages_and_by_model(house: House) -> None:
    status, page = await told(house, "GET", f"{PATH}?limit=1&model=tiny")
    assert (status, len(page["data"]), page["has_more"]) == (200, 1, True)
    after = page["data"][0]["id"]
    _, rest = await told(house, "GET", f"{PATH}?limit=1&after={after}")
    assert (len(rest["data"]), rest["has_more"]) == (1, False)
    assert rest["data"][0]["id"] > after
    assert await told(house, "GET", f"{PATH}?model=none") == (200, {"data": [], "has_more": False})


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), (f"limit={PAGE_MAX + 1}", "limit"), ("limit=x", "limit"), ("page=2", "page")],
)
async def test_a_bad_parameter_is_named(house: House, query: str, param: str) -> None:
    status, body = await told(house, "GET", f"{PATH}?{query}")
    assert (status, body["error"]["param"]) == (400, param)


async def test_an_operator_drains_a_replica_and_takes_it_back(house: House, log: io.StringIO) -> None:
    one = f"{PATH}/{id_of(house)}"
    engine = FakeEngine(bundle=byte_bundle())
    engine.script = unary()
    async with engine:
        house.gateway.replicas.list_members("tiny", [Listed(house.engine.url), Listed(engine.url)])
        await until(lambda: len(list(house.gateway.replicas.members())) == 2)
        before = len(house.engine.seen)
        status, shown = await told(house, "POST", f"{one}/drain")
        assert (status, shown["phase"], shown["drained_by"]) == (200, "draining", ["operator"])
        for i in range(8):
            async with house.chat(messages=[{"role": "user", "content": str(i)}]) as answer:
                assert answer.status == 200
        assert len(house.engine.seen) == before
        await told(house, "POST", f"{one}/drain")
        assert (await told(house, "POST", f"{one}/undrain"))[1]["phase"] == "ready"

    def changes() -> list[tuple[str, str, str]]:
        lines = map(msgspec.json.decode, log.getvalue().splitlines())
        return [
            (line["operator"], line["action"], line["phase"])
            for line in lines
            if line["event"] == "admin.change" and line["replica"] == id_of(house)
        ]

    await until(lambda: len(changes()) == 3)
    assert changes() == [
        ("ops", "drain", "draining"),
        ("ops", "drain", "draining"),
        ("ops", "undrain", "ready"),
    ]


async def test_a_request_runs_on_while_its_replica_drains_and_the_next_is_told_so(house: House) -> None:
    finish = asyncio.Event()
    house.engine.script = unary(before=[finish])
    asking = asyncio.create_task(house.chat().__aenter__())
    await until(lambda: house.engine.active == 1)
    for name in (id_of(house), "127.0.0.1:1%2Fa"):
        assert (await told(house, "POST", f"{PATH}/{name}/drain"))[1]["phase"] == "draining"
    async with house.chat() as refused:
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"] == "1"
    finish.set()
    assert (await asking).status == 200
    await house.at_rest()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nobody:1", 404),
        ("POST", "/nobody:1/drain", 404),
        ("POST", "/127.0.0.1:1%2Fa/undrain", 200),
        ("POST", "/127.0.0.1:1/a/undrain", 404),
        ("POST", "", 405),
        ("GET", "/127.0.0.1:1%2Fa/drain", 405),
        ("POST", "/" + "x" * 600 + "/drain", 404),
    ],
)
async def test_what_is_not_there_is_not_found(house: House, method: str, path: str, status: int) -> None:
    assert (await told(house, method, PATH + path))[0] == status


async def test_operators_alone_may_ask(house: House) -> None:
    for headers, status in (({}, 401), (house.headers, 403)):
        async with ask(house, "POST", f"{PATH}/{id_of(house)}/drain", **headers) as answer:
            assert answer.status == status
    assert house.gateway.replicas.has_choice("tiny")
