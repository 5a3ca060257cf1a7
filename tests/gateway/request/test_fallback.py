"""Another model in place of one whose engines cannot answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.billing.lines import BillingLine
from gateway.config.whole import load
from shared.process.setting_values import ConfigError
from shared.wire.ids import IGNORED_FIELDS_HEADER
from shared.wire.room import Room
from tests.gateway.conftest import House, Open, settings, until
from tests.gateway.fake_engine import CUT, FakeEngine, Script, byte_bundle, chunk, refusal, stream, unary

DEAD = "http://127.0.0.1:1"
HEADER = "x-penstock-fallback"


@dataclass
class Pair:
    """A gateway with the model `tiny` and its fallback `spare`."""

    house: House
    spare: FakeEngine

    @property
    def tiny(self) -> FakeEngine:
        return self.house.engine


@pytest.fixture
def open_pair(open_house: Open) -> Callable[..., Any]:
    """`async with open_pair(on=[...], spare={...}):` with more settings of the model `spare`."""

    @asynccontextmanager
    async def open_(
        on: list[str] | None = None,
        *,
        spare: dict[str, Any] | None = None,
        spare_bundle: Any = ...,
        more: list[dict[str, Any]] | None = None,
        fallback: list[str] | None = None,
        protocol: str = "http2",
        **sections: Any,
    ) -> AsyncIterator[Pair]:
        async with AsyncExitStack() as stack:
            bundle = byte_bundle() if spare_bundle is ... else spare_bundle
            engine = await stack.enter_async_context(FakeEngine(bundle=bundle))
            own = {"name": "tiny", "fallback": fallback or ["spare"], "protocol": protocol}
            if on is not None:
                own["fallback_on"] = on
            tiny = await stack.enter_async_context(FakeEngine(bundle=byte_bundle()))
            models = [
                {**own, "replicas": [tiny.url]},
                {**SPARE, "replicas": [engine.url], "protocol": protocol, **(spare or {})},
                *(more or []),
            ]
            house = await open_house(models=models, **sections)
            house.engine = tiny
            spare_model = house.gateway.config.models[1]
            engines = house.gateway.engines
            await until(lambda: engines.of(spare_model).profile is not None)
            tiny.script, engine.script = unary("tiny"), unary("spare")
            yield Pair(house, engine)

    return open_


Opener = Callable[..., Any]
SPARE = {"name": "spare", "upstream_model": "tiny"}
"""Fake engines all know their model as tiny."""
UNAVAILABLE = {
    "not ready": refusal(503, "not_ready"),
    "broken": refusal(500, "engine_failed"),
    "cut": Script([CUT]),
    "not at this path": Script([b"<html>"], 404, "text/html"),
}


@pytest.mark.parametrize("failure", UNAVAILABLE)
async def test_the_fallback_answers_and_is_named(open_pair: Opener, protocol: str, failure: str) -> None:
    async with open_pair(protocol=protocol) as pair:
        house, spare = pair.house, pair.spare
        async with house.chat() as answer:
            assert (answer.status, HEADER in answer.headers) == (200, False)
        pair.tiny.script = UNAVAILABLE[failure]
        async with house.chat() as answer:
            assert answer.status == 200
            assert answer.headers[HEADER] == "spare"
            assert (await answer.json())["choices"][0]["message"]["content"] == "spare"
        assert spare.seen[-1].body["model"] == "tiny"
        first, second = await house.lines(2)
        assert (first["model"], second["model"], second["route"]) == ("tiny", "spare", "fallback")
        assert second["attempts"] == 2
        await house.at_rest()


async def test_a_stream_falls_back_before_its_first_event_and_never_later(open_pair: Opener) -> None:
    async with open_pair() as pair:
        pair.spare.script = stream(chunk("s"))
        pair.tiny.script = Script([b": nothing yet\n\n", CUT])
        async with pair.house.chat(stream=True) as answer:
            assert answer.headers[HEADER] == "spare"
            assert b'"s"' in await answer.content.read()
        pair.tiny.script = Script([chunk("a"), CUT])
        async with pair.house.chat(stream=True) as answer:
            assert HEADER not in answer.headers
            assert b"upstream" in await answer.content.read()
        assert len(pair.spare.seen) == 1
        await pair.house.at_rest()


async def test_when_no_engine_is_ready_the_fallback_is_asked_at_once(open_pair: Opener) -> None:
    async with open_pair() as pair:
        pair.house.gateway.replicas.list_members("tiny", ())
        await until(lambda: not pair.house.gateway.replicas.urls("tiny"))
        async with pair.house.chat() as answer:
            assert answer.headers[HEADER] == "spare"
        assert (await pair.house.line())["attempts"] == 1


@pytest.mark.parametrize(("on", "falls_back"), [(["unavailable"], False), (["unavailable", "full"], True)])
async def test_a_full_queue_is_a_reason_where_it_is_named(
    open_pair: Opener, on: list[str], *, falls_back: bool
) -> None:
    async with open_pair(on) as pair:
        pair.tiny.script = refusal(503, "overloaded")
        async with pair.house.chat() as answer:
            assert answer.status == (200 if falls_back else 503)
            assert (HEADER in answer.headers) is falls_back


@pytest.mark.parametrize("on", [["full"], []])
async def test_a_failure_that_is_no_reason_is_told(open_pair: Opener, on: list[str]) -> None:
    async with open_pair(on) as pair:
        pair.tiny.script = refusal(503, "not_ready")
        async with pair.house.chat() as answer:
            assert (answer.status, HEADER in answer.headers) == (503, False)
        assert not pair.spare.seen


async def test_a_mistake_of_the_callers_is_not_asked_twice(open_pair: Opener) -> None:
    async with open_pair() as pair:
        pair.tiny.script = refusal(400, "invalid_request")
        async with pair.house.chat() as answer:
            assert answer.status == 400
        assert not pair.spare.seen


async def test_tokens_that_were_reported_are_not_computed_again(open_pair: Opener) -> None:
    """A 503 that reports tokens is final, and charged."""
    async with open_pair() as pair:
        script = refusal(503, "not_ready")
        script.headers.update(unary().headers)
        pair.tiny.script = script
        async with pair.house.chat() as answer:
            assert answer.status == 503
        assert not pair.spare.seen
        assert (await pair.house.line())["settled_tokens"] == 13


async def test_fallbacks_are_asked_in_order_and_the_first_failure_is_told(open_pair: Opener) -> None:
    """Their own fallbacks are not followed: nobody is asked twice."""
    third = {"name": "third", "replicas": [DEAD], "fallback": ["tiny"]}
    async with open_pair(more=[third], fallback=["third", "spare"]) as pair:
        pair.tiny.script = refusal(503, "not_ready", "tiny is away")
        async with pair.house.chat() as answer:
            assert answer.headers[HEADER] == "spare"
        pair.spare.script = refusal(500, "engine_failed")
        async with pair.house.chat() as answer:
            assert (answer.status, HEADER in answer.headers) == (503, False)
            assert "tiny is away" in (await answer.json())["error"]["message"]
        assert len(pair.tiny.seen) == 2
        assert (await pair.house.lines(2))[1]["model"] == "tiny"
        await pair.house.at_rest()


FALLBACK_FAILS = {
    "is full": refusal(503, "overloaded", "the third is full"),
    "takes no more": refusal(429, "rate_limit_exceeded", "the third is full"),
    "has a shorter context": refusal(400, "context_length_exceeded", "the third is too small"),
    "knows another name": refusal(404, "model_not_found", "the third is another"),
}


@pytest.mark.parametrize("failure", FALLBACK_FAILS)
async def test_a_fallback_that_cannot_take_it_is_passed_over_whatever_its_reason(
    open_pair: Opener, failure: str
) -> None:
    """`fallback_on` is about the model that was asked for; a fallback either answers or does not."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(bundle=byte_bundle()))
        engine.script = FALLBACK_FAILS[failure]
        third = {"name": "third", "replicas": [engine.url]}
        pair = await stack.enter_async_context(open_pair(more=[third], fallback=["third", "spare"]))
        pair.tiny.script = refusal(503, "not_ready", "tiny is away")
        async with pair.house.chat() as answer:
            assert (answer.status, answer.headers[HEADER]) == (200, "spare")
        pair.spare.script = FALLBACK_FAILS[failure]
        async with pair.house.chat() as answer:
            assert (answer.status, HEADER in answer.headers) == (503, False)
            assert "tiny is away" in (await answer.json())["error"]["message"]
        assert len(engine.seen) == 2
        assert [line["settled_tokens"] for line in await pair.house.lines(2)] == [13, 0]
        await pair.house.at_rest()


