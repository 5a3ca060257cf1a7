"""Waiting for what other tasks do, of whom no event tells."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = float(os.environ.get("PATIENCE_S", "60"))
"""Nothing takes this long; a test that is wrong fails then instead of hanging. A busy machine gives more."""


TURNS: Final = 200
"""Turns of the loop within which what only this process does is done."""
PAUSE_S: Final = 0.002


async def until(condition: Callable[[], bool], pause_s: float = 0.0) -> None:
    """Let everybody else run until the condition holds. `pause_s`: between two looks, where other processes
    have to do something. Where others still have after so many turns, they get the processor, too."""
    turns = 0
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            turns += 1
            await asyncio.sleep(pause_s if turns < TURNS else max(pause_s, PAUSE_S))
