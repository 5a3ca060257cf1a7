"""Waiting for what other tasks do, of whom no event tells."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = float(os.environ.get("PATIENCE_S", "60"))
"""Nothing takes this long; a test that is wrong fails then instead of hanging. A busy machine gives more."""


async def until(condition: Callable[[], bool], pause_s: float = 0.0) -> None:
    """Let everybody else run until the condition holds. `pause_s`: between two looks, where other processes
    have to do something."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 -- what it watches sets no event
            await asyncio.sleep(pause_s)