# -- what it costs, and who may -------------------------------------------------------------------


async def test_tokens_are_charged_to_the_model_that_used_them(open_pair: Opener) -> None:
    limits = {"tokens_per_min": 10_000, "concurrent": 1}
    async with open_pair(tenant={"limits": limits}) as pair:
        pair.tiny.script = refusal(503, "not_ready")
        async with pair.house.chat(max_tokens=100) as answer:
            assert (answer.status, answer.headers[HEADER]) == (200, "spare")
            await answer.read()
        await pair.house.at_rest()
        store = pair.house.store
        rows = [row async for row in store.usage("acme", 0, 100_000)]
        used = {row.model: (row.totals.requests, row.totals.total_tokens) for row in rows}
        assert used == {"spare": (1, 13), "tiny": (1, 0)}
        assert store.ledger.settled == 13
        line = await pair.house.line()
        assert (line["settled_tokens"], line["model"]) == (13, "spare")


LOST = {
    "answers": {"tiny": (1, 118), "spare": (1, 13)},
    "is not there": {"tiny": (1, 118), "spare": (1, 0)},
    "is lost too": {"tiny": (1, 118), "spare": (1, 118)},
    "refused by its limits": {"tiny": (1, 118)},
    "not allowed": {"tiny": (1, 118)},
}
"""The requests and tokens of each model's usage, where `tiny` was lost with a request of 18 tokens and up to
100 more, by what became of its fallback."""


