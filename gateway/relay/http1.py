"""HTTP/1.1 to the engines, with the interface of `shared.http2.client.Http2Transport`.

A connection serves one request after the other. What the socket brings in a turn of the loop is unframed in
that turn and handed to the reader as one piece: no stream object, no task and no future is between the two,
which is what makes an event cost more in aiohttp's client and in httpx.

Rules:

1. Nothing is sent on a connection that may have another answer on it: one is kept only after an answer that
   was whole, well framed and followed by nothing (http1_framing), and whose request was sent to its end.
2. A chunk that comes alone is offered to its reader as it came, since its client wants the same framing.
3. While its reader takes nothing, a connection holds at most `READ_BUFFER_LEN` and one read more, and then
   reads nothing from the socket, whose buffer is bounded as well.
4. Leaving an answer before its end closes the connection, which is what tells the engine to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, cast

import httpx
from msgspec import Struct

from gateway.relay.http1_framing import (
    HEAD_END,
    HEAD_LEN_MAX,
    BadAnswer,
    Body,
    Head,
    parse_head,
)
from shared.http2.client import NO_TIMEOUTS, Origin, Timeouts
from shared.http2.headers import Headers
from shared.http2.report import Report

IDLE_S: Final = 15.0
"""The time for which an unused connection is kept, in seconds: below any engine's own limit, or requests
would be sent into closed sockets."""
RECEIVE_BUFFER_LEN: Final = 64 * 1024
"""SO_RCVBUF in bytes, which Linux doubles. An answer that the client does not read waits there, and the
kernel's default grows to megabytes."""
READ_BUFFER_LEN: Final = 64 * 1024
READ_LEN_MAX: Final = 256 * 1024
"""The most that an event loop reads at once."""
PIECE_LEN: Final = 64 * 1024
"""Bytes of a request that are given to the socket at once: copying more would hold up the event loop."""
INTERIM_MAX: Final = 8
"""The number of interim answers (1xx) before the real one."""
TARGETS_MAX: Final = 1024

AcceptChunk = Callable[[bytes, int], bool | None]
"""A function that takes a read which is one whole chunk with its framing, and the index of the chunk's bytes,
behind which two bytes follow. Returns None where it did not take it, and else whether there is room for
more."""
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
"""The option of Linux by which a stream's events are acknowledged two at a time, as on a connection that has
answered before. Else each read sends a packet, which costs more than the read. An engine that waits for
acknowledgements (it has not set TCP_NODELAY) is not held up for long: after the first one that is late, by
40 ms, the kernel goes back to one for each read."""


