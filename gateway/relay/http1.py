"""HTTP/1.1 to the engines, with the interface of `gateway.relay.http2_client.Http2Transport`.

A connection serves one request after the other. What the socket brings in a turn of the loop is unframed in
that turn and handed to the reader as one piece: no stream object, no task and no future is between the two,
which is what makes an event cost more in aiohttp's client.

Rules:

1. Nothing is sent on a connection that may have another answer on it: one is kept only after an answer that
   was whole, well framed and followed by nothing (http1_framing), and whose request was sent to its end.
2. A chunk that comes alone is offered to its reader as it came, since its client wants the same framing.
3. While its reader takes nothing, a connection holds at most `READ_BUFFER_LEN` and one read more, and then
   reads nothing from the socket, whose buffer is bounded as well.
4. Leaving an answer before its end closes the connection, which is what tells the engine to stop.
5. A kept connection that is closed before a byte of the answer, within `CROSSED_S` of the request, was most
   likely closed while the request was under way, for being unused or for having served enough. The request
   is sent once more, on a new connection. RFC 9112 (9.3.1) allows that for idempotent methods, and RFC 9110
   (9.2.2) for a POST of which it is known that it changes nothing, or that it was not begun: an engine keeps
   nothing of a request, and has read nothing of one that came after it had closed. Where no new connection
   comes about, the engine may have died of the request, which then counts as lost. Where that one is closed
   as well, two may have died of it, unless the first was unused for `UNUSED_S_MIN`: that is LostTwice. So a
   request that another engine lost before is sent once more only where the connection was unused for as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, cast

from msgspec import Struct

from gateway.relay.hop_errors import (
    HopError,
    Lost,
    LostTwice,
    Malformed,
    NoConnection,
    NoConnectionInTime,
    Unsendable,
)
from gateway.relay.http1_framing import (
    HEAD_END,
    HEAD_LEN_MAX,
    BadAnswer,
    BodyFraming,
    Head,
    kept_s,
    parse_head,
)
from gateway.relay.http2_client import Origin, parsed_url
from shared.http2.headers import Headers
from shared.http2.stream import Report

IDLE_S: Final = 3.0
"""The time for which an unused connection is kept, in seconds, where the engine does not say: below the 5 s
of uvicorn (vLLM, SGLang), or requests would be sent into closed sockets."""
IDLE_S_MAX: Final = 15.0
"""The longest time for which an unused connection is kept, in seconds, where the engine says one."""
CROSSED_S: Final = 1.0
"""The longest that the end of a connection and a request may be under way to each other, in seconds."""
UNUSED_S_MIN: Final = 0.5
"""The shortest time for which an engine keeps an unused connection, in seconds: one that is closed sooner may
have been closed for what it was sent."""
RECEIVE_BUFFER_LEN: Final = 64 * 1024
"""SO_RCVBUF in bytes, which Linux doubles. An answer that the client does not read waits there, and the
kernel's default grows to megabytes."""
READ_BUFFER_LEN: Final = 64 * 1024
PIECE_LEN: Final = 64 * 1024
"""Bytes of a request that are given to the socket at once: copying more would hold up the event loop."""
TARGETS_MAX: Final = 1024
"""The methods and URLs that are kept as they are sent."""
INTERIM_MAX: Final = 8
"""The number of interim answers (1xx) before the real one."""

AcceptChunk = Callable[[bytes, int], bool | None]
"""A function that takes a read which is one whole chunk with its framing, and the index of the chunk's bytes,
behind which two bytes follow. Returns None where it did not take it, and else whether there is room for
more."""
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
"""The option of Linux by which a stream's events are acknowledged two at a time, as on a connection that has
answered before. Else each read sends a packet, which costs more than the read. An engine that waits for
acknowledgements (it has not set TCP_NODELAY) is not held up for long: after the first one that is late, by
40 ms, the kernel goes back to one for each read."""


