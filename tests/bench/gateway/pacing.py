"""Load at a steady rate, whether it is answered or not (an open loop)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine


async def at_a_rate(
    rate: float, call: Callable[[], Coroutine[None, None, None]], over: asyncio.Event
) -> None:
    """Make so many calls a second, without waiting for their ends, and at last wait for all."""
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in itertools.count(1):
            if over.is_set():
                return
            group.create_task(call())
            await asyncio.sleep(max(0.0, began_s + number / rate - time.perf_counter()))
