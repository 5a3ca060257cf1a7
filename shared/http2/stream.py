"""A stream, for its reader, its writer and its connection.

Reading. DATA is queued as it comes; `read` returns everything queued as one piece, and only then is the peer
allowed to send that much more. So a stream that is not read holds one window of bytes and no more, and does
not hold up any other. `pass_on` is `read` in a loop, without waking the reader's task for each piece: what
came is passed on at the end of the connection's turn (`Connection.receive`).

Writing. `write` returns when its last byte has been framed. Until the windows allow that, the bytes
stay the caller's own (a view, no copy); the connection takes them as they fit, in turns with the
other streams (`Connection.pump`).

One reader and one writer at a time. A message that came to its end is readable to its end, whatever
happens to the stream or the connection after it.

The report of a server on a stream is not cut off by a reset. The cost of a stream is known only when its
handler has ended, and by then the client may have reset it. So the server sends it in a frame of the
connection (`frames.REPORT`), once for every stream whose handler has something to report, right after the
stream's end. A client that has not read a stream to its end waits a moment for it.

Frames of the same type tell a client the server's load, at intervals and, by the id of a stream, when that
stream's request has become part of it. They go to a connection that takes bytes: what a slow reader would be
told late is left out, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from shared.http2.connection_errors import ErrorCode, ProtocolViolation, StreamFailed, StreamReset
from shared.http2.headers import HeaderList, content_length
from shared.http2.limits import RESET_IDS_MAX

if TYPE_CHECKING:
    from shared.http2.connection import Connection

# -- reports --------------------------------------------------------------------------------------


class Report:
    """The report on one stream. It is not expected before the stream is over, ended or reset."""

    __slots__ = ("_waiter", "counted", "is_due", "payload")

    def __init__(self, counted: Callable[[], None] = lambda: None) -> None:
        self.counted = counted
        """Called when the server's load, as it was told last, has the stream's request in it."""
        self.payload: bytes | None = None
        """The payload; None until it came."""
        self.is_due = False
        """True if the report is expected and has not come."""
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self, within_s: float) -> bytes | None:
        """Wait for the payload. None when none is expected, or none came in time."""
        if self.is_due:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(within_s):
                    await self._waiter
            except TimeoutError:
                self.is_due = False
            finally:
                self._waiter = None
        return self.payload

    def expect(self) -> bool:
        """Expect the report, as the stream is over. Returns whether there is something to wait for."""
        self.is_due = self.payload is None
        return self.is_due

    def deliver(self, payload: bytes | None) -> None:
        """Take the payload, or with None the news that none will come."""
        self.is_due = False
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


# -- streams --------------------------------------------------------------------------------------


BODILESS: Final = frozenset([(b":status", b"204"), (b":status", b"304")])
"""Statuses of responses without a body, whatever length they declare (RFC 9110, 8.6)."""


class Stream:
    __slots__ = (
        "_accept",
        "_chunks",
        "_connection",
        "_reader",
        "_writer",
        "buffered",
        "error",
        "head",
        "id",
        "left",
        "pending",
        "queued",
        "receive_window",
        "received_all",
        "report",
        "send_window",
        "sent_all",
        "uncredited",
    )

    def __init__(self, stream_id: int, connection: Connection) -> None:
        self.id = stream_id
        self.head: HeaderList | None = None  # the peer's header list, once it came
        self.error: StreamFailed | None = None
        self.received_all = False
        self.sent_all = False
        self.buffered = 0  # bytes received and not yet read
        self.uncredited = 0  # bytes read and not yet given back to the peer's window
        self.pending: memoryview | None = None  # what `write` could not yet send
        self.queued = False  # in the connection's backlog
        self.left: int | None = None  # bytes that the peer declared and did not send yet
        self.send_window = 0  # kept by the fast path alone, like `receive_window`
        self.receive_window = 0
        self.report: Report | None = None  # at a client, where the server's report goes
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._reader: asyncio.Future[bool] | None = None  # its result: whether the reader is to go on reading
        self._accept: Callable[[bytes], bool] | None = None  # the reader's, during `pass_on`
        self._writer: asyncio.Future[bool] | None = None

    def __repr__(self) -> str:
        return (
            f"<Stream {self.id} buffered={self.buffered} received_all={self.received_all} "
            f"sent_all={self.sent_all} pending={len(self.pending or b'')} error={self.error}>"
        )

    @property
    def open(self) -> bool:
        return self.error is None and not (self.received_all and self.sent_all)

    # -- for the reader -----------------------------------------------------------------------

    async def wait_head(self) -> HeaderList:
        """Wait for the peer's header list. Raises StreamFailed if none will come."""
        assert self._reader is None, "one reader at a time"
        try:
            while self.head is None:
                if self.error is not None:
                    raise self.error.copy()
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
        finally:
            self._reader = None
        return self.head

    async def read(self) -> bytes | None:
        """All bytes that are queued, at least one. None at the end. Raises StreamFailed when cut off."""
        while not self._chunks:
            if self.received_all:
                return None
            if self.error is not None:
                raise self.error.copy()
            await self._wait_to_read()
        return self.read_nowait()

    async def pass_on(self, accept: Callable[[bytes], bool]) -> bool:
        """Call `accept` with all bytes that are queued, now and whenever more came, for as long as it returns
        True.

        Returns False at the end, and True when there may be more that was not accepted. Raises StreamFailed
        when cut off, and what `accept` raises.
        """
        self._accept = accept
        try:
            while True:
                if self._chunks:
                    if not accept(self.read_nowait()):
                        return True
                elif self.received_all:
                    return False
                elif self.error is not None:
                    raise self.error.copy()
                elif not await self._wait_to_read():
                    return True
        finally:
            self._accept = None

    def flush_to_reader(self) -> None:
        """Pass the bytes of this turn to a reader in `pass_on`. A reader that was woken reads by itself."""
        reader = self._reader
        if reader is None or reader.done() or self._accept is None:
            return
        try:
            if not self._accept(self.read_nowait()):
                reader.set_result(False)
        except Exception as error:
            reader.set_exception(error)
        finally:
            del reader  # it may hold an error, whose traceback holds this frame

    def read_nowait(self) -> bytes:
        """The queued bytes, perhaps none. The peer may send that much more."""
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.uncredited += self.buffered
        self.buffered = 0
        if self.uncredited >= self._connection.credit_at:
            self._credit()
        return data

    async def _wait_to_read(self) -> bool:
        assert self._reader is None, "one reader at a time"
        self._reader = asyncio.get_running_loop().create_future()
        try:
            return await self._reader
        finally:
            self._reader = None

    def _credit(self) -> None:
        if not self.received_all and self.error is None:
            credit, self.uncredited = self.uncredited, 0
            self._connection.credit_stream(self, credit)

    # -- for the writer -----------------------------------------------------------------------

    def write_nowait(self, data: bytes | memoryview, *, end: bool = False) -> memoryview | None:
        """Frame what fits now. Returns the rest, or None. Raises StreamFailed when the stream has failed.

        `end`: nothing comes after `data`. When it fits one frame, that frame ends the stream, which saves
        both sides another; `finish` is to be called all the same.
        """
        if self.error is not None:
            raise self.error.copy()
        assert not self.sent_all, "write after finish"
        assert self.pending is None, "one writer at a time"
        return self._connection.send(self, data, end=end)

    async def write(self, data: bytes | memoryview, *, end: bool = False) -> None:
        """Frame all of `data`, and wait until that is done. `end` as in `write_nowait`. Raises StreamFailed
        when the stream has failed."""
        rest = self.write_nowait(data, end=end)
        if rest is None:
            return
        self.pending = rest
        self._connection.enqueue(self)
        self._writer = asyncio.get_running_loop().create_future()
        try:
            await self._writer
        finally:
            self._writer = self.pending = None

    def finish(self) -> None:
        """Send END_STREAM, unless it was sent already or the stream has failed."""
        assert self.pending is None, "finish during a write"
        if self.error is None and not self.sent_all:
            self._connection.end(self)

    def reset(self, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """Send RST_STREAM if the stream is open. Never fails."""
        if self.open:
            self._connection.reset(self, StreamReset(code, by_peer=False), code)

    # -- for the connection -------------------------------------------------------------------

    def deliver_head(self, head: HeaderList) -> None:
        """Take the peer's header list. Raises ProtocolViolation for an invalid content-length."""
        self.head = head
        if self.left is None and head[0] not in BODILESS:
            self.left = content_length(head)
        _wake(self._reader)

    def deliver(self, data: bytes, flow_len: int) -> None:
        """Queue DATA. `flow_len` counts padding too, which is consumed by arriving. Raises ProtocolViolation
        when more comes than was declared."""
        length = len(data)
        if self.left is not None:
            self.left -= length
            if self.left < 0:
                raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a message longer than its content-length")
        if length:
            if self._accept is None:
                _wake(self._reader)
            elif not self._chunks:
                self._connection.to_flush.append(self)
            self._chunks.append(data)
            self.buffered += length
        if flow_len != length:
            self.uncredited += flow_len - length
            if self.uncredited >= self._connection.credit_at:
                self._credit()

    def deliver_end(self) -> None:
        """Take the peer's end of the message. Raises ProtocolViolation when more was declared."""
        if self.left:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a message shorter than its content-length")
        self.received_all = True
        _wake(self._reader)

    def written(self) -> None:
        """Wake the writer, as the last of `pending` was framed."""
        self.pending = None
        _wake(self._writer)

    def fail(self, error: StreamFailed) -> None:
        self.error = error
        _wake(self._reader)
        if self._writer is not None and not self._writer.done():
            self._writer.set_exception(error.copy())


def _wake(waiter: asyncio.Future[bool] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(True)
