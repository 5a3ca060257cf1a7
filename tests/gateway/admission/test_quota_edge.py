"""Quotas as a client meets them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import Scope, Subject, Windows
from gateway.config.quotas import QuotaLimits
from gateway.config.whole import load
from gateway.endpoints.dialect import duration
from gateway.identity.keys import hash_key
from gateway.request import told_windows
from gateway.request.told_windows import TOLD_S, ToldWindows
from shared.process.setting_values import ConfigError
from shared.wire.ids import TenantId
from tests.fakes import VirtualClock
from tests.gateway.admission.test_survival import BrokenStore, broken
from tests.gateway.admission.test_survival import limited as limited_tenant
from tests.gateway.conftest import KEY, OTHER_KEY, PROMPT, House, Open, error_of, settings
from tests.gateway.fake_engine import CUT, Script, chunk, stream, unary

SOON = {"1s", *(f"{ms}ms" for ms in range(500, 1000))}
"""A second, and what was left of it when the answer was written."""


async def limited(
    open_house: Open, key_limits: dict[str, int], tenant_limits: dict[str, int], **more: Any
) -> House:
    house: House = await open_house(
        tenants=[{"id": "acme", "limits": tenant_limits}],
        keys=[{"id": "k1", "hash": hash_key(KEY), "tenant": "acme", "limits": key_limits}],
        **more,
    )
    house.engine.script = unary()
    return house


async def test_ratelimit_headers_are_on_every_answer(open_house: Open) -> None:
    house = await limited(open_house, {"requests_per_min": 60}, {"tokens_per_min": 6000})
    async with house.chat(max_tokens=82) as answer:
        headers = answer.headers
        assert headers["x-ratelimit-limit-requests"] == "60"
        assert headers["x-ratelimit-remaining-requests"] == "59"
        assert headers["x-ratelimit-reset-requests"] in SOON
        assert headers["x-ratelimit-limit-tokens"] == "6000"
        assert headers["x-ratelimit-remaining-tokens"] == str(6000 - 82 - len(PROMPT))
        assert headers["x-ratelimit-reset-tokens"] in SOON
    for refused in (
        house.chat(temperature=9),
        house.chat(model="nope"),
        house.get("/v1/models"),
        house.get("/x"),
    ):
        async with refused as answer:
            assert answer.headers["x-ratelimit-limit-requests"] == "60"
            assert answer.headers["x-ratelimit-limit-tokens"] == "6000"


async def test_what_no_reservation_looked_at_is_asked_for_once_in_a_while() -> None:
    """Whoever sends malformed bodies makes one call of a store a second, and is told the same meanwhile."""
    asked: list[Any] = []

    class Store(MemoryStore):
        async def windows(self, subjects: Sequence[Subject]) -> Windows:  # type: ignore[override]
            asked.append(subjects)
            return await super().windows(subjects)

    clock = VirtualClock()
    told = ToldWindows(Store(clock), clock)
    one, other = (
        (Subject(Scope.TENANT, name, QuotaLimits(requests_per_min=60), TenantId(name)),)
        for name in ("acme", "other")
    )
    for _ in range(3):
        windows = await told.of(one)
        assert windows.requests is not None
        assert windows.requests.limit == 60
    await told.of(other)
    assert asked == [one, other]
    clock.advance(TOLD_S)
    await told.of(one)
    assert asked == [one, other, one]


async def test_what_was_told_is_kept_of_a_bounded_number_of_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_windows, "TOLD_MAX", 2)
    told = ToldWindows(broken(BrokenStore()), VirtualClock())
    for name in ("one", "two", "three"):
        await told.of(tuple(limited_tenant("closed", name, requests_per_min=60)))
    assert len(told._told) == 2


async def test_ratelimit_headers_are_on_a_stream_a_failure_and_every_endpoint(open_house: Open) -> None:
    limits = {"requests_per_min": 60}, {"tokens_per_min": 6000}
    house = await limited(open_house, *limits, clock=VirtualClock())

    def told(answer: aiohttp.ClientResponse) -> dict[str, str]:
        names = {name.lower(): text for name, text in answer.headers.items()}
        return {name: text for name, text in names.items() if name.startswith("x-ratelimit-")}

    def left(requests: int, tokens: int) -> dict[str, str]:
        """The headers while so many are left."""
        return {
            "x-ratelimit-limit-requests": "60",
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-requests": str(requests),
            "x-ratelimit-remaining-tokens": str(tokens),
            "x-ratelimit-reset-requests": duration(1000 * (60 - requests)),
            "x-ratelimit-reset-tokens": duration(10 * (6000 - tokens)),
        }

    reserved, used = 82 + len(PROMPT), 13
    house.engine.script = stream(chunk("a"))
    async with house.chat(max_tokens=82, stream=True) as answer:
        assert answer.content_type == "text/event-stream"
        assert told(answer) == left(59, 6000 - reserved)
        await answer.read()
    await house.lines(1)
    house.engine.script = Script([CUT])
    async with house.chat(max_tokens=82) as answer:
        assert answer.status == 502
        assert told(answer) == left(58, 6000 - used - reserved)
    spent = used + (await house.lines(2))[1]["settled_tokens"]
    house.engine.script, asked = unary(), {"model": "tiny", "prompt": "hi"}
    async with house.client.post(f"{house.url}/tokenize", json=asked, headers=house.headers) as answer:
        assert answer.status == 200
        assert told(answer) == left(57, 6000 - spent)


async def test_without_quotas_there_are_no_ratelimit_headers(house: House) -> None:
    async with house.chat() as answer:
        assert not [name for name in answer.headers if "ratelimit" in name.lower()]


async def test_the_request_quota_refuses_with_429_and_retry_after(open_house: Open) -> None:
    house = await limited(open_house, {"requests_per_min": 1}, {})
    async with house.chat():
        pass
    async with house.chat() as answer:
        assert answer.status == 429
        assert answer.headers["retry-after"] == "60"
        assert 59_000 < int(answer.headers["retry-after-ms"]) <= 60_000
        assert answer.headers["x-should-retry"] == "true"
        error = await error_of(answer)
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    line = (await house.lines(2))[1]
    assert (line["quota_meter"], line["quota_scope"]) == ("requests", "key")
    assert line["end_reason"] == "refused"
    assert line["stage"] == "seat"
    assert len(house.engine.seen) == 1


@pytest.mark.parametrize("limit", ["requests_per_min", "concurrent", "tokens_per_min", "token_budget"])
async def test_a_limit_of_zero_is_429_without_retry(open_house: Open, limit: str) -> None:
    house = await limited(open_house, {limit: 0}, {})
    async with house.chat() as answer:
        assert answer.status == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers


async def test_the_token_quota_refuses_with_429_and_retry_after(open_house: Open) -> None:
    house = await limited(open_house, {}, {"tokens_per_min": 200})
    async with house.chat(max_tokens=100):
        pass
    async with house.chat(max_tokens=170) as answer:
        assert answer.status == 429
        error = await error_of(answer)
        assert error["type"] == "tokens"
        assert answer.headers["x-should-retry"] == "true"
    async with house.chat(max_tokens=200) as answer:
        assert answer.status == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert (await error_of(answer))["code"] == "request_exceeds_quota"


async def test_a_small_limit_lets_a_request_without_a_maximum_through(open_house: Open) -> None:
    house = await limited(open_house, {}, {"tokens_per_min": 200})
    async with house.chat() as answer:
        assert answer.status == 200
    assert (await house.line())["reserved_tokens"] == len(PROMPT) + 50


async def test_a_spent_budget_is_429_without_retry(open_house: Open) -> None:
    house = await limited(open_house, {"token_budget": 100}, {})
    async with house.chat(max_tokens=50):
        pass
    async with house.chat(max_tokens=90) as answer:
        assert answer.status == 429
        assert answer.headers["x-should-retry"] == "false"
        error = await error_of(answer)
    assert error["code"] == "insufficient_quota"
    async with house.chat(max_tokens=60) as answer:
        assert answer.status == 200, "what was not used came back"


async def test_the_concurrency_quota_is_released_with_the_request(open_house: Open) -> None:
    house = await limited(open_house, {"concurrent": 1}, {})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    async with house.chat(stream=True) as first:
        async with house.chat() as second:
            assert second.status == 429
            assert second.headers["retry-after"] == "1"
        go_on.set()
        await first.read()
    await house.lines(2)
    async with house.chat(stream=True) as third:
        assert third.status == 200


async def test_usage_beyond_the_estimate_is_debt(open_house: Open) -> None:
    house = await limited(open_house, {"tokens_per_min": 400}, {})
    async with house.chat(max_tokens=10):
        pass
    assert (await house.line())["settled_tokens"] == 13
    async with house.chat() as answer:
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 400 - 13 - len(PROMPT) - 100


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0ms"),
        (12, "12ms"),
        (1500, "1.5s"),
        (59_999, "59.999s"),
        (360_000, "6m0s"),
        (90_061_000, "25h1m1s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(ms: int, text: str) -> None:
    assert duration(ms) == text


# -- budgets of a day and of a month --------------------------------------------------------------


async def test_a_spent_day_says_when_the_next_one_begins_and_that_no_client_should_wait(
    open_house: Open,
) -> None:
    clock = VirtualClock(wall=1_700_049_600.0)  # 2023-11-15T12:00Z
    house = await limited(open_house, {"tokens_per_day": 100, "tokens_per_month": 5000}, {}, clock=clock)
    async with house.chat(max_tokens=50) as answer:
        assert answer.headers["x-ratelimit-limit-tokens-day"] == "100"
        assert answer.headers["x-ratelimit-remaining-tokens-day"] == str(100 - 50 - len(PROMPT))
        assert answer.headers["x-ratelimit-reset-tokens-day"] == "12h0m0s"
        assert answer.headers["x-ratelimit-reset-tokens-month"] == "372h0m0s"
    await house.lines(1)
    async with house.chat(max_tokens=80) as answer:
        assert answer.status == 429
        assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("43200", "false")
        error = await error_of(answer)
    assert error["code"] == "insufficient_quota"
    assert "This key's limit of 100 tokens a day has 87 left" in error["message"]
    line = (await house.lines(2))[1]
    assert (line["quota_meter"], line["quota_scope"]) == ("day_budget", "key")
    async with house.chat(max_tokens=200) as answer:
        assert (answer.status, answer.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in answer.headers
        assert (await error_of(answer))["code"] == "request_exceeds_quota"


# -- limits of models -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "scope", "message"),
    [
        ({"model": {"limits": {"requests_per_min": 1}}}, "model", "This model's limit for all callers"),
        (
            {"tenant": {"model_limits": [{"model": "tiny", "limits": {"requests_per_min": 1}}]}},
            "tenant_model",
            "This tenant's limit for this model",
        ),
        (
            {
                "keys": [
                    {
                        "id": "k1",
                        "hash": hash_key(KEY),
                        "tenant": "acme",
                        "model_limits": [{"model": "tiny", "limits": {"requests_per_min": 1}}],
                    }
                ]
            },
            "key_model",
            "This key's limit for this model",
        ),
    ],
)
async def test_a_models_limit_holds_by_its_name_and_its_aliases(
    open_house: Open, sections: dict[str, Any], scope: str, message: str
) -> None:
    house = await open_house(**sections)
    house.engine.script = unary()
    async with house.chat(model="small") as answer:
        assert answer.status == 200
        assert answer.headers.get("x-ratelimit-limit-requests") == (None if scope == "model" else "1")
    async with house.chat() as answer:
        assert answer.status == 429
        assert message in (await error_of(answer))["message"]
    line = (await house.lines(2))[1]
    assert (line["quota_scope"], line["stage"], line["settled_tokens"]) == (scope, "quota", 0)
    await house.at_rest()


async def test_a_models_limit_over_all_tenants_counts_them_together(open_house: Open) -> None:
    house = await open_house(model={"limits": {"concurrent": 1}})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    async with house.chat(stream=True) as first:
        assert first.status == 200
        async with house.chat(headers={"authorization": f"Bearer {OTHER_KEY}"}) as second:
            assert second.status == 429
            assert "all callers together" in (await error_of(second))["message"]
        go_on.set()
        await first.read()
    await house.lines(2)
    await house.at_rest()


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"tenant": {"model_limits": [{"model": "nope", "limits": {}}]}}, "there is no model 'nope'"),
        ({"tenant": {"model_limits": [{"model": "tiny", "limits": {}}] * 2}}, "'tiny' is given 2 times"),
        (
            {
                "model": {"limits": {"concurrent": 1}},
                "redis": {"url": "redis://a,b", "cluster": True},
                "quotas": {"store": "redis"},
            },
            "models: limits of a model over all tenants need one node of the Cluster (quotas.one_node)",
        ),
        (
            {"redis": {"url": "redis://a"}, "quotas": {"store": "redis", "one_node": True}},
            "quotas: one_node: is for a Cluster (redis.cluster)",
        ),
    ],
)
def test_a_models_limits_that_cannot_hold_are_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings("http://engine", **sections), {})
    assert problem in str(caught.value)
