"""Hedging: a second replica where the first is slow to begin; one answer, one charge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from gateway.relay.upstream import Answer
from gateway.request.hedging import failure_of, race, succeeded
from gateway.routing.health import SAMPLES_MAX
from gateway.routing.retries import RetryBudget
from shared.wire.errors import UpstreamLost
from tests.gateway.conftest import OTHER_KEY, House, Open, until
from tests.gateway.fake_engine import (
    CUT,
    HEADERS,
    FakeEngine,
    Script,
    byte_bundle,
    chunk,
    closing,
    refusal,
    stream,
)
from tests.gateway.request.test_disconnect import RawClient, body

pytestmark = pytest.mark.both_protocols

HEDGED = {"default": {"hedge": True}}
GOOD = stream(chunk("a"), end=closing(10, 1))

# -- the race -------------------------------------------------------------------------------------


async def value(name: str, *events: asyncio.Event) -> str:
    for event in events:
        await event.wait()
    return name


async def failing(*events: asyncio.Event) -> str:
    for event in events:
        await event.wait()
    raise UpstreamLost("gone")


async def turns_later() -> str:
    for _ in range(5):
        await asyncio.sleep(0)
    return "other"


async def test_a_lead_in_time_starts_no_other() -> None:
    lead = asyncio.create_task(value("lead"))
    assert await race(lead, 30.0, pytest.fail) is lead


@pytest.mark.parametrize("lead_fails", [False, True])
async def test_the_first_to_succeed_wins_and_the_other_is_over(lead_fails: bool) -> None:
    begun = asyncio.Event()
    lead = asyncio.create_task(failing(begun) if lead_fails else value("lead", asyncio.Event()))
    started: list[asyncio.Task[str]] = []

    def start() -> asyncio.Task[str]:
        begun.set()
        started.append(asyncio.create_task(turns_later()))
        return started[0]

    assert await race(lead, 0.0, start) is started[0]
    assert lead.done()
    assert not succeeded(lead)
    assert (failure_of(lead) is not None) == lead_fails


async def test_where_none_succeeds_the_lead_is_returned() -> None:
    lead = asyncio.create_task(failing())
    assert await race(lead, 30.0, pytest.fail) is lead
    never = asyncio.Event()
    hanging = asyncio.create_task(value("lead", never))

    def nobody() -> None:
        hanging.cancel()

    assert await race(hanging, 0.0, nobody) is hanging


async def test_leaving_a_race_ends_both() -> None:
    never, tasks = asyncio.Event(), list[asyncio.Task[str]]()

    def start() -> asyncio.Task[str]:
        tasks.append(asyncio.create_task(value("other", never)))
        return tasks[-1]

    tasks.append(asyncio.create_task(value("lead", never)))
    racing = asyncio.create_task(race(tasks[0], 0.0, start))
    await until(lambda: len(tasks) == 2)
    racing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await racing
    assert all(task.cancelled() for task in tasks)


# -- at the gateway -------------------------------------------------------------------------------


@pytest.fixture
async def other() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(bundle=byte_bundle()) as engine:
        yield engine


async def hedging(open_house: Open, other: FakeEngine) -> tuple[House, FakeEngine, FakeEngine]:
    """A gateway that hedges, and knows how long first events take: no time. The engine that it asks first,
    and the other."""
    house: House = await open_house(other.url, tiers=HEDGED)
    house.engine.script = other.script = GOOD
    async with house.chat(stream=True) as answer:
        await answer.read()
    first_events = house.gateway.replicas.first_events("tiny")
    for _ in range(SAMPLES_MAX):
        first_events.add(1)
    assert first_events.p95_ms == 1
    home = (await house.line())["replica"]
    lead, second = (house.engine, other) if home == house.engine.url[7:] else (other, house.engine)
    lead.seen.clear()
    return house, lead, second


async def line_of(house: House) -> dict[str, Any]:
    """The completed line of the request after `hedging`'s."""
    return (await house.lines(2))[1]


