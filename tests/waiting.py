"""Waiting for what other tasks do, of whom no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 60.0
"""Nothing takes this long; a test that is wrong fails then instead of hanging."""
TURNS: Final = 100
"""Turns of the event loop that are taken at once. What lasts longer is another process's doing."""


async def until(condition: Callable[[], bool]) -> None:
    """Let everybody else run until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        turns = 0
        while not condition():
            await asyncio.sleep(0 if turns < TURNS else 0.001)
            turns += 1