class _Target(Struct, frozen=True):
    origin: Origin
    start: bytes
    """The request line and the Host header."""
    has_body: bool
    """True if the answer may have a body."""


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
        timeouts: Timeouts = NO_TIMEOUTS,
        connected: Callable[[], None] | None = None,
        report: Report | None = None,
    ) -> Http1ResponseStream:
        """Send a request, and wait for the response's headers. The caller closes the response.

        Of the timeouts only `connect_s` is applied. `connected` is called once there is a connection, new or
        kept: what fails before was not dispatched. No report comes over HTTP/1.1. Raises httpx's errors.
        """
        target = _target(method, url)
        head = _request_head(target.start, headers)
        idle = self._idle.get(target.origin)
        if idle:
            connection, _ = idle.popitem()
        else:
            connection = await self._connect(target.origin, timeouts.connect_s)
        if connected is not None:
            connected()
        try:
            answer = await connection.request(head, content, has_body=target.has_body)
        except BaseException:
            connection.close()
            raise
        return Http1ResponseStream(answer, connection)

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
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} in time") from None
        except (OSError, UnicodeError) as error:  # TLS's and the resolver's errors are OSErrors
            raise httpx.ConnectError(f"{host}:{port}: {error}") from error
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        return self._ssl

    async def aclose(self) -> None:
        for connection in list(self._open):
            connection.fail(httpx.ReadError("the transport is closed"))
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
        self._is_busy = True
        """True from a request, or from the beginning, until the connection is kept."""
        self._has_body = True
        self._interim = 0
        self._received = b""
        """The beginning of a head."""
        self._head: Head | None = None
        self._body: Body | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._is_paused = False
        self._error: httpx.TransportError | None = None
        """Why no more will come. None while more may, and at an answer's end."""
        self._is_whole = False
        self._reader: asyncio.Future[bool] | None = None
        self._accept: Callable[[bytes], bool] | None = None
        self._accept_chunk: AcceptChunk | None = None
        self._upload: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    # -- a request --------------------------------------------------------------------------------

    async def request(self, head: bytes, content: bytes, *, has_body: bool) -> Head:
        """Send a request, and wait for the answer's head. Raises httpx's errors."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._is_busy, self._has_body = True, has_body
        self._interim, self._head, self._body, self._is_whole = 0, None, None, False
        transport = self._transport
        if transport is None:
            raise httpx.ReadError("the connection was closed")
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
        if self._socket is not None and _QUICKACK is not None:
            with contextlib.suppress(OSError):
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
        """Keep the connection if the answer was read to its end, and nothing speaks against it (rule 1).
        Otherwise close it."""
        head, body = self._head, self._body
        is_sent = self._upload is None or (self._upload.done() and not self._upload.cancelled())
        may_stay = head is not None and head.keeps_alive and body is not None and not body.has_surplus
        if self._is_whole and may_stay and is_sent and not self._chunks and self._transport is not None:
            if self._is_busy:
                self._is_busy, self._upload = False, None
                self._expiry = self._loop.call_later(IDLE_S, self.close)
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

    def _feed(self, body: Body, data: bytes) -> None:
        if self._is_whole:  # nobody asked for this
            self._error = httpx.RemoteProtocolError("bytes after the answer's end")
            self.close()
            return
        try:
            piece = body.feed(data)
        except BadAnswer as error:
            self.fail(httpx.RemoteProtocolError(str(error)))
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
                self.fail(httpx.RemoteProtocolError("the head is too long"))
            return
        self._received = b""
        try:
            head = parse_head(received[:end], has_body=self._has_body)
        except BadAnswer as error:
            self.fail(httpx.RemoteProtocolError(str(error)))
            return
        rest = received[end + len(HEAD_END) :]
        if head.status < 200:
            self._interim += 1
            if head.status == 101 or self._interim > INTERIM_MAX:
                self.fail(httpx.RemoteProtocolError("an interim answer that was not asked for"))
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

    def fail(self, error: httpx.TransportError) -> None:
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
            kind = httpx.ReadError if self._head is None else httpx.RemoteProtocolError
            self._error = kind(said)
        self._wake()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()


def _again(error: httpx.TransportError) -> httpx.TransportError:
    """The same error with a traceback of its own: that of one raised twice would hold the frames of both."""
    return type(error)(str(error))


@lru_cache(maxsize=TARGETS_MAX)
def _target(method: str, url: str) -> _Target:
    """Parse a method and a URL. Raises UnsupportedProtocol."""
    parsed = httpx.URL(url)
    scheme = parsed.scheme
    if scheme not in ("http", "https"):
        raise httpx.UnsupportedProtocol(f"{scheme!r} is neither http nor https")
    start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode("ascii"), parsed.raw_path, parsed.netloc)
    origin = scheme, parsed.host, parsed.port or (443 if scheme == "https" else 80)
    return _Target(origin, start, method != "HEAD")


def _request_head(start: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of a request. Raises LocalProtocolError for a header that would be read as something else.
    The value is not shown: it may be a secret."""
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    for (name, _), line in zip(headers, lines, strict=True):
        if line.count(b"\n") > 1 or line.count(b"\r") > 1 or b"\0" in line:
            raise httpx.LocalProtocolError(f"header {name!r} cannot be sent")
    return b"%b%b\r\n" % (start, b"".join(lines))