class Http1Transport:
    """A transport over HTTP/1.1, made in a running loop. It has as many connections as requests in flight:
    quotas and queues throttle, not the pool."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl = ssl_context
        self._idle: dict[Origin, dict[_Connection, None]] = {}
        """Connections that may be used again, the one used last behind the others."""
        self._open: set[_Connection] = set()

    async def exchange(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[bytes, bytes]],
        content: bytes,
        *,
        connect_s: float | None = None,
        connected: Callable[[], None] | None = None,
        report: Report | None = None,
        is_repeated: bool = False,
    ) -> Http1ResponseStream:
        """Send a request, and wait for the response's headers. The caller closes the response.

        `is_repeated`: it was lost with another server before, so it is sent once more only where it surely
        reached nobody (rule 5). `connected` is called once there is a connection, new or kept: what fails
        before was not dispatched. No report comes over HTTP/1.1. Raises HopError.
        """
        target = target_of(method, url)
        head = request_head(target.start, headers)
        idle = self._idle.get(target.origin)
        if idle:
            connection, _ = idle.popitem()
        else:
            connection = await self._connect(target.origin, connect_s)
        if connected is not None:
            connected()
        try:
            return await connection.request(head, content, has_body=target.has_body)
        except Lost as lost:
            was_unused = connection.was_unused
            if not connection.has_crossed or (is_repeated and not was_unused):
                raise
            try:
                connection = await self._connect(target.origin, connect_s)
            except HopError:  # of the request, perhaps
                raise _again(lost) from None
        try:
            return await connection.request(head, content, has_body=target.has_body)
        except Lost as lost:
            if was_unused:
                raise
            raise LostTwice(str(lost)) from None

    async def _connect(self, origin: Origin, within_s: float | None) -> _Connection:
        scheme, host, port = origin
        try:
            async with asyncio.timeout(within_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, origin),
                    host,
                    port,
                    ssl=self._tls() if scheme == "https" else None,
                )
        except TimeoutError:
            raise NoConnectionInTime(f"no connection to {host}:{port} in time") from None
        except (OSError, UnicodeError) as error:  # TLS's and the resolver's errors are OSErrors
            raise NoConnection(f"{host}:{port}: {error}") from error
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        return self._ssl

    async def aclose(self) -> None:
        for connection in list(self._open):
            connection.fail(Lost("the transport is closed"))
        await asyncio.sleep(0)  # the transports tell their protocols

    # -- what connections tell --------------------------------------------------------------------

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for another request."""
        self._idle.setdefault(connection.origin, {})[connection] = None

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.origin]


