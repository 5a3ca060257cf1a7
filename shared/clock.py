"""Time as a parameter.

Code that measures or waits takes a `Clock`; tests hand it one that they move by hand, so that they
neither sleep nor depend on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """The time since an arbitrary start, in seconds, which never goes back. For durations and
        deadlines."""
        ...

    def wall(self) -> float:
        """The time since the Unix epoch, in seconds, which may jump. For times that are shown."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class _SystemClock:
    __slots__ = ()

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM_CLOCK: Final[Clock] = _SystemClock()
