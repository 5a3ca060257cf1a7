"""Cleanup in a task that is being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")


class Done(Struct, Generic[T], frozen=True, eq=False):
    """An awaitable that is over already: the result of a call that had nothing to wait for."""

    result: T

    def __await__(self) -> Generator[Any, None, T]:
        return self.result
        yield  # makes this function a generator


async def shielded(work: Awaitable[T], then: Callable[[T], None] = lambda _: None) -> None:
    """Run `work` to its end even if the caller is cancelled, call `then` with its result, and only after that
    raise a cancellation that came meanwhile.

    `work` must be bounded: the caller cannot leave before it is done.
    """
    if isinstance(work, Done):  # nothing to shield, and a task would cost more than the work did
        then(work.result)
        return
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    failed: BaseException | None = None
    reason: BaseException | None = None
    try:
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                if future.cancelled():
                    raise
                cancelled = error
        failed = future.exception()
        if failed is None:
            then(future.result())
        if (reason := cancelled or failed) is not None:
            raise reason
    finally:
        del future, cancelled, failed, reason  # a traceback holds this frame, and that must not hold it
