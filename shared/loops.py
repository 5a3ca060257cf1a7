"""Which event loop a service runs on, uvloop where it is installed, else asyncio's own; and how late it is.

uvloop spends less CPU on an event. The line with which a service says that it is ready names the loop.

A loop that is held up holds up every request. How long it was at most is in the metrics: something is due
every `TICK_S`, and is late by what held it up, or by up to `TICK_S` less when that began between two ticks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import Gauge

from shared.metrics import REGISTRY

TICK_S: Final = 0.025
"""Forty wake-ups a second, each some microseconds."""


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

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._longest_s = 0.0

    def start(self) -> None:
        """Measure until the loop ends."""
        due_s = self._now_s() + TICK_S
        asyncio.get_running_loop().call_later(TICK_S, self._tick, due_s)

    def take(self) -> float:
        """Seconds, the longest since this was last asked."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _tick(self, due_s: float) -> None:
        self._longest_s = max(self._longest_s, self._now_s() - due_s)
        self.start()


def watch_lag() -> None:
    """Show the running loop's lag in the process's metrics."""
    meter = LagMeter()
    meter.start()
    LOOP_LAG.set_function(meter.take)


LOOP_LAG: Final = Gauge(
    "penstock_loop_lag_max_seconds",
    "The longest that the event loop was held up since the last scrape.",
    registry=REGISTRY,
)
