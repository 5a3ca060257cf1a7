"""Which event loop a service runs on, uvloop where it is installed, else asyncio's own; and how late it is.

uvloop spends less CPU on an event. The line with which a service says that it is ready names the loop.

A loop that is held up holds up every request. How long it was at most is in the metrics: something is due
every so often, and is late by what held it up, or by up to one tick less when that began between two of them.
Ticks are short while the thread of the loop works, and get longer while it idles, as waking up costs most of
what an idle service takes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from shared.metrics import Gauge

TICK_S: Final = 0.02
IDLE_TICK_S: Final = 0.64
BUSY: Final = 0.02
"""The fraction of a tick that a thread computes for at least while it counts as working."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """For `asyncio.Runner`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def loop_name() -> str:
    """The package of the loop that runs: `uvloop` or `asyncio`."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


class LagMeter:
    """The longest lag of the loop that it is started in."""

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        """`cpu_s`: CPU time of the thread so far."""
        self._now_s = now_s
        self._cpu_s = cpu_s
        self._used_s = cpu_s()
        self._tick_s = TICK_S
        self._longest_s = 0.0

    def start(self) -> None:
        """Measure until the loop ends."""
        due_s = self._now_s() + self._tick_s
        asyncio.get_running_loop().call_later(self._tick_s, self._tick, due_s)

    def take(self) -> float:
        """Seconds, the longest since this was last asked."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _tick(self, due_s: float) -> None:
        self._longest_s = max(self._longest_s, self._now_s() - due_s)
        used_s, self._used_s = self._used_s, self._cpu_s()
        works = self._used_s - used_s > BUSY * self._tick_s
        self._tick_s = TICK_S if works else min(IDLE_TICK_S, 2 * self._tick_s)
        self.start()


def watch_lag() -> None:
    """Show the running loop's lag in the process's metrics."""
    meter = LagMeter()
    meter.start()
    LOOP_LAG.set_function(meter.take)


LOOP_LAG: Final = Gauge(
    "penstock_loop_lag_max_seconds",
    "The longest that the event loop was held up since the last scrape.",
)