class Http1ResponseStream:
    """A response whose body is still to be read. Closing it before its end closes the connection."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, head: Head, connection: _Connection) -> None:
        self.status: Final = head.status
        self.headers: Final[Mapping[str, str]] = Headers(head.headers)
        self._connection = connection

    async def read(self) -> bytes | None:
        """All bytes that have come, at least one. None at the end."""
        return await self._connection.read()

    async def pass_on(self, accept: Callable[[bytes], bool], accept_chunk: AcceptChunk | None = None) -> bool:
        """Call `accept` as `shared.http2.stream.Stream.pass_on` does, but for what `accept_chunk` takes."""
        return await self._connection.pass_on(accept, accept_chunk)

    async def aclose(self) -> None:
        self._connection.leave()


class _Connection(asyncio.Protocol):
    """A connection and the answer that is read on it. No `BufferedProtocol`: uvloop reads into a buffer of
    its own and copies out what came, which costs less than the calls for one of ours."""

    def __init__(self, owner: Http1Transport, origin: Origin) -> None:
        self.origin: Final = origin
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._kept_s = math.inf
        """When it was kept last."""
        self._reused_s = -math.inf
        """When the last request was sent, if that was not the first."""
        self.has_crossed = False
        """True if the connection was closed while the request was under way, before a byte of the answer
        (rule 5)."""
        self._is_busy = True
        """True from a request, or from the beginning, until the connection is kept."""
        self._has_body = True
        self._interim = 0
        self._received = b""
        """The beginning of a head."""
        self._head: Head | None = None
        self._body: BodyFraming | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._is_paused = False
        self._error: HopError | None = None
        """Why no more will come. None while more may, and at an answer's end."""
        self._is_whole = False
        self._reader: asyncio.Future[bool] | None = None
        self._accept: Callable[[bytes], bool] | None = None
        self._accept_chunk: AcceptChunk | None = None
        self._upload: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    # -- a request --------------------------------------------------------------------------------

    async def request(self, head: bytes, content: bytes, *, has_body: bool) -> Http1ResponseStream:
        """Send a request, and wait for the answer's head. Closes the connection where that fails. Raises
        HopError."""
        try:
            return Http1ResponseStream(await self._request(head, content, has_body=has_body), self)
        except BaseException:
            self.close()
            raise

    async def _request(self, head: bytes, content: bytes, *, has_body: bool) -> Head:
        if self._expiry is not None:
            self._expiry.cancel()
            self._reused_s = self._loop.time()
        self._is_busy, self._has_body = True, has_body
        self._interim, self._head, self._body, self._is_whole = 0, None, None, False
        transport = self._transport
        if transport is None:
            raise Lost("the connection was closed")
        if len(content) <= PIECE_LEN:
            transport.write(head + content)
        else:
            transport.write(head)
            self._upload = self._loop.create_task(self._send(content))
        while self._head is None:
            if self._error is not None:
                raise _again(self._error)
            await self._wait()
        return self._head

    @property
    def was_unused(self) -> bool:
        """True if it was unused before the last request for so long that it may have been closed for that."""
        return self._reused_s - self._kept_s >= UNUSED_S_MIN

    async def _send(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest and self._transport is not None:
            self._transport.write(bytes(rest[:PIECE_LEN]))
            rest = rest[PIECE_LEN:]
            await self._may_write.wait()

    async def read(self) -> bytes | None:
        while not self._chunks:
            if self._is_whole:
                return None
            if self._error is not None:
                raise _again(self._error)
            await self._wait()
        return self._taken()

    async def pass_on(self, accept: Callable[[bytes], bool], accept_chunk: AcceptChunk | None) -> bool:
        self._accept = accept
        self._accept_chunk = accept_chunk
        if accept_chunk is not None:
            self._delay_acks()
        try:
            while True:
                if self._chunks:
                    if not accept(self._taken()):
                        return True
                elif self._is_whole:
                    return False
                elif self._error is not None:
                    raise _again(self._error)
                elif not await self._wait():
                    return True
        finally:
            self._accept = self._accept_chunk = None

    def _delay_acks(self) -> None:
        """Where the connection is closed already, uvloop's socket raises ValueError. What came before that is
        to be read all the same."""
        if self._socket is not None and _QUICKACK is not None:
            with contextlib.suppress(OSError, ValueError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)

    async def _wait(self) -> bool:
        """Wait for news. False when `accept` wants no more."""
        assert self._reader is None, "one reader at a time"
        self._reader = self._loop.create_future()
        try:
            return await self._reader
        finally:
            self._reader = None

    def _taken(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def leave(self) -> None:
        """Keep the connection if the answer was read to its end, and nothing speaks against it (rule 1: no
        other answer may be on it). Otherwise close it."""
        head, body = self._head, self._body
        is_sent = self._upload is None or (self._upload.done() and not self._upload.cancelled())
        may_stay = self._is_whole and is_sent and not self._chunks and self._transport is not None
        may_stay = may_stay and body is not None and not body.has_surplus
        if may_stay and head is not None and head.keeps_alive:
            if self._is_busy:
                self._is_busy, self._upload, self._kept_s = False, None, self._loop.time()
                self._expiry = self._loop.call_later(_idle_s(head), self.close)
                self._owner.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection now. What was not sent is dropped."""
        if self._upload is not None:
            self._upload.cancel()
        if self._transport is not None:
            self._owner.lost(self)
            self._transport.abort()

    # -- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_LEN)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        body = self._body
        if body is None:
            self._receive_head(data)
            return
        accept_chunk = self._accept_chunk
        if accept_chunk is not None and self._reader is not None and not self._reader.done():
            try:  # the reader is in no variable: it may hold an error, whose traceback holds this frame
                if (start := body.alone(data)) and (has_room := accept_chunk(data, start)) is not None:
                    if not has_room:
                        self._reader.set_result(False)
                    return
            except Exception as error:
                self._reader.set_exception(error)
                return
        self._feed(body, data)

    def _feed(self, body: BodyFraming, data: bytes) -> None:
        if self._is_whole:  # nobody asked for this
            self._error = Malformed("bytes after the answer's end")
            self.close()
            return
        try:
            piece = body.feed(data)
        except BadAnswer as error:
            self.fail(Malformed(str(error)))
            return
        if body.is_done:
            self._is_whole = True
        if piece:
            self._deliver(piece)
        if self._is_whole:
            self._wake()

    def _receive_head(self, data: bytes) -> None:
        if not self._is_busy:
            self.close()
            return
        received = self._received + data
        end = received.find(HEAD_END)
        if end < 0 or end > HEAD_LEN_MAX:
            self._received = received
            if len(received) > HEAD_LEN_MAX:
                self.fail(Malformed("the head is too long"))
            return
        self._received = b""
        try:
            head = parse_head(received[:end], has_body=self._has_body)
        except BadAnswer as error:
            self.fail(Malformed(str(error)))
            return
        rest = received[end + len(HEAD_END) :]
        if (
            head.status < 200 and head.status != 101
        ):  # that one is final, and no answer to any request of ours
            self._interim += 1
            if self._interim > INTERIM_MAX:
                self.fail(Malformed("too many interim answers"))
            elif rest:
                self._receive_head(rest)
            return
        self._head, self._body = head, head.body
        self._is_whole = head.body.is_done
        if rest and self._is_whole:
            head.body.feed(rest)  # its surplus is noted
        elif rest:
            self.data_received(rest)
        self._wake()

    def _deliver(self, piece: bytes) -> None:
        reader, accept = self._reader, self._accept
        if reader is not None and accept is not None and not reader.done():
            try:
                if not accept(piece):
                    reader.set_result(False)
            except Exception as error:
                reader.set_exception(error)
            finally:
                del reader  # it may hold an error, whose traceback holds this frame
            return
        self._chunks.append(piece)
        self._buffered += len(piece)
        if self._buffered > READ_BUFFER_LEN and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(True)

    def fail(self, error: HopError) -> None:
        """Close the connection, because of what came or because nothing more is wanted."""
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def eof_received(self) -> None:
        """The engine sends no more. The connection is closed, and `connection_lost` says what that means."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.lost(self)
        if self._expiry is not None:
            self._expiry.cancel()
        if self._upload is not None:
            self._upload.cancel()
        self._may_write.set()
        if self._body is not None and self._body.ends_with_connection and exc is None and not self._error:
            self._is_whole = True
        elif not self._is_whole and self._error is None:
            said = f"the connection was lost: {exc}" if exc else "the connection was closed"
            kind = Lost if self._head is None else Malformed
            self._error = kind(said)
            is_silent = self._head is None and not self._received and not self._interim
            self.has_crossed = is_silent and self._loop.time() - self._reused_s < CROSSED_S
        self._wake()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()


def _idle_s(head: Head) -> float:
    """The time for which a connection is kept behind this answer, in seconds. 0.0 closes it in the loop's
    next turn. What is told is halved: the answer and the next request are under way meanwhile."""
    told_s = kept_s(head.headers)
    return IDLE_S if told_s is None else min(IDLE_S_MAX, told_s / 2)


def _again(error: HopError) -> HopError:
    """The same error with a traceback of its own: that of one raised twice would hold the frames of both."""
    return type(error)(str(error))


# -- heads of requests ----------------------------------------------------------------------------


class Target(Struct, frozen=True):
    origin: Origin
    start: bytes
    """The request line and the Host header."""
    has_body: bool
    """True if the answer may have a body."""


@lru_cache(maxsize=TARGETS_MAX)
def target_of(method: str, url: str) -> Target:
    """Parse a method and a URL. Raises Unsendable."""
    parsed, origin = parsed_url(url)
    start = f"{method} {parsed.raw_path_qs} HTTP/1.1\r\nhost: {parsed.host_port_subcomponent}\r\n"
    return Target(origin, start.encode("ascii"), method != "HEAD")


def request_head(start: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of a request. Raises Unsendable for a header that would be read as something else.
    The value is not shown: it may be a secret."""
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    for (name, _), line in zip(headers, lines, strict=True):
        if line.count(b"\n") > 1 or line.count(b"\r") > 1 or b"\0" in line:
            raise Unsendable(f"header {name!r} cannot be sent")
    return b"%b%b\r\n" % (start, b"".join(lines))
