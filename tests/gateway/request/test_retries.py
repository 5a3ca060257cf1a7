"""Requests that are sent again: when, where, how often, and what they are charged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.relay import http1
from gateway.request.dispatch import Attempt
from gateway.routing.retries import FLOOR, PART_PERCENT, RetryBudget
from shared.wire import sse
from shared.wire.errors import EngineFailed, UpstreamLost
from tests.gateway.conftest import House, Open, error_of, until
from tests.gateway.fake_engine import (
    CUT,
    HEADERS,
    FakeEngine,
    Script,
    Seen,
    byte_bundle,
    chunk,
    closing,
    refusal,
    stream,
    unary,
)

pytestmark = pytest.mark.both_protocols

# -- the budget -----------------------------------------------------------------------------------


STEPS = st.tuples(st.sampled_from(["arrive", "leave", "take", "give"]), st.sampled_from("abc"))


@given(st.lists(STEPS, max_size=200))
@example([("take", "a")] * 4 + [("take", "b")] * 2 + [("give", "b"), ("take", "a"), ("take", "b")])
def test_retries_are_at_most_a_fifth_of_the_active_or_three(steps: list[tuple[str, str]]) -> None:
    budget, held = RetryBudget(), Counter[str]()
    for step, tenant in steps:
        if step == "arrive":
            budget.active += 1
        elif step == "leave" and budget.active:
            budget.active -= 1
        elif step == "take":
            most, before = max(FLOOR, budget.active * PART_PERCENT // 100), budget.retrying
            took = budget.take(tenant)
            assert took == (before < most or (not held[tenant] and before < 2 * most))
            held[tenant] += took
        elif step == "give" and held[tenant]:
            budget.give_back(tenant)
            held[tenant] -= 1
        assert budget.retrying == held.total()


def test_a_few_requests_may_all_be_retried_and_many_may_not() -> None:
    budget = RetryBudget()
    budget.active = 1
    assert [budget.take("a") for _ in range(FLOOR + 1)] == [True] * FLOOR + [False]
    budget.active = 200
    assert sum(budget.take("a") for _ in range(200)) == 40 - FLOOR


@pytest.mark.parametrize("active", [5, 200])
def test_a_tenant_that_loses_many_leaves_a_place_to_each_other(active: int) -> None:
    budget = RetryBudget()
    budget.active = active
    assert sum(budget.take("flood") for _ in range(active)) == min(active, budget.most)
    assert [budget.take("victim") for _ in range(2)] == [True, False]
    assert sum(budget.take(f"tenant {i}") for i in range(active)) == min(active, budget.most - 1)
    budget.give_back("victim")
    assert not budget.take("flood")
    assert budget.take("victim")


# -- attempts that are ended from outside ---------------------------------------------------------


async def test_an_attempt_that_is_given_up_ends_as_lost() -> None:
    attempt = Attempt()

    async def wait() -> None:
        with attempt:
            asyncio.get_running_loop().call_soon(attempt.give_up)
            asyncio.get_running_loop().call_soon(attempt.give_up)
            await asyncio.Event().wait()

    with pytest.raises(UpstreamLost):
        await wait()
    attempt.give_up()
    await asyncio.sleep(0)  # nothing is left to cancel


async def test_a_cancellation_from_elsewhere_wins() -> None:
    async def work() -> None:
        with Attempt() as attempt:
            attempt.give_up()
            task.cancel()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task


# -- at the gateway -------------------------------------------------------------------------------


@pytest.fixture
async def other() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(bundle=byte_bundle()) as engine:
        yield engine


def answer_in_turn(engines: Iterable[FakeEngine], *scripts: Script) -> None:
    """The first request is answered with the first script, whichever engine it comes to, and so on."""
    left = list(scripts)

    def answer(_: Seen) -> Script:
        return left.pop(0)

    for engine in engines:
        engine.script = answer


FAILURES = {
    "a reset before the headers": Script([CUT, HEADERS]),
    "a reset after the headers": Script([HEADERS, CUT]),
    "a reset within the first event": Script([HEADERS, b"data: half", CUT]),
    "an end without an event": Script([HEADERS]),
    "an error of the engine's": refusal(500, "engine_failed"),
    "an error of a server's": Script([b"<html>"], 502, "text/html"),
    "an error event": Script([sse.error_event(EngineFailed("The engine failed."))]),
    "a full queue": refusal(503, "queue_full"),
}


@pytest.mark.parametrize("failing", FAILURES.values(), ids=FAILURES)
async def test_what_fails_before_the_first_event_is_sent_to_another(
    open_house: Open, other: FakeEngine, failing: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "IDLE_S", 0.0)  # a connection that is kept may be closed while it is used
    house: House = await open_house(other.url)
    answer_in_turn((house.engine, other), failing, stream(chunk("a"), end=closing(10, 1)))
    async with house.chat(stream=True) as answer:
        assert answer.status == 200
        assert (await answer.read()).startswith(chunk("a"))
    line = await house.line()
    assert (line["attempts"], line["route"], line["end_reason"]) == (2, "retry", "ok")
    assert line["settled_tokens"] == 11, "of the one that answered, once"
    [failed] = line["failed_attempts"]
    assert {failed["replica"], line["replica"]} == {house.engine.url[7:], other.url[7:]}
    assert 0.0 <= failed["connect_ms"] <= failed["takes_ms"] <= line["total_ms"]
    assert failed["code"] in ("upstream_failed", "engine_failed", "queue_full")
    assert len(house.engine.seen) == len(other.seen) == 1
    await house.at_rest()


async def test_after_the_first_event_nothing_is_sent_again(open_house: Open, other: FakeEngine) -> None:
    house: House = await open_house(other.url)
    answer_in_turn((house.engine, other), stream(chunk("a"), CUT))
    async with house.chat(stream=True) as answer:
        assert b"upstream_failed" in await answer.read()
    assert (await house.line())["attempts"] == 1
    await house.at_rest()


async def test_a_unary_answer_that_has_begun_is_not_computed_again(
    open_house: Open, other: FakeEngine
) -> None:
    house: House = await open_house(other.url)
    begun = Script([HEADERS, b"{", CUT], 200, "application/json", unary().headers)
    answer_in_turn((house.engine, other), begun)
    async with house.chat() as answer:
        assert answer.status == 502
    assert (await house.line())["attempts"] == 1
    await house.at_rest()


async def test_a_request_that_breaks_engines_breaks_two_at_most(open_house: Open, other: FakeEngine) -> None:
    async with FakeEngine(bundle=byte_bundle()) as third:
        house: House = await open_house(other.url, third.url)
        answer_in_turn((house.engine, other, third), *[Script([HEADERS, CUT])] * 2)
        async with house.chat(stream=True) as answer:
            assert answer.status == 502
        line = await house.line()
        assert line["attempts"] == 2
        assert [one["code"] for one in line["failed_attempts"]] == ["upstream_failed"] * 2
        assert line["settled_tokens"] == line["reserved_tokens"], "once, though two have worked on it"
        await house.at_rest()


async def test_what_one_replica_lost_is_charged_though_the_others_refuse(
    open_house: Open, other: FakeEngine
) -> None:
    async with FakeEngine(bundle=byte_bundle()) as third:
        house: House = await open_house(other.url, third.url)
        refused = refusal(503, "not_ready")
        answer_in_turn((house.engine, other, third), Script([HEADERS, CUT]), refused, refused)
        async with house.chat(stream=True) as answer:
            assert answer.status == 503
        line = await house.line()
        assert line["attempts"] == 3
        assert line["settled_tokens"] == line["reserved_tokens"] > 0
        await house.at_rest()


async def test_when_the_budget_is_used_up_failures_are_answered(open_house: Open, other: FakeEngine) -> None:
    """Of many that fail at once a few are retried; the others' callers are told."""
    house: House = await open_house(other.url)
    fail, go_on = asyncio.Event(), asyncio.Event()
    count, engines = 2 * FLOOR, (house.engine, other)
    good = stream(go_on, chunk("a"), end=closing(10, 1))
    answer_in_turn(engines, *[Script([HEADERS, fail, CUT])] * count, *[good] * FLOOR)

    async def ask(i: int) -> int:
        async with house.chat(stream=True, prompt_cache_key=f"{i}") as answer:
            await answer.read()
            return answer.status

    asked = [asyncio.create_task(ask(i)) for i in range(count)]
    await until(lambda: sum(len(engine.seen) for engine in engines) == count)
    budget = house.gateway._edge._pipeline._dispatcher._budgets["tiny"]
    assert budget.active == count
    fail.set()
    await until(lambda: sum(one.done() for one in asked) == count - FLOOR)
    assert budget.retrying == budget.active == FLOOR
    go_on.set()
    statuses = [await one for one in asked]
    assert (statuses.count(200), statuses.count(502)) == (FLOOR, count - FLOOR)
    assert (budget.active, budget.retrying) == (0, 0)
    await house.at_rest()


