"""The streaming rows of `python -m tests.bench gateway`: events, overload, many streams, stalled clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.client import TimedRequest
from tests.bench.figures import Figure, Target, at_least, at_most, figure, quantile
from tests.bench.gateway.subjects import Engine, ServerUnderTest, gateway, nginx, paced_engine, plain_relay
from tests.bench.streams import BenchFailed, Measurement, streaming

CPU_US_PER_EVENT_TARGET: Final = at_most(15)
AGAINST_PLAIN_TARGET: Final = at_most(0.7)
AGAINST_NGINX_TARGET: Final = at_most(1.3)
DELIVERED_TARGET: Final = at_least(95)
"""The percentage of the offered load that must arrive. A proxy that falls behind writes several events at
once, which is cheaper."""

PEERS: Final = ("plain aiohttp relay", "nginx")

OVERLOAD_STREAMS: Final = 256
OVERLOAD_INTERVAL_MS: Final = 3.0
OVERLOAD_TARGET: Final = at_least(60_000)
OVERLOAD_GROWTH_TARGET: Final = at_most(64)
"""Megabytes: a stream's window and its client's buffers, 256 times, and some room."""

MANY_STREAMS: Final = (256, 1000)
MANY_INTERVAL_MS: Final = 100.0

LIVE: Final = 128
STALLED: Final = 120
STALLED_EVENT_LEN: Final = 1024
"""Bytes of an event, so many that buffers which hold half a minute of tokens are full within seconds."""
STALLED_DEADLINE_S: Final = 20.0
GAP_TARGET: Final = at_most(1.1)
WRITTEN_TARGET: Final = at_most(300)

SETTLE_S: Final = 0.3
"""The time between the last stream's start and the first mark, in seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    interval_ms: float

    @property
    def name(self) -> str:
        return f"{self.streams} streams at {self.interval_ms:g} ms"

    def delivered(self, window: Measurement) -> float:
        """The percentage of this load that arrived."""
        return 100 * window.rate * self.interval_ms / 1e3 / self.streams


async def measured(subject: ServerUnderTest, streams: int, seconds: float) -> Measurement:
    async with streaming(subject.endpoint, subject.chat(), streams) as running:
        await asyncio.sleep(SETTLE_S)
        return await running.measure(seconds, subject.cpu_s)


# -- cost per event ---------------------------------------------------------------------------------------


async def events(interval_ms: float, streams: Sequence[int], seconds: float) -> list[Figure]:
    """CPU time per event of our gateway and, in the same run, of a plain relay and nginx."""
    figures: list[Figure] = []
    async with paced_engine(interval_ms) as engine, proxies(engine) as (ours, relay, web_server):
        for count in streams:
            load = Load(count, interval_ms)
            window = await measured(ours, count, seconds)
            figures += _ours(load, window)
            for name, peer, target in (
                (PEERS[0], relay, AGAINST_PLAIN_TARGET),
                (PEERS[1], web_server, AGAINST_NGINX_TARGET),
            ):
                theirs = None if peer is None else await measured(peer, count, seconds)
                figures += _against(load, window, name, theirs, target)
    return figures


@contextlib.asynccontextmanager
async def proxies(
    engine: Engine,
) -> AsyncIterator[tuple[ServerUnderTest, ServerUnderTest | None, ServerUnderTest | None]]:
    """Our gateway and its peers, before the same engine. None for a peer that is not installed."""
    async with gateway(engine) as ours, plain_relay(engine) as relay, nginx(engine) as web_server:
        yield ours, relay, web_server


def _cost(load: Load, window: Measurement) -> float:
    """CPU time in us per event. NaN, which meets no target, when less than the offered load was delivered."""
    return window.cpu_us_per_event if DELIVERED_TARGET.met_by(load.delivered(window)) else float("nan")


def _ours(load: Load, window: Measurement) -> list[Figure]:
    return [
        figure(f"{load.name}: gateway CPU", _cost(load, window), "us/event", CPU_US_PER_EVENT_TARGET),
        figure(f"{load.name}: delivered", load.delivered(window), "%", DELIVERED_TARGET),
        figure(f"{load.name}: gap p50", quantile(window.gaps_ms, 0.5), "ms"),
    ]


