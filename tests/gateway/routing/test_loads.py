"""What engines say of their load reaches the choice of a replica, and each request counts once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api.ask.admission import service_class
from engine.core.queue.policy import WEIGHTS as ENGINE_WEIGHTS
from gateway.app import Gateway
from gateway.config.whole import ModelConfig, load
from gateway.routing.affinity import class_of
from gateway.routing.health import Outcome
from gateway.routing.maglev import key_of
from gateway.routing.members import MemberPhase
from gateway.routing.policy import (
    LATE_MS,
    NEVER_MS,
    REQUEST_LEN,
    SLOW_START_MS,
    WEIGHTS,
    Affinity,
    View,
    loads,
)
from gateway.routing.replicas import ENGINE_DRAIN_S, Placement, Replica, Replicas
from shared.apis.chat import ChatRequest
from shared.apis.chat_messages import ChatMessage
from shared.wire.load_report import (
    DEFAULT,
    FLEX,
    IDLE_INTERVAL_MS,
    INTERVAL_MS,
    PRIORITY,
    REPORT_LEN_MAX,
    LoadReport,
    parse_load,
)
from shared.wire.sse import DONE, Closing, closing_comment
from tests.fakes import VirtualClock
from tests.gateway.conftest import KEY, settings, until
from tests.gateway.fake_engine import COUNTED, HEADERS, FakeEngine, Script, byte_bundle, chunk, stream, unary

NOW_MS = 1_000_000


def view(*reports: LoadReport, since_ms: int = NOW_MS - SLOW_START_MS) -> View:
    made = View(since_ms)
    for report in reports:
        made.report(report, NOW_MS)
    return made


def load_of(one: View, service_class: int = DEFAULT) -> int:
    return loads([one], NOW_MS, service_class)[0]


# -- what is known --------------------------------------------------------------------------------


def test_the_weights_are_the_engines() -> None:
    assert tuple(ENGINE_WEIGHTS.values()) == WEIGHTS
    assert tuple(ENGINE_WEIGHTS) == (FLEX, DEFAULT, PRIORITY)


@pytest.mark.parametrize("tier_max", ["flex", "default", "priority"])
def test_a_request_has_the_class_that_the_engine_gives_it(tier_max: Any) -> None:
    messages = [ChatMessage("user", "a")]
    asked: Any = product([None, "auto", "default", "flex", "priority"], [None, 0, -3, 3])
    for tier, priority in asked:
        request = ChatRequest(model="m", messages=messages, service_tier=tier, priority=priority)
        assert class_of(request, tier_max) == service_class(request, tier_max), (tier, priority)


def test_a_request_waits_for_its_class_and_higher_ones_and_a_part_of_the_lower() -> None:
    busy = view(LoadReport((16_000, 1_600, 160)))
    assert load_of(busy, FLEX) == 16_000 + 1_600 + 160
    assert load_of(busy, DEFAULT) == 4_000 + 1_600 + 160
    assert load_of(busy, PRIORITY) == 992 + 400 + 160


def test_what_was_sent_is_weighed_by_its_class_as_well() -> None:
    own = view(LoadReport())
    own.enter(FLEX, 1_600)
    assert [load_of(own, each) - REQUEST_LEN for each in (FLEX, DEFAULT, PRIORITY)] == [1_600, 400, 99]
    own.count(FLEX, 1_600)
    own.leave()
    assert own.is_idle


def test_sequences_of_all_workers_count_and_ones_own_not_twice() -> None:
    shared = view(LoadReport((0, 0, 0), 5))
    shared.enter(DEFAULT, 0)
    assert load_of(shared) == 5 * REQUEST_LEN
    for _ in range(6):
        shared.enter(DEFAULT, 0)
    assert load_of(shared) == 7 * REQUEST_LEN


def test_what_this_worker_sent_to_a_silent_replica_stays_known() -> None:
    views = [view(LoadReport((0, tokens, 0))) for tokens in (1_000, 2_000, 3_000)]
    silent = view(LoadReport((0, 50_000, 0)))
    silent.fresh_until_ms -= 2 * LATE_MS
    silent.enter(DEFAULT, 700)
    assert loads([*views, silent], NOW_MS)[3] == 2_000 + 700 + REQUEST_LEN


@pytest.mark.parametrize("interval_ms", [INTERVAL_MS, IDLE_INTERVAL_MS])
def test_a_report_is_believed_for_three_of_the_intervals_that_it_states(interval_ms: int) -> None:
    views = [view(LoadReport((0, tokens, 0), interval_ms=60_000)) for tokens in (1_000, 2_000, 3_000)]
    views.append(view(LoadReport(interval_ms=interval_ms)))
    believed_ms = 3 * interval_ms
    seen = [loads(views, NOW_MS + ms)[3] for ms in (0, believed_ms, believed_ms + LATE_MS)]
    assert seen == [0, 0, 2_000]


def test_a_report_that_is_too_long_is_none() -> None:
    report = '{"waiting":[0,7,0],"sequences":1}'
    assert parse_load(report.ljust(REPORT_LEN_MAX)) is not None
    assert parse_load(report.ljust(REPORT_LEN_MAX + 1)) is None


def test_an_engine_that_states_no_interval_is_believed_as_before() -> None:
    report = parse_load('{"waiting":[0,7,0],"sequences":1}')
    assert report is not None
    assert view(report).fresh_until_ms == NOW_MS + LATE_MS


def test_a_later_report_takes_back_how_long_the_one_before_is_believed() -> None:
    """An idle engine that gets work is cut off after it has said so."""
    seen = view(LoadReport(interval_ms=IDLE_INTERVAL_MS), LoadReport((0, 7, 0), 1))
    assert seen.fresh_until_ms == NOW_MS + LATE_MS


def test_an_idle_engine_repeats_that_it_drains_in_time() -> None:
    assert 3 * IDLE_INTERVAL_MS < 1000 * ENGINE_DRAIN_S


def test_a_new_replica_is_no_better_than_the_median_and_no_better_than_it_says() -> None:
    views = [view(LoadReport((0, tokens, 0))) for tokens in (1_000, 2_000, 3_000)]
    idle, busy = (view(LoadReport((0, tokens, 0)), since_ms=NOW_MS) for tokens in (0, 9_000))
    assert loads([*views, idle, busy], NOW_MS)[3:] == [2_000, 9_000]


def test_one_that_never_reported_is_believed() -> None:
    foreign = view()
    assert not foreign.reports
    assert foreign.fresh_until_ms == NEVER_MS
    foreign.enter(DEFAULT, 100)
    assert loads([view(LoadReport((0, 5_000, 0))), foreign], NOW_MS)[1] == 100 + REQUEST_LEN


@dataclass
class Model:
    """A replica that queues what arrives, in order with its reports, which arrive late."""

    queued: int = 0
    on_the_way: int = 0


@given(st.lists(st.tuples(st.sampled_from(["send", "arrive", "push", "compute"]), st.integers(1, 500))))
def test_no_request_counts_twice_or_never(steps: list[tuple[str, int]]) -> None:
    """Requests travel to the replica and its reports back, each in order. When all has arrived, the load is
    what is there; on the way, it is never less than what has been sent and not been reported as queued."""
    seen, there = view(LoadReport()), 0
    travelling: list[int] = []
    for what, tokens in steps:
        match what:
            case "send":
                seen.enter(DEFAULT, tokens)
                travelling.append(tokens)
            case "arrive" if travelling:
                there += (arrived := travelling.pop(0))
                seen.report(LoadReport((0, there, 0)), NOW_MS)  # the headers of its stream
                seen.count(DEFAULT, arrived)
            case "push":
                seen.report(LoadReport((0, there, 0)), NOW_MS)
            case "compute":
                there = max(0, there - tokens)
                seen.report(LoadReport((0, there, 0)), NOW_MS)
        assert load_of(seen) - REQUEST_LEN * seen.requests == there + sum(travelling)


# -- the replicas of a gateway --------------------------------------------------------------------


def replicas(*urls: str) -> tuple[Replicas, VirtualClock]:
    clock = VirtualClock()
    return Replicas([ModelConfig(name="m", replicas=urls)], clock), clock


def take(pool: Replicas, tokens: int = 1, session: int = 0) -> Placement:
    place = pool.place("m", Affinity(0, session or key_of(b"%d" % pool.next_turn()), 0, 0, tokens))
    assert place is not None
    return place


def test_a_reported_queue_moves_requests_away() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    home = take(pool, session=7).replica
    pool.observe(home, LoadReport((0, 5_000, 0)))
    assert take(pool, session=7).replica is not home
    pool.observe(home, LoadReport())
    assert take(pool, session=7).replica is home


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a:81", ("http", "a", 81)),
        ("http://A/", ("http", "a", 80)),
        ("https://a/v2", ("https", "a", 443)),
        ("http://[::1]:81", ("http", "::1", 81)),
    ],
)
def test_a_pushed_report_finds_its_replica(url: str, origin: tuple[str, str, int]) -> None:
    pool, _ = replicas(url, "http://other:1")
    pool.observe_origin(*origin, LoadReport((0, 5_000, 0)))
    pool.observe_origin("http", "nobody", 9, LoadReport((0, 9_000, 0)))
    told = [one for one in pool._by_url.values() if one.view.reports]
    assert [one.url for one in told] == [url.rstrip("/")]


def test_a_replica_that_drains_gets_nothing_new_until_it_says_otherwise() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    begun = take(pool, session=7)
    pool.observe(begun.replica, LoadReport(draining=True))
    assert all(take(pool).replica is not begun.replica for _ in range(20))
    pool.observe(begun.replica, LoadReport())
    assert take(pool, session=7).replica is begun.replica
    pool.release(begun, Outcome.WORKED)


async def test_a_word_that_was_not_repeated_does_not_count_any_more() -> None:
    """The connection went with the engine, and another engine may be there by now."""
    pool, clock = replicas("http://a:1", "http://b:1")
    first = take(pool).replica
    sweeping = asyncio.create_task(pool.sweep())
    pool.observe(first, LoadReport(draining=True))
    assert first.phase is MemberPhase.DRAINING
    for _ in range(int(ENGINE_DRAIN_S) + 1):
        await until(lambda: clock.sleeping > 0)
        clock.advance(1.0)
    await until(lambda: first.phase is MemberPhase.READY)
    sweeping.cancel()


def test_the_last_one_is_asked_although_it_drains() -> None:
    pool, _ = replicas("http://a:1", "http://b:1")
    for one in pool._by_url.values():
        pool.observe(one, LoadReport(draining=True))
    assert {take(pool).replica.id for _ in range(20)} == {"b:1"}


# -- over the wire --------------------------------------------------------------------------------


@dataclass
class Fleet:
    """A gateway before two fake engines."""

    gateway: Gateway
    engines: dict[str, FakeEngine]
    client: aiohttp.ClientSession

    def ask(self, text: str = "hi", **fields: Any) -> Any:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        url = f"http://127.0.0.1:{self.gateway.port}/v1/chat/completions"
        return self.client.post(url, json=body, headers={"authorization": f"Bearer {KEY}"})

    def replica(self, engine: FakeEngine) -> Replica:
        return self.gateway.replicas._by_url[engine.url]

    def say(self, script: Script | Callable[[Any], Script]) -> None:
        for engine in self.engines.values():
            engine.script = script

    async def asked(self) -> FakeEngine:
        """The engine that has a request."""
        await until(lambda: any(engine.active for engine in self.engines.values()))
        return next(engine for engine in self.engines.values() if engine.active)


Open = Callable[..., Any]


@asynccontextmanager
async def fleet(protocol: str = "http2") -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(bundle=byte_bundle())) for _ in range(2)]
        config = load(settings(*(engine.url for engine in engines), protocol=protocol), {})
        gateway = await stack.enter_async_context(Gateway(config))
        await until(lambda: gateway.engines.of(config.models[0]).profile is not None)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(gateway, {engine.url: engine for engine in engines}, client)


async def test_a_stream_is_counted_until_its_headers_report_it() -> None:
    async with fleet() as house:
        held, begins = asyncio.Event(), asyncio.Event()
        house.say(Script([held, HEADERS, begins, chunk("a"), DONE]))
        for engine in house.engines.values():
            engine.load = LoadReport((0, 77, 0), 1)
        call = asyncio.create_task(house.ask(stream=True).__aenter__())
        engine = await house.asked()
        view = house.replica(engine).view
        sent = view.sent[DEFAULT]
        assert sent > 0
        engine.push(LoadReport((0, 5, 0)))  # made before it has the request
        await until(lambda: view.told[DEFAULT] == 5_000)
        assert view.sent[DEFAULT] == sent, "an earlier report does not change that"
        held.set()
        await until(lambda: view.told[DEFAULT] == 77_000)
        assert view.sent == [0, 0, 0], "and the first report that has it does"
        begins.set()
        await (await call).read()


async def test_a_whole_answer_is_counted_until_a_frame_reports_it() -> None:
    async with fleet() as house:
        queued, goes_on = asyncio.Event(), asyncio.Event()
        house.say(unary(before=(queued, COUNTED, goes_on)))
        for engine in house.engines.values():
            engine.load = LoadReport((0, 77, 0), 1)
        call = asyncio.create_task(house.ask().__aenter__())
        view = house.replica(await house.asked()).view
        assert view.sent[DEFAULT] > 0
        assert not view.reports or view.told[DEFAULT] == 0
        queued.set()
        await until(lambda: view.told[DEFAULT] == 77_000)
        assert view.sent == [0, 0, 0]
        assert not call.done()
        goes_on.set()
        await (await call).read()


@pytest.mark.parametrize("protocol", ["http1", "http2"])
async def test_an_engine_that_reports_nothing_tells_by_its_first_byte(protocol: str) -> None:
    async with fleet(protocol) as house:
        begins, ends = asyncio.Event(), asyncio.Event()
        house.say(Script([HEADERS, begins, chunk("a"), ends, DONE]))
        call = asyncio.create_task(house.ask(stream=True).__aenter__())
        view = house.replica(await house.asked()).view
        await until(lambda: view.sent[DEFAULT] > 0)
        begins.set()
        await until(lambda: view.sent == [0, 0, 0])
        assert not view.reports
        assert view.requests == 1
        ends.set()
        await (await call).read()
        await until(lambda: view.is_idle)


async def test_the_closing_comment_and_pushes_are_heard_and_nonsense_is_not() -> None:
    async with fleet() as house:
        told = Closing(end_reason="ok", load=LoadReport((0, 9, 0)))
        house.say(Script([chunk("a"), DONE, closing_comment(told)]))
        async with house.ask(stream=True) as answer:
            body = await answer.read()
        assert b"penstock" not in body
        views = [house.replica(engine).view for engine in house.engines.values()]
        await until(lambda: sum(view.told[DEFAULT] for view in views) == 9_000)
        engine = next(e for e in house.engines.values() if house.replica(e).view.reports)
        view = house.replica(engine).view
        for nonsense in (b"", b"[]", b'{"waiting":[-1,0,0]}', b"x" * 9_000):
            engine.push(nonsense)
        engine.push(LoadReport((0, 10, 0)))
        await until(lambda: view.told[DEFAULT] == 10_000)


async def test_a_client_sees_nothing_of_it() -> None:
    async with fleet() as house:
        for engine in house.engines.values():
            engine.load = LoadReport((1, 2, 3), 4)
        async with house.ask() as answer:
            assert not [name for name in answer.headers if "load" in name.lower()]
            assert answer.status == 200


async def test_an_engine_that_drains_is_left_at_once_and_its_streams_go_on() -> None:
    async with fleet() as house:
        goes_on = asyncio.Event()
        house.say(stream(chunk("a"), goes_on, chunk("b")))
        open_stream = await house.ask("first", stream=True).__aenter__()
        draining = await house.asked()
        draining.push(LoadReport(draining=True))
        await until(lambda: house.replica(draining).phase is MemberPhase.DRAINING)
        house.say(unary())
        for i in range(10):
            async with house.ask(f"other {i}") as answer:
                assert answer.status == 200
        assert len(draining.seen) == 1
        goes_on.set()
        assert chunk("b") in await open_stream.read()
