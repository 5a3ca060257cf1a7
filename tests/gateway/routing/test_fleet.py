"""Engines of a fleet that fail, on real sockets: their callers go elsewhere, and others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final
from urllib.parse import urlsplit

import pytest

from gateway.routing.health import ROW_MAX, SAMPLES_MAX, HealthPhase
from gateway.routing.retries import FLOOR
from shared.http2.connection_config import PulseConfig
from tests.gateway.conftest import House, Open, until
from tests.gateway.fake_engine import CUT, HEADERS, FakeEngine, Script, byte_bundle, chunk, closing, stream
from tests.waiting import PATIENCE_S

PULSE: Final = PulseConfig(interval_s=0.1, timeout_s=2.0)
GOOD: Final = stream(chunk("a"), end=closing(10, 1))


@pytest.fixture(autouse=True)
def pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.relay.upstream.PULSE", PULSE)


pytestmark = pytest.mark.hop("http2")  # over HTTP/1.1 nobody can be asked for a sign of life


class Wire:
    """The way to an engine, which can be cut (nothing passes, nothing is closed) or torn (all is closed)."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.url = ""
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.tear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._passes.clear()

    def tear(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(self.engine.url)
        other_reader, other_writer = await asyncio.open_connection(parts.hostname, parts.port)
        self._writers += writer, other_writer
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            self._tasks.append(asyncio.create_task(self._pass(source, sink)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._passes.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


@pytest.fixture
async def failing() -> AsyncIterator[Wire]:
    async with FakeEngine(bundle=byte_bundle()) as engine, Wire(engine) as wire:
        yield wire


async def ask(house: House, number: int) -> tuple[int, bytes]:
    async with house.chat(stream=True, prompt_cache_key=f"{number}") as answer:
        return answer.status, await answer.read()


async def spread(house: House, failing: Wire, count: int) -> list[asyncio.Task[tuple[int, bytes]]]:
    """Requests of as many conversations, once all have arrived; some at each engine."""
    tasks = [asyncio.create_task(ask(house, number)) for number in range(count)]
    await until(lambda: len(house.engine.seen) + len(failing.engine.seen) == count)
    assert house.engine.seen
    assert failing.engine.seen
    return tasks


def health_of(house: House, failing: Wire) -> HealthPhase:
    return house.gateway.replicas._by_url[failing.url].health.phase


async def told(tasks: list[asyncio.Task[tuple[int, bytes]]]) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        return [status for status, _ in await asyncio.gather(*tasks)]


@pytest.mark.parametrize("how", ["cut", "tear"])
async def test_what_waits_for_an_engine_that_is_gone_goes_elsewhere_and_a_victim_beside_notices_nothing(
    open_house: Open, failing: Wire, how: str
) -> None:
    house: House = await open_house(failing.url)
    go_on, count = asyncio.Event(), 8
    house.engine.script = stream(chunk("v"), go_on, chunk("w"), end=closing(10, 2))
    failing.engine.script = Script([HEADERS, asyncio.Event()])
    tasks = await spread(house, failing, count)
    waiting = len(failing.engine.seen)
    getattr(failing, how)()
    refused = max(0, waiting - FLOOR)
    await until(lambda: len(house.engine.seen) == count - refused)
    go_on.set()
    statuses = await told(tasks)
    assert (statuses.count(200), statuses.count(502)) == (count - refused, refused)
    whole = [body for status, body in (task.result() for task in tasks) if status == 200]
    assert all(body.startswith(chunk("v") + chunk("w")) for body in whole)
    await until(lambda: not len(house.gateway.live))


async def test_streams_that_had_begun_end_with_an_error_when_their_engine_is_cut_off(
    open_house: Open, failing: Wire
) -> None:
    house: House = await open_house(failing.url)
    house.engine.script = GOOD
    failing.engine.script = stream(chunk("a"), asyncio.Event())
    tasks = await spread(house, failing, 8)
    cut = len(failing.engine.seen)
    await until(lambda: sum(task.done() for task in tasks) == 8 - cut)
    health = house.gateway.replicas._by_url[failing.url].health
    await until(lambda: not health._waiting)  # all have begun
    failing.cut()
    assert set(await told(tasks)) == {200}
    bodies = [task.result()[1] for task in tasks]
    assert sum(b"upstream_failed" in body for body in bodies) == cut
    assert sum(b"[DONE]" in body for body in bodies) == 8 - cut
    await until(lambda: not len(house.gateway.live))


async def test_an_engine_that_sends_headers_and_nothing_more_is_found_and_nobody_waits_for_it(
    open_house: Open, failing: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.routing.health.LATE_MS_MIN", 400)
    house: House = await open_house(failing.url)
    house.engine.script = GOOD
    failing.engine.script = Script([HEADERS, asyncio.Event()])
    first_events = house.gateway.replicas.first_events("tiny")
    for _ in range(SAMPLES_MAX):
        first_events.add(1)
    tasks = [asyncio.create_task(ask(house, number)) for number in range(8)]
    async with asyncio.timeout(PATIENCE_S):
        while health_of(house, failing) is not HealthPhase.EJECTED or not all(task.done() for task in tasks):
            tasks.append(asyncio.create_task(ask(house, len(tasks))))
            await asyncio.wait(tasks[-1:], timeout=0.05)
    assert set(await told(tasks)) == {200}
    await until(lambda: not len(house.gateway.live))


async def test_an_engine_that_resets_its_streams_is_ejected_though_they_begin(
    open_house: Open, failing: Wire
) -> None:
    house: House = await open_house(failing.url)
    house.engine.script = GOOD
    failing.engine.script = stream(chunk("a"), CUT)
    for number in range(40):
        status, _ = await ask(house, number)
        assert status == 200
    assert len(failing.engine.seen) == ROW_MAX
    assert health_of(house, failing) is HealthPhase.EJECTED
    await house.at_rest()


async def test_an_engine_that_is_busy_with_its_streams_answers_pings(open_house: Open, failing: Wire) -> None:
    """Its handlers wait, all of them, and it is not taken for dead."""
    house: House = await open_house(failing.url)
    go_on = asyncio.Event()
    house.engine.script = failing.engine.script = stream(go_on, chunk("a"), end=closing(10, 1))
    tasks = await spread(house, failing, 16)
    transport = house.gateway._upstream._http2
    endpoints = [one for pool in transport._pools.values() for one in pool.endpoints]
    heard = [one.connection.receives for one in endpoints]
    await until(
        lambda: all(one.connection.receives >= at + 5 for one, at in zip(endpoints, heard, strict=True))
    )
    go_on.set()
    assert set(await told(tasks)) == {200}
    await house.at_rest()
