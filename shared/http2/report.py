"""A server's report on a stream, which a reset does not cut off.

The cost of a stream is known only when its handler has ended, and by then the client may have reset it. So
the server sends it in a frame of the connection (`frames.REPORT`), once for every stream whose handler has
something to report, right after the stream's end. A client that has not read a stream to its end waits a
moment for it.

Frames of the same type tell a client the server's load, at intervals and, by the id of a stream, when that
stream's request has become part of it. They go to a connection that takes bytes: what a slow reader would be
told late is left out, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from shared.http2.limits import RESET_IDS_MAX


class Report:
    """The report on one stream. It is not expected before the stream is over, ended or reset."""

    __slots__ = ("_is_due", "_waiter", "counted", "payload")

    def __init__(self, counted: Callable[[], None] = lambda: None) -> None:
        self.counted = counted
        """Called when the server's load, as it was told last, has the stream's request in it."""
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
        """True if the report is expected and has not come."""
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


class AwaitedReports:
    """The reports on a client's streams that are over, by their ids, oldest first, and of a bounded
    number."""

    __slots__ = ("_reports",)

    def __init__(self) -> None:
        self._reports: OrderedDict[int, Report] = OrderedDict()

    @property
    def are_due(self) -> bool:
        """True if at least one of them is expected and has not come."""
        return any(report.is_due for report in self._reports.values())

    def expect(self, stream_id: int, report: Report) -> None:
        """Await the report of a stream that is over, unless it came before."""
        if report.expect():
            self._reports[stream_id] = report
            if len(self._reports) > RESET_IDS_MAX:
                self._reports.popitem(last=False)[1].deliver(None)

    def pop(self, stream_id: int) -> Report | None:
        """Remove and return the report of a stream. None when none is awaited."""
        return self._reports.pop(stream_id, None)

    def give_up(self) -> None:
        """Await none of them any more."""
        for report in self._reports.values():
            report.deliver(None)
        self._reports.clear()
