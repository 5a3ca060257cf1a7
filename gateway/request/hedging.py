"""The race of two attempts of one request.

A stream whose first event has not come in the time that nearly all of its model's take (`FirstEvents.p95_ms`)
is sent to another replica as well, where operators have turned that on for its service tier. The first one
whose answer begins is the winner; the other is cancelled at once, which resets its stream. A request that is
no stream is never hedged: its first byte comes with its last token, so there is no telling a slow answer from
a long one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shared.process.shield import shielded

T = TypeVar("T")


async def race(
    lead: asyncio.Task[T], after_s: float, start: Callable[[], asyncio.Task[T] | None]
) -> asyncio.Task[T]:
    """The task that succeeds first, or the lead where none does. `start` is called when the lead is not done
    after `after_s`; it starts another, or returns None. Both are over when this returns or raises."""
    tasks = [lead]
    try:
        await asyncio.wait(tasks, timeout=after_s)
        if not lead.done() and (other := start()) is not None:
            tasks.append(other)
        left = set(tasks)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if winner := next((task for task in tasks if task in done and succeeded(task)), None):
                return winner
        return lead
    finally:
        for task in tasks:
            task.cancel()
        await shielded(asyncio.wait(tasks))  # closing a stream waits for nothing
        for task in tasks:
            failure_of(task)  # looked at, so that asyncio does not report it


def succeeded(task: asyncio.Task[T]) -> bool:
    """True if the task is done and has a result."""
    return task.done() and not task.cancelled() and task.exception() is None


def failure_of(task: asyncio.Task[T]) -> BaseException | None:
    """The error that a task ended with; None for one with a result, and one that was cancelled."""
    return None if task.cancelled() else task.exception()