async def test_the_second_answers_where_the_first_is_slow(open_house: Open, other: FakeEngine) -> None:
    house, lead, second = await hedging(open_house, other)
    lead.script = Script([HEADERS, asyncio.Event()])
    async with house.chat(stream=True) as answer:
        assert (await answer.read()).startswith(chunk("a"))
    line = await line_of(house)
    assert (line["route"], line["attempts"], line["settled_tokens"]) == ("hedge", 2, 11)
    assert line["replica"] == second.url[7:]
    assert "failed_attempts" not in line
    await lead.seen[0].cancelled.wait()
    assert not second.seen[0].cancelled.is_set()
    await house.at_rest()


async def test_a_loser_ends_alone_and_another_tenants_stream_beside_it_is_whole(
    open_house: Open, other: FakeEngine
) -> None:
    house, one, another = await hedging(open_house, other)
    go_on, begin, victim = asyncio.Event(), asyncio.Event(), {"authorization": f"Bearer {OTHER_KEY}"}
    one.script = another.script = stream(chunk("a"), go_on, chunk("b"), end=closing(10, 2))
    async with house.chat(stream=True, headers=victim) as beside:
        assert await beside.content.readuntil(b"\n\n") == chunk("a")
        seen, other_seen = len(one.seen), len(another.seen)
        one.script = stream(begin, chunk("c"), end=closing(10, 1))
        another.script = Script([HEADERS, asyncio.Event()])
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(house.chat(stream=True).__aenter__())
            await until(lambda: len(one.seen) > seen and len(another.seen) > other_seen)
            begin.set()
        assert (await asked.result().read()).startswith(chunk("c"))
        await another.seen[other_seen].cancelled.wait()
        go_on.set()
        assert (await beside.content.read()).startswith(chunk("b"))
    _, hedged, whole = await house.lines(3)
    assert (hedged["tenant"], hedged["attempts"], hedged["settled_tokens"]) == ("acme", 2, 11)
    assert (whole["tenant"], whole["end_reason"], whole["settled_tokens"]) == ("other", "ok", 12)
    await house.at_rest()


async def test_the_first_may_still_win(open_house: Open, other: FakeEngine) -> None:
    house, lead, second = await hedging(open_house, other)
    go_on = asyncio.Event()
    lead.script = stream(go_on, chunk("a"), end=closing(10, 1))
    second.script = Script([HEADERS, asyncio.Event()])
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(house.chat(stream=True).__aenter__())
        await until(lambda: len(lead.seen) + len(second.seen) == 2)
        go_on.set()
    assert (await asked.result().read()).startswith(chunk("a"))
    line = await line_of(house)
    assert (line["attempts"], line["settled_tokens"], line["end_reason"]) == (2, 11, "ok")
    assert (line["route"], line["replica"]) == ("affinity", lead.url[7:])
    await second.seen[0].cancelled.wait()
    await house.at_rest()


async def test_a_second_that_fails_harms_nothing_and_is_not_asked_again(
    open_house: Open, other: FakeEngine
) -> None:
    house, lead, second = await hedging(open_house, other)
    go_on = asyncio.Event()
    lead.script, second.script = stream(go_on, chunk("a"), end=closing(10, 1)), Script([CUT])
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(house.chat(stream=True).__aenter__())
        await until(lambda: any(seen.finished.is_set() for seen in second.seen) and bool(lead.seen))
        go_on.set()
    assert (await asked.result().read()).startswith(chunk("a"))
    line = await line_of(house)
    assert (line["attempts"], line["settled_tokens"]) == (2, 11)
    failed = [(one["replica"], one["code"]) for one in line.get("failed_attempts", ())]
    assert failed in ([], [(second.url[7:], "upstream_failed")]), "if seen in time"
    await house.at_rest()


@pytest.mark.parametrize("first_refuses", [False, True])
async def test_where_both_fail_the_reservation_is_charged_once(
    open_house: Open, other: FakeEngine, first_refuses: bool
) -> None:
    """Also where the first has computed nothing: what the second did before it broke off, nobody knows."""
    house, lead, second = await hedging(open_house, other)
    fail = asyncio.Event()
    lead.script = second.script = Script([HEADERS, fail, CUT])
    if first_refuses:
        lead.script = Script([fail, *refusal(503, "not_ready").steps], 503, "application/json")
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(house.chat(stream=True).__aenter__())
        await until(lambda: len(lead.seen) + len(second.seen) == 2)
        fail.set()
    assert asked.result().status == (503 if first_refuses else 502)
    asked.result().release()
    line = await line_of(house)
    assert line["settled_tokens"] == line["reserved_tokens"] > 0
    budget = house.gateway._edge._pipeline._dispatcher._budgets["tiny"]
    assert (budget.active, budget.retrying) == (0, 0)
    await house.at_rest()


