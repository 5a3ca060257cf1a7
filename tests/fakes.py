"""Stand-ins that tests share."""

from __future__ import annotations

import asyncio
import heapq
import io
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from shared.process import logs
from shared.process.clock import Timer


class VirtualClock:
    """A `shared.process.clock.Clock` that moves only when told to.

    `advance` wakes, in the order of their deadlines, all who sleep until then. It does not run
    them: the test awaits `asyncio.sleep(0)` or the condition that it is after.
    """

    def __init__(self, monotonic: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    @property
    def sleeping(self) -> int:
        """How many are asleep."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), future))
        await future

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: None if done.cancelled() else callback())
        heapq.heappush(self._sleepers, (when, next(self._order), future))
        return future

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._monotonic += seconds
        self._wall += seconds
        while self._sleepers and self._sleepers[0][0] <= self._monotonic:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)


@contextmanager
def captured_logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """The lines that are logged meanwhile, from `info` on, whatever a test before has configured."""
    logs.configure("tests", stream=io.StringIO())
    with structlog.testing.capture_logs() as lines:
        yield lines
