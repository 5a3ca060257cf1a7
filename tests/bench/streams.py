"""Many event streams at once, measured while all of them run.

Setting a stream up costs as much as many events, so nothing is counted before the last stream has its
first event, nor after the first one ends. The measure is taken between two marks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.client import ApiServer, LoadConnection, TimedRequest

START_DEADLINE_S: Final = 60.0
STARTING_MAX: Final = 64
"""Streams that are set up at a time, so that a listening socket's queue has no part in the measure."""
_POLL_S: Final = 0.005


class BenchFailed(Exception):
    """The server under test answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The events between two marks."""

    seconds: float
    events: int
    cpu_s: float
    """CPU time of the process under test, in seconds."""
    gaps_ms: list[float]
    progressed: int
    """The number of streams that had an event."""

    @property
    def rate(self) -> float:
        """Events per second."""
        return self.events / self.seconds

    @property
    def cpu_us_per_event(self) -> float:
        return 1e6 * self.cpu_s / self.events if self.events else float("nan")


@dataclass(frozen=True, slots=True)
class Mark:
    at: float
    """The time, in seconds on `time.perf_counter`."""
    cpu_s: float


class Streams:
    """A set of running streams, none of which may end while it is measured."""

    def __init__(self, exchanges: Sequence[TimedRequest], connections: Sequence[LoadConnection]) -> None:
        self._exchanges = exchanges
        self._connections = connections

    def stop_reading(self) -> None:
        for connection in self._connections:
            connection.pause_reading()

    async def measure(self, seconds: float, cpu_s: Callable[[], float]) -> Measurement:
        """Measure for so many seconds from now on. Raises as `since` does."""
        start = self.mark(cpu_s)
        await asyncio.sleep(seconds)
        return self.since(start, cpu_s)

    def mark(self, cpu_s: Callable[[], float]) -> Mark:
        return Mark(time.perf_counter(), cpu_s())

    def since(self, start: Mark, cpu_s: Callable[[], float]) -> Measurement:
        """The events between `start` and now. Raises BenchFailed when a stream has ended meanwhile."""
        stop = self.mark(cpu_s)
        for exchange in self._exchanges:
            if exchange.ended_at:
                raise BenchFailed(f"a stream ended under measure: {exchange.error}")
        times = [exchange.event_times for exchange in self._exchanges]
        within = [one[bisect_left(one, start.at) :] for one in times]
        return Measurement(
            seconds=stop.at - start.at,
            events=sum(map(len, within)),
            cpu_s=stop.cpu_s - start.cpu_s,
            gaps_ms=[1e3 * (after - before) for one in within for before, after in itertools.pairwise(one)],
            progressed=sum(map(bool, within)),
        )


@contextlib.asynccontextmanager
async def streaming(endpoint: ApiServer, request: bytes, count: int) -> AsyncIterator[Streams]:
    """Open `count` streams, each past its first event. All are cut off when the block is left."""
    connections: list[LoadConnection] = []
    room = asyncio.Semaphore(STARTING_MAX)

    async def start() -> TimedRequest:
        async with room:
            connection = await endpoint.connect()
            connections.append(connection)
            exchange = connection.begin(request)
            while not exchange.event_times:
                if exchange.ended_at:
                    raise BenchFailed(f"a stream did not begin: {exchange.error}")
                await asyncio.sleep(_POLL_S)
            return exchange

    try:
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                exchanges = await asyncio.gather(*(start() for _ in range(count)))
        except TimeoutError:
            raise BenchFailed(f"not all of {count} streams had an event in time") from None
        yield Streams(exchanges, connections)
    finally:
        for connection in connections:
            connection.close()
