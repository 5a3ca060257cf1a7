"""Streams under measure, from a paced engine whose clock is the test."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.bench.client import ApiServer
from tests.bench.figures import at_most
from tests.bench.gateway.paced_engine import EVENT_LEN, MODEL, Http1Connection, PacedEngine, Ticker
from tests.bench.gateway.streams import Load, _against, _ours
from tests.bench.services import demo_model
from tests.bench.streams import BenchFailed, Measurement, streaming
from tests.waiting import until


class Served(Http1Connection):
    """Told apart by whether the client has left."""

    left = False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.left = True


@pytest.fixture
def engine() -> PacedEngine:
    return PacedEngine(Ticker(interval_s=1e9), Path(demo_model()))


@pytest.fixture
async def endpoint(engine: PacedEngine) -> AsyncIterator[ApiServer]:
    served: list[Served] = []

    def serve() -> Served:
        served.append(Served(engine))
        return served[-1]

    async with await asyncio.get_running_loop().create_server(serve, "127.0.0.1", 0) as server:
        yield ApiServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        await until(lambda: all(one.left for one in served))


@contextlib.asynccontextmanager
async def ticking(engine: PacedEngine) -> AsyncIterator[None]:
    async def tick() -> None:
        while True:
            engine.ticker.tick()
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    yield
    task.cancel()


def request(endpoint: ApiServer, max_tokens: int = 100_000, event_len: int | None = None) -> bytes:
    body = {"model": MODEL, "stream": True, "max_tokens": max_tokens, "event_len": event_len}
    return endpoint.request("/chat/completions", msgspec.json.encode(body))


async def test_only_what_comes_between_the_marks_counts(engine: PacedEngine, endpoint: ApiServer) -> None:
    cpu = iter([1.0, 1.5])
    async with contextlib.AsyncExitStack() as stack:
        async with ticking(engine):
            streams = await stack.enter_async_context(streaming(endpoint, request(endpoint), 3))
        times = [exchange.event_times for exchange in streams._exchanges]
        assert all(times), "none is measured before all have begun"
        written = engine.ticker.stats().streams
        await until(lambda: [len(one) * EVENT_LEN for one in times] == [one.written_len for one in written])
        start = streams.mark(lambda: next(cpu))
        events = sum(map(len, times))
        engine.ticker.tick()
        engine.ticker.tick()
        await until(lambda: sum(map(len, times)) == events + 6)
        window = streams.since(start, lambda: next(cpu))
    assert (window.events, window.progressed, len(window.gaps_ms)) == (6, 3, 3)
    assert window.cpu_us_per_event == pytest.approx(0.5e6 / 6)


async def test_a_stream_that_ends_under_measure_spoils_it(engine: PacedEngine, endpoint: ApiServer) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with ticking(engine):
            streams = await stack.enter_async_context(streaming(endpoint, request(endpoint, max_tokens=1), 1))
            start = streams.mark(lambda: 0.0)
            await until(lambda: bool(streams._exchanges[0].ended_at))
        with pytest.raises(BenchFailed, match="ended under measure"):
            streams.since(start, lambda: 0.0)


async def test_a_refusal_is_told() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 No\r\ncontent-length: 4\r\n\r\nslow")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        endpoint = ApiServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        with pytest.raises(BenchFailed, match="429"):
            async with streaming(endpoint, request(endpoint), 1):
                pass


async def test_the_engine_says_who_waits_and_what_it_wrote(engine: PacedEngine, endpoint: ApiServer) -> None:
    fat_len = 64 * 1024
    async with contextlib.AsyncExitStack() as stack, ticking(engine):
        live = await stack.enter_async_context(streaming(endpoint, request(endpoint), 1))
        deaf = await stack.enter_async_context(streaming(endpoint, request(endpoint, event_len=fat_len), 1))
        deaf.stop_reading()
        await until(lambda: any(one.waits for one in engine.ticker.stats().streams))
        (stalled,) = [one for one in engine.ticker.stats().streams if one.waits]
        assert stalled.event_len == fat_len
        seen = len(live._exchanges[0].event_times)
        await until(lambda: len(live._exchanges[0].event_times) > seen + 10)
        (still,) = [one for one in engine.ticker.stats().streams if one.waits]
        assert still == stalled, "nothing more was written"


def window(events: int, cpu_s: float) -> Measurement:
    return Measurement(seconds=1.0, events=events, cpu_s=cpu_s, gaps_ms=[20.0], progressed=100)


def test_a_load_that_was_not_delivered_is_not_measured() -> None:
    load = Load(streams=100, interval_ms=20)
    cost, delivered, _ = _ours(load, window(4000, 0.05))
    assert cost.value is not None
    assert math.isnan(cost.value)
    assert cost.ok is False
    assert (delivered.value, delivered.ok) == (80, False)
    cost, delivered, _ = _ours(load, window(5000, 0.05))
    assert (cost.value, cost.ok, delivered.ok) == (10, True, True)


def test_peers_figures_stand_beside_the_gateways() -> None:
    load, ours = Load(streams=100, interval_ms=20), window(5000, 0.05)
    theirs, ratio = _against(load, ours, "nginx", window(5000, 0.1), at_most(1.3))
    assert (theirs.value, ratio.value, ratio.ok) == (20, 0.5, True)
    _, ratio = _against(load, ours, "nginx", window(4000, 0.1), at_most(1.3))
    assert ratio.ok is False, "not measured"
    (absent,) = _against(load, ours, "nginx", None, at_most(1.3))
    assert absent.name.endswith("nginx, not installed")
    assert absent.ok is None