async def test_a_client_that_leaves_ends_both(open_house: Open, other: FakeEngine) -> None:
    house, lead, second = await hedging(open_house, other)
    lead.script = second.script = Script([HEADERS, asyncio.Event()])
    client = await RawClient.of(house)
    client.post(body(stream=True))
    await until(lambda: len(lead.seen) + len(second.seen) == 2)
    client.leave()
    for seen in (*lead.seen, *second.seen):
        await seen.cancelled.wait()
    assert (await line_of(house))["end_reason"] == "client_cancel"
    await house.at_rest()


async def leaves_with_nothing_held(house: House, other: FakeEngine) -> None:
    """Ask for a stream whose request is cancelled on the way, and find nothing left of it."""
    house.engine.seen.clear()
    other.seen.clear()
    with pytest.raises(aiohttp.ClientError):
        async with house.chat(stream=True) as answer:
            await answer.read()
    assert (await line_of(house))["end_reason"] == "client_cancel"
    [seen], [other_seen] = house.engine.seen, other.seen
    await until(lambda: seen.cancelled.is_set() and other_seen.cancelled.is_set() and not other.active)
    await house.at_rest()
    assert house.gateway._upstream.streams == 0


async def test_a_client_that_leaves_when_the_second_has_won_leaves_no_stream(
    open_house: Open, other: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, lead, second = await hedging(open_house, other)
    lead.script = Script([HEADERS, asyncio.Event()])
    second.script = Script([HEADERS, chunk("b"), asyncio.Event()])

    def leaving(task: asyncio.Task[Any]) -> bool:
        if found := succeeded(task):
            monkeypatch.undo()
            racing = asyncio.current_task()
            assert racing is not None
            asyncio.get_running_loop().call_soon(racing.cancel)
        return found

    monkeypatch.setattr("gateway.request.hedging.succeeded", leaving)
    await leaves_with_nothing_held(house, other)


async def test_a_client_that_leaves_while_the_loser_is_closed_leaves_no_stream(
    open_house: Open, other: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have begun, and each place is given back once."""
    house, lead, second = await hedging(open_house, other)
    lead.script = second.script = Script([HEADERS, chunk("b"), asyncio.Event()])
    aclose = Answer.aclose

    async def both(lead: asyncio.Task[Any], _: float, start: Callable[[], Any]) -> asyncio.Task[Any]:
        second: asyncio.Task[Any] = start()
        await asyncio.wait([lead, second])
        return second

    def leaving(answer: Answer) -> Awaitable[None]:
        monkeypatch.undo()
        closing = asyncio.current_task()
        assert closing is not None
        closing.cancel()
        return aclose(answer)

    monkeypatch.setattr("gateway.request.dispatch.race", both)
    monkeypatch.setattr(Answer, "aclose", leaving)
    await leaves_with_nothing_held(house, other)


async def test_without_a_place_in_the_budget_there_is_no_second(
    open_house: Open, other: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[bool] = []

    def refuse(_: RetryBudget, _tenant: str) -> bool:
        refused.append(True)
        return False

    monkeypatch.setattr(RetryBudget, "take", refuse)
    house, lead, second = await hedging(open_house, other)
    go_on = asyncio.Event()
    lead.script = stream(go_on, chunk("a"))
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(house.chat(stream=True).__aenter__())
        await until(lambda: bool(refused))
        go_on.set()
    await asked.result().read()
    assert (await line_of(house))["attempts"] == 1
    assert not second.seen
    await house.at_rest()


@pytest.mark.parametrize("streaming", [False, True])
async def test_what_is_no_stream_and_a_pool_of_one_are_not_hedged(open_house: Open, streaming: bool) -> None:
    house: House = await open_house(tiers=HEDGED)
    for _ in range(SAMPLES_MAX):
        house.gateway.replicas.first_events("tiny").add(0)
    async with house.chat(stream=streaming) as answer:
        await answer.read()
    assert (await house.line())["attempts"] == 1
    await house.at_rest()
