"""Waiting for whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def first_of(*waited: Awaitable[object], within_s: float | None = None) -> None:
    """Wait until one of these is over, or for so long; with None as long as it takes. The others are
    cancelled. What failed is not told."""
    tasks = [asyncio.ensure_future(one) for one in waited]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