def _against(
    load: Load, ours: Measurement, name: str, theirs: Measurement | None, target: Target
) -> list[Figure]:
    if theirs is None:
        return [figure(f"{load.name}: {name}, not installed", float("nan"), "us/event")]
    cost = _cost(load, theirs)
    return [
        figure(f"{load.name}: {name} CPU", cost, "us/event"),
        figure(f"{load.name}: gateway / {name}", _cost(load, ours) / cost, "x", target),
    ]


async def events_of(subject: ServerUnderTest, streams: int, tokens: int) -> list[Figure]:
    """The gaps between events that clients see at a gateway which runs elsewhere."""

    async def one() -> TimedRequest:
        connection = await subject.endpoint.connect()
        try:
            return await connection.exchange(subject.chat(tokens))
        finally:
            connection.close()

    done = await asyncio.gather(*(one() for _ in range(streams)))
    if failed := [exchange.error for exchange in done if exchange.error is not None]:
        raise BenchFailed(failed[0])
    gaps_ms = [1e3 * (b - a) for exchange in done for a, b in itertools.pairwise(exchange.event_times)]
    return [figure(f"{streams} streams of {tokens} tokens: gap p50", quantile(gaps_ms, 0.5), "ms")]


# -- overload, and many streams ---------------------------------------------------------------------------


async def overload(seconds: float) -> list[Figure]:
    """Figures of a load that is more than one gateway process can forward."""
    async with paced_engine(OVERLOAD_INTERVAL_MS) as engine, gateway(engine) as ours:
        async with streaming(ours.endpoint, ours.chat(), OVERLOAD_STREAMS) as running:
            before_mb = ours.resident_mb()
            window = await running.measure(seconds, ours.cpu_s)
            grown_mb = ours.resident_mb() - before_mb
        return [
            figure("overload: forwarded", window.rate, "events/s", OVERLOAD_TARGET),
            figure("overload: forwarded per second of CPU", 1e6 / window.cpu_us_per_event, "events/s"),
            figure("overload: memory grown", grown_mb, "MB", OVERLOAD_GROWTH_TARGET),
        ]


async def many(seconds: float) -> list[Figure]:
    figures: list[Figure] = []
    async with paced_engine(MANY_INTERVAL_MS) as engine, gateway(engine) as ours:
        for count in MANY_STREAMS:
            window = await measured(ours, count, seconds)
            name = f"{count} streams to one engine: had events"
            figures.append(figure(name, window.progressed, "streams", at_least(count)))
    return figures


# -- stalled clients --------------------------------------------------------------------------------------


async def stalled(interval_ms: float, seconds: float) -> list[Figure]:
    """Figures of streams that are read, beside as many whose clients have stopped reading."""
    async with (
        paced_engine(interval_ms) as engine,
        gateway(engine) as ours,
        streaming(ours.endpoint, ours.chat(), LIVE) as live,
    ):
        await asyncio.sleep(SETTLE_S)
        alone = await live.measure(seconds, ours.cpu_s)
        fat = ours.chat(event_len=STALLED_EVENT_LEN)
        async with streaming(ours.endpoint, fat, STALLED) as deaf:
            deaf.stop_reading()
            before = await _all_wait(engine)
            beside = await live.measure(seconds, ours.cpu_s)
            after = await _written(engine)
    ratio = quantile(beside.gaps_ms, 0.5) / quantile(alone.gaps_ms, 0.5)
    name = f"{STALLED} stalled beside {LIVE} live"
    return [
        figure(f"{name}: live gap p50, beside / alone", ratio, "x", GAP_TARGET),
        figure(f"{name}: live streams with events", beside.progressed, "streams", at_least(LIVE)),
        figure(f"{name}: engine wrote per stalled stream", max(after) / 1e3, "KB", WRITTEN_TARGET),
        figure(f"{name}: written while stalled", (sum(after) - sum(before)) / 1e3, "KB", at_most(0)),
    ]


async def _all_wait(engine: Engine) -> list[int]:
    """The bytes written to each stalled stream, once all of them wait."""
    async with asyncio.timeout(STALLED_DEADLINE_S):
        while len(await _written(engine, waiting=True)) < STALLED:  # noqa: ASYNC110 -- another process tells
            await asyncio.sleep(SETTLE_S)
    return await _written(engine)


async def _written(engine: Engine, *, waiting: bool = False) -> list[int]:
    return [
        stream.written_len
        for stream in (await engine.stats()).streams
        if stream.event_len == STALLED_EVENT_LEN and (stream.waits or not waiting)
    ]