async def test_no_more_than_the_budget_is_retried_at_a_time(
    open_house: Open, other: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    house: House = await open_house(other.url)
    monkeypatch.setattr(RetryBudget, "take", lambda *_: False)
    answer_in_turn((house.engine, other), Script([HEADERS, CUT]))
    async with house.chat(stream=True) as answer:
        assert answer.status == 502
        assert (await error_of(answer))["code"] == "upstream_failed"
    assert (await house.line())["attempts"] == 1
    await house.at_rest()


async def test_a_replica_that_was_sent_nothing_needs_no_budget(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RetryBudget, "take", lambda *_: False)
    house: House = await open_house(*(f"http://127.0.0.1:{port}" for port in (1, 2, 3)))
    for i in range(8):
        async with house.chat(stream=True, prompt_cache_key=f"{i}") as answer:
            assert answer.status == 200
    lines = await house.lines(8)
    assert max(line["attempts"] for line in lines) > 1
    await house.at_rest()


async def test_the_body_is_held_until_the_first_event(house: House) -> None:
    """It may be sent again until then, and its memory is counted for as long."""
    go_on, last = asyncio.Event(), asyncio.Event()
    memory = house.gateway._edge._pipeline._memory
    house.engine.script = stream(go_on, chunk("a"), last)

    async def ask() -> None:
        async with house.chat(stream=True) as answer:
            assert memory.held == 0
            last.set()
            await answer.read()

    asked = asyncio.create_task(ask())
    await house.engine.arrived.wait()
    assert memory.held > 0
    go_on.set()
    await asked
    await house.at_rest()
