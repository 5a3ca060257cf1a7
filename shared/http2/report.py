"""A server's report on a stream, which a reset does not cut off.

The cost of a stream is known only when its handler has ended, and by then the client may have reset it. So
the server sends it in a frame of the connection (`frames.REPORT`), once for every stream whose handler has
something to report, right after the stream's end. A client that has not read a stream to its end waits a
moment for it.
"""

from __future__ import annotations

import asyncio


class Report:
    """The report on one stream. It is not expected before the stream is over, ended or reset."""

    __slots__ = ("_is_due", "_waiter", "payload")

    def __init__(self) -> None:
        self.payload: bytes | None = None
        """The payload; None until it came."""
        self._is_due = False
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self, within_s: float) -> bytes | None:
        """Wait for the payload. None when none is expected, or none came in time."""
        if self._is_due:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(within_s):
                    await self._waiter
            except TimeoutError:
                self._is_due = False
            finally:
                self._waiter = None
        return self.payload

    @property
    def is_due(self) -> bool:
        """Whether the report is expected and has not come."""
        return self._is_due

    def expect(self) -> bool:
        """Expect the report, as the stream is over. Returns whether there is something to wait for."""
        self._is_due = self.payload is None
        return self._is_due

    def deliver(self, payload: bytes | None) -> None:
        """Take the payload, or with None the news that none will come."""
        self._is_due = False
        if payload is not None:
            self.payload = payload
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