@pytest.mark.parametrize("spare", LOST)
async def test_what_was_lost_is_charged_to_the_model_that_lost_it(open_pair: Opener, spare: str) -> None:
    """Nobody knows what its engine computed, and another model's reservation does not pay for it."""
    limits = {"tokens_per_min": 50} if spare == "refused by its limits" else {}
    own = {"models": ["tiny"]} if spare == "not allowed" else {}
    tenant = {"limits": {"tokens_per_min": 10_000}, **own}
    async with open_pair(spare={"limits": limits}, tenant=tenant) as pair:
        pair.tiny.script = Script([CUT])
        if spare != "answers":
            pair.spare.script = Script([CUT]) if spare == "is lost too" else refusal(503, "not_ready")
        async with pair.house.chat(max_tokens=100) as answer:
            assert answer.status == (200 if spare == "answers" else 502)
            await answer.read()
        await pair.house.at_rest()
        store = pair.house.store
        rows = [row async for row in store.usage("acme", 0, 100_000)]
        assert {row.model: (row.totals.requests, row.totals.total_tokens) for row in rows} == LOST[spare]
        charged = sum(tokens for _, tokens in LOST[spare].values())
        line = await pair.house.line()
        assert (store.ledger.settled, line["settled_tokens"]) == (charged, charged)
        assert line["reserved_tokens"] >= charged, "also for what was charged first"


