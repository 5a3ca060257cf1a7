"""The event loop of a service (uvloop where it is installed, else asyncio's own), and its lag.

uvloop spends less CPU on an event. The line with which a service says that it is ready names the loop.

A loop that is blocked holds up every request. The longest block is in the metrics: a callback is due at every
tick, and is late by the length of the block, or by up to one tick less when the block began between two
ticks. A tick that wakes the loop costs some 0.1 ms. So the time between two of them is that in which the
thread of the loop works for `WORK_S`: a hundredth of its work goes into ticks, whether it is busy or idles.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final

from shared.process.metrics import Gauge

SWITCH_S: Final = 0.0005
"""The time for which a thread that runs Python may keep the loop waiting, in seconds. The loop waits so long
each time that it has let go of the interpreter, which it does for every read and write."""
TICK_S: Final = 0.02
IDLE_TICK_S: Final = 0.64
WORK_S: Final = 0.01
"""The CPU time of the loop's thread between two ticks, as far as `TICK_S` and `IDLE_TICK_S` allow it."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The function that makes the event loop, for `asyncio.Runner`."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def loop_name() -> str:
    """The package of the running loop: `uvloop` or `asyncio`."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


class LagMeter:
    """A meter of the longest lag of the loop that it is started in."""

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        """`cpu_s` returns the CPU time of the thread so far, in seconds."""
        self._now_s = now_s
        self._cpu_s = cpu_s
        self._used_s = cpu_s()
        self._tick_s = TICK_S
        self._longest_s = 0.0

    def start(self) -> None:
        """Measure until the loop ends."""
        due_s = self._now_s() + self._tick_s
        asyncio.get_running_loop().call_later(self._tick_s, self._tick, due_s)

    def pop_longest_s(self) -> float:
        """The longest lag since the last call, in seconds."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _tick(self, due_s: float) -> None:
        self._longest_s = max(self._longest_s, self._now_s() - due_s)
        used_s, self._used_s = self._used_s, self._cpu_s()
        worked = max(self._used_s - used_s, 0.0) / self._tick_s
        longest_s = min(IDLE_TICK_S, 2 * self._tick_s)  # one quiet tick is not yet a quiet service
        self._tick_s = max(TICK_S, WORK_S / worked) if worked * longest_s > WORK_S else longest_s
        self.start()


def watch_lag() -> None:
    """Show the running loop's lag in the process's metrics, and keep threads from adding to it."""
    sys.setswitchinterval(SWITCH_S)
    meter = LagMeter()
    meter.start()
    LOOP_LAG.set_function(meter.pop_longest_s)


LOOP_LAG: Final = Gauge(
    "penstock_loop_lag_max_seconds",
    "The longest that the event loop was held up since the last scrape.",
)
