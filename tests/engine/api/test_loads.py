"""What the engine tells of its load: on every answer, at the end of streams, and on gateways' connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from engine.api.told.steps import NO_STEP
from engine.contract.messages import ServiceClass, StepOutput
from engine.contract.records import StepRecord
from gateway.relay.http2_client import Http2Transport
from shared.http2.stream import Report
from shared.wire.load_report import (
    DEFAULT,
    FLEX,
    IDLE_INTERVAL_MS,
    INTERVAL_MS,
    LOAD_HEADER,
    PRIORITY,
    PUSH_CHANGED_S,
    LoadReport,
    encode_load,
    parse_load,
)
from shared.wire.sse import CLOSING_HEADER, parse_closing
from tests.engine.api.conftest import MODEL, Serve, Served, until
from tests.fakes import VirtualClock

IDLE = LoadReport(interval_ms=IDLE_INTERVAL_MS)
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "the"}]}


def load_of(answer: Any) -> LoadReport:
    report = parse_load(answer.headers.get(LOAD_HEADER))
    assert report is not None, answer.headers
    assert report.started_s
    return without_start(report)


def without_start(report: LoadReport) -> LoadReport:
    """The report, but for when its process started."""
    return msgspec.structs.replace(report, started_s=0)


def parsed(payload: bytes) -> LoadReport | None:
    report = parse_load(payload)
    return None if report is None else without_start(report)


def counted(core: Any, class_tokens: tuple[int, ...], newest: int, record: StepRecord | None = None) -> None:
    """Let the fake core count tokens, up to a handle."""
    stats = msgspec.structs.replace(core._stats(), class_tokens=class_tokens, newest=newest)
    core.say(StepOutput(0, [], [], [], [], [], [], stats, [], record))


def test_the_classes_are_the_cores() -> None:
    assert tuple(ServiceClass) == (FLEX, DEFAULT, PRIORITY)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nothing",
        "[]",
        '{"waiting":[1,2]}',
        '{"waiting":[1,2,-3]}',
        '{"waiting":[1,2,1e99]}',
        '{"sequences":9999999999999}',
        '{"draining":1}',
        '{"interval_ms":0}',
        '{"interval_ms":9999999}',
        "{" + " " * 600 + "}",
        b"\xff",
    ],
)
def test_what_is_no_report_is_none(text: str | bytes | None) -> None:
    assert parse_load(text) is None


def test_a_report_comes_back_as_it_was() -> None:
    report = LoadReport((1, 2, 3), 4, True, 5, 6)
    assert parse_load(encode_load(report)) == report
    assert parse_load('{"waiting":[1,2,3],"later":"versions say more"}') == LoadReport((1, 2, 3))


def test_an_engine_that_says_no_interval_reports_as_one_does_that_has_work() -> None:
    report = parse_load('{"waiting":[0,0,0]}')
    assert report is not None
    assert report.interval_ms == INTERVAL_MS


async def test_every_answer_has_it_errors_and_probes_too(served: Served) -> None:
    http = served.http
    served.says("the")
    answers = [
        await http.get("/livez"),
        await http.get("/v1/models"),
        await http.get("/nowhere"),
        await http.post("/v1/chat/completions", json={}),
        await http.post("/v1/chat/completions", json=CHAT),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 400, 200]
    assert {load_of(answer) for answer in answers} == {IDLE}


async def test_a_stream_that_waits_is_in_the_report_of_its_own_headers(served: Served) -> None:
    served.core.admits = False
    body = {**CHAT, "stream": True, "service_tier": "flex"}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        report = load_of(answer)
        [added] = served.core.added
        assert report == LoadReport((len(added.prompt_ids), 0, 0), 1)
        other = load_of(await served.http.get("/livez"))
        assert other == report
        served.says("the")
        served.core.admits = True
        served.core.release()
        served.core._work.set()
        last = (await answer.aread()).rpartition(b": penstock ")[2]
        closing = parse_closing(last)
    assert closing is not None
    assert isinstance(closing.load, LoadReport)
    assert closing.load.waiting == (0, 0, 0)


async def test_the_header_of_a_whole_answer_does_not_say_it_twice(served: Served) -> None:
    served.says("the")
    answer = await served.http.post("/v1/chat/completions", json=CHAT)
    assert "load" not in msgspec.json.decode(answer.headers[CLOSING_HEADER])


async def test_what_the_core_has_counted_is_not_counted_again(serve: Serve) -> None:
    async with serve() as served:
        served.core.admits = False
        state = served.engine.state
        tasks = [
            asyncio.create_task(served.http.post("/v1/chat/completions", json={**CHAT, "service_tier": tier}))
            for tier in ("flex", "default", "priority")
        ]
        await until(lambda: len(served.core.added) == 3)
        length = len(served.core.added[0].prompt_ids)
        assert without_start(state.load()) == LoadReport((length, length, length), 3)
        first, second, _ = served.core.added
        seen = [0, 0, 0]
        seen[first.service_class] += 1
        seen[second.service_class] += 1  # of each, the cache has all but one token
        counted(served.core, tuple(seen), second.handle)
        await until(lambda: state.core._queue.seen == second.handle)
        last = [0 if seen[each] else length for each in range(3)]
        assert state.load().waiting == tuple(map(sum, zip(seen, last, strict=True)))
        tasks[0].cancel()
        tasks[1].cancel()
        tasks[2].cancel()
        await until(lambda: state.core.live == 0)
        counted(served.core, (0, 0, 0), served.core.added[-1].handle)
        await until(lambda: state.core._queue.seen == served.core.added[-1].handle)
        assert without_start(state.load()) == IDLE


async def test_the_report_says_how_much_was_computed(serve: Serve) -> None:
    async with serve() as served:
        step = msgspec.structs.replace(NO_STEP, number=1, prompts=2, prompt_tokens=600)
        counted(served.core, (0, 0, 0), 0, step)
        await until(lambda: served.engine.state.load().computed == 600)


async def test_gateways_are_told_at_intervals_and_when_a_whole_answer_is_queued(serve: Serve) -> None:
    told: list[LoadReport | None] = []
    counted_by: list[int] = []
    async with serve() as served:
        served.core.admits = False
        transport = Http2Transport(on_load=lambda _, payload: told.append(parsed(payload)))
        report = Report(lambda: counted_by.append(len(told)))
        url = f"http://127.0.0.1:{served.engine.port}/v1/chat/completions"
        call = asyncio.create_task(
            transport.exchange("POST", url, [], msgspec.json.encode(CHAT), report=report)
        )
        await until(lambda: bool(counted_by))
        length = len(served.core.added[0].prompt_ids)
        with_it = LoadReport((0, length, 0), 1)
        assert told[counted_by[0] - 1] == with_it
        before = len(told)
        await until(lambda: len(told) > before + 2)
        assert told[before:] == [with_it] * (len(told) - before)
        assert not call.done()
        call.cancel()
        await until(lambda: told[-1] == IDLE)
        await transport.aclose()


class Told:
    """What an engine tells, and when, on a clock that moves by hand."""

    def __init__(self, served: Served, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        self.reports: list[LoadReport | None] = []
        monkeypatch.setattr(served.engine.server, "push_load", self._tell)

    def _tell(self, payload: bytes) -> None:
        self.reports.append(parsed(payload))

    async def within(self, seconds: float) -> list[LoadReport | None]:
        """What is told in the next seconds."""
        before = len(self.reports)
        for _ in range(round(seconds / PUSH_CHANGED_S)):
            self.clock.advance(PUSH_CHANGED_S + 1e-6)  # no sleep is too short
            await settled()
        return self.reports[before:]

    async def between(self) -> None:
        """Pass the time until the engine has nothing to tell, long before its next report is due."""
        while not await self.within(PUSH_CHANGED_S):
            pass
        assert not await self.within(2 * PUSH_CHANGED_S)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def idle(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Served, Told]]:
    """An engine that has just told that it is idle."""
    clock = VirtualClock()
    async with serve(clock=clock) as served:
        told = Told(served, clock, monkeypatch)
        await told.between()
        yield served, told


async def test_an_idle_engine_tells_its_load_as_rarely_as_it_says(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle(serve, monkeypatch) as (_, told):
        assert await told.within(5.0) == [IDLE] * 5


async def test_a_load_that_changes_is_told_at_once_and_repeated_while_there_is_work(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle(serve, monkeypatch) as (served, told):
        served.core.admits = False
        before = len(told.reports)
        call = asyncio.create_task(served.http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: len(served.core.added) == 1)
        await settled()
        busy = LoadReport((0, len(served.core.added[0].prompt_ids), 0), 1)
        assert busy.interval_ms == INTERVAL_MS
        assert told.reports[before:] == [busy], "and the clock stood still"
        assert await told.within(1.0) == [busy] * 10
        call.cancel()
        await until(lambda: served.engine.state.core.live == 0)
        assert await told.within(PUSH_CHANGED_S) == [IDLE]


async def test_steps_that_end_after_the_last_request_are_told_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle(serve, monkeypatch) as (served, told):
        before = len(told.reports)
        step = msgspec.structs.replace(NO_STEP, number=1, prompts=1, prompt_tokens=60)
        counted(served.core, (0, 0, 0), 0, step)
        await until(lambda: len(told.reports) > before)
        assert told.reports[before:] == [msgspec.structs.replace(IDLE, computed=60)]


async def test_a_load_that_changes_all_the_time_is_told_every_50_ms(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle(serve, monkeypatch) as (served, told):
        before, tokens = len(told.reports), 0
        for _ in range(20):
            for _ in range(5):
                tokens += 1
                step = msgspec.structs.replace(NO_STEP, number=tokens, prompts=1, prompt_tokens=1)
                counted(served.core, (0, 0, 0), 0, step)
                await settled()
            told.clock.advance(PUSH_CHANGED_S)
            await settled()
        assert len(told.reports) - before <= 21
        assert told.reports[-1] == msgspec.structs.replace(IDLE, computed=tokens)


async def test_an_engine_that_drains_says_so_at_once_and_on_every_answer(serve: Serve) -> None:
    told: list[LoadReport | None] = []
    async with serve() as served:
        served.says("the", ends=False)
        transport = Http2Transport(on_load=lambda _, payload: told.append(parsed(payload)))
        url = f"http://127.0.0.1:{served.engine.port}/v1/chat/completions"
        body = msgspec.json.encode({**CHAT, "stream": True, "max_tokens": 2})
        answer = await transport.exchange("POST", url, [], body)
        await until(lambda: bool(told))
        draining = asyncio.create_task(served.engine.drain())
        await until(lambda: told[-1] is not None and told[-1].draining)
        refused = await served.http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert load_of(refused).draining
        await answer.aclose()
        await draining
        await transport.aclose()


async def test_a_core_that_died_leaves_nothing_that_waits(served: Served) -> None:
    served.core.admits = False
    call = asyncio.create_task(served.http.post("/v1/chat/completions", json=CHAT))
    await until(lambda: served.engine.state.load().sequences == 1)
    served.core.die()
    assert (await call).status_code == 500
    assert without_start(served.engine.state.load()) == IDLE