@pytest.mark.parametrize("spare", ["answers", "fails too", "refused by its limits"])
async def test_there_are_as_many_billing_lines_as_usage_has_requests(
    open_pair: Opener, tmp_path: Path, spare: str
) -> None:
    file = tmp_path / "lines.jsonl"
    limits = {"tokens_per_min": 50} if spare == "refused by its limits" else {}
    async with open_pair(spare={"limits": limits}, accounting={"file": str(file)}) as pair:
        pair.tiny.script = refusal(503, "not_ready")
        if spare == "fails too":
            pair.spare.script = refusal(503, "not_ready")
        for _ in range(3):
            async with pair.house.chat(max_tokens=100) as answer:
                await answer.read()
        await pair.house.at_rest()
        rows = [row async for row in pair.house.store.usage("acme", 0, 100_000)]
        counted = Counter({row.model: row.totals.requests for row in rows})
        await until(lambda: file.read_bytes().count(b"\n") >= counted.total())
        lines = [msgspec.json.decode(line, type=BillingLine) for line in file.read_bytes().splitlines()]
        assert Counter(line.model for line in lines) == counted
        assert sum(line.prompt_tokens + line.completion_tokens for line in lines) == sum(
            row.totals.total_tokens for row in rows
        )


async def test_the_fallbacks_own_limits_hold(open_pair: Opener) -> None:
    """Its quota is not gone round by way of another model."""
    async with open_pair(spare={"limits": {"tokens_per_min": 50}}) as pair:
        pair.tiny.script = refusal(503, "not_ready")
        async with pair.house.chat(max_tokens=100) as answer:
            assert answer.status == 503, "the failure of the model that was asked for"
        assert not pair.spare.seen
        await pair.house.at_rest()
        async with pair.house.chat(max_tokens=10) as answer:
            assert answer.status == 200
        await pair.house.at_rest()


async def test_a_tenant_that_may_not_use_the_fallback_is_told_of_the_failure(open_pair: Opener) -> None:
    async with open_pair(tenant={"models": ["tiny"]}) as pair:
        pair.tiny.script = refusal(503, "not_ready")
        async with pair.house.chat() as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "not_ready")
        assert not pair.spare.seen
        await pair.house.at_rest()


async def test_a_foreign_engine_may_be_the_fallback(open_pair: Opener) -> None:
    """It is sent OpenAI's fields alone, under its own name."""
    async with open_pair(spare_bundle=None) as pair:
        pair.tiny.script = refusal(503, "not_ready")
        async with pair.house.chat(priority=3, colour=1) as answer:
            assert answer.headers[HEADER] == "spare"
            assert answer.headers[IGNORED_FIELDS_HEADER] == "priority, colour"
        sent = pair.spare.seen[-1]
        assert sent.body["model"] == "tiny"
        assert not {"penstock", "priority"} & sent.body.keys()
        assert "penstock" in pair.tiny.seen[-1].body
        pair.spare.script = refusal(503, "not_ready")
        async with pair.house.chat(priority=3, colour=1) as answer:
            assert answer.headers[IGNORED_FIELDS_HEADER] == "colour", "by the engine whose failure is told"
        await pair.house.at_rest()


async def test_a_prompt_that_does_not_fit_the_fallback_is_not_sent_there(open_pair: Opener) -> None:
    async with open_pair() as pair:
        spare = pair.house.gateway.config.models[1]
        pair.house.gateway.engines.of(spare).room = Room(5)
        pair.tiny.script = refusal(503, "not_ready")
        async with pair.house.chat() as answer:
            assert answer.status == 503
        assert not pair.spare.seen


@pytest.mark.parametrize(
    ("fallback", "problem"),
    [
        (["tiny"], "models.tiny.fallback: 'tiny': is the model itself"),
        (["nobody"], "models.tiny.fallback: 'nobody': there is no such model"),
        (["spare", "spare"], "models.tiny.fallback: names a model twice"),
        (list("abcde"), "models[0].fallback"),
    ],
)
def test_a_fallback_that_cannot_be_is_named(fallback: list[str], problem: str) -> None:
    models = [
        {"name": "tiny", "replicas": [DEAD], "fallback": fallback},
        {"name": "spare", "replicas": [DEAD]},
    ]
    with pytest.raises(ConfigError) as caught:
        load(settings(models=models), {})
    assert problem in str(caught.value)
