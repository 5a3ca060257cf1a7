"""Background tasks, which run beside the requests for as long as the gateway serves.

A task that fails is restarted after `RESTART_S_MIN`, and after twice as long with every failure in a row, up
to `RESTART_S_MAX`. Until then it is *down*, which `/readyz` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock

RESTART_S_MIN: Final = 1.0
RESTART_S_MAX: Final = 60.0

log = logs.get(__name__)

Work = Callable[[], Awaitable[None]]
"""The body of a background task. It runs until it is cancelled; one that returns is not restarted."""


class Background:
    """A group of background tasks: `async with Background({"name": work})` runs them until the block is
    left."""

    def __init__(self, works: Mapping[str, Work], clock: Clock = SYSTEM_CLOCK) -> None:
        self._works: Final = works
        self._clock: Final = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._down: set[str] = set()

    @property
    def down(self) -> list[str]:
        """The names of the tasks that failed and have not been restarted yet."""
        return sorted(self._down)

    async def __aenter__(self) -> Background:
        self._tasks = [asyncio.create_task(self._keep(*item), name=item[0]) for item in self._works.items()]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _keep(self, name: str, work: Work) -> None:
        restart_s = RESTART_S_MIN
        while True:
            began_s = self._clock.monotonic()
            try:
                return await work()
            except Exception:
                log.exception("gateway.background_failed", task=name, again_s=restart_s)
            if self._clock.monotonic() - began_s > RESTART_S_MAX:
                restart_s = RESTART_S_MIN  # it has worked for a while
            self._down.add(name)
            await self._clock.sleep(restart_s)
            self._down.discard(name)
            restart_s = min(RESTART_S_MAX, 2 * restart_s)
