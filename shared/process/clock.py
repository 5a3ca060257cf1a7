"""Time as a parameter.

Code that measures or waits takes a `Clock`; tests hand it one that they move by hand, so that they
neither sleep nor depend on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> object:
        """Let it not come. Without effect on one that has come."""
        ...


class Clock(Protocol):
    def monotonic(self) -> float:
        """The time since an arbitrary start, in seconds, which never goes back. For durations and
        deadlines."""
        ...

    def wall(self) -> float:
        """The time since the Unix epoch, in seconds, which may jump. For times that are shown."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` on the running loop once `monotonic` has come to `when`, unless it is cancelled."""
        ...


class _SystemClock:
    __slots__ = ()

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        # a loop's own clock need not begin where this one does
        return asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), callback)


SYSTEM_CLOCK: Final[Clock] = _SystemClock()
