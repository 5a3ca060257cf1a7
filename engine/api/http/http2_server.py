"""A small HTTP/2 server: one task for each request, cancelled when its stream or connection ends.

Rules.

1. A handler runs as long as its stream. The peer resets the stream, or the connection ends: the handler's
   task is cancelled at once, whether it writes, waits or has not answered yet.
2. Handlers are counted, not streams: a peer that resets streams as fast as it opens them is refused
   (REFUSED_STREAM) while the handlers of the old ones still unwind.
3. `write` waits for the peer's windows and for the socket; nothing is buffered beyond them.
4. `drain` announces the end with GOAWAY, lets every handler finish, and closes each connection after.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol
from urllib.parse import unquote

from shared.http2 import frames
from shared.http2.connection import Connection, ConnectionPhase
from shared.http2.connection_config import WATCH, ConnectionConfig, WatchConfig
from shared.http2.connection_errors import ConnectionLost, ErrorCode, StreamFailed
from shared.http2.endpoint import ConnectionEndpoint
from shared.http2.headers import HeaderList, Headers, header_list
from shared.http2.stream import Stream
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import InvalidRequest
from shared.wire.http import ClientGone
from shared.wire.request_body import read_body

log = logging.getLogger(__name__)

NO_BODY_STATUSES: Final = frozenset([204, 304])


class ServerRequest:
    """A request whose header list came; its body may still be on its way."""

    __slots__ = ("_connection", "_stream", "headers", "method", "path")

    def __init__(self, connection: Connection, stream: Stream) -> None:
        assert stream.head is not None
        pseudo = {name: value.decode("latin-1") for name, value in stream.head if name[:1] == b":"}
        self.method = pseudo[b":method"]
        self.path = unquote(pseudo.get(b":path", "").partition("?")[0])
        self.headers: Mapping[str, str] = Headers(stream.head)
        self._connection = connection
        self._stream = stream

    async def body(
        self, *, len_max: int, deadline_s: float, hold: Callable[[int], None] = lambda _: None
    ) -> bytes:
        """Read the whole body. Raises BodyTooLarge, BodyTimeout, InvalidRequest."""
        try:
            return await read_body(
                self.headers,
                self._stream.read,
                self._go_on,
                len_max=len_max,
                deadline_s=deadline_s,
                hold=hold,
            )
        except StreamFailed as error:
            raise InvalidRequest("The request body was cut off.", detail=str(error)) from None

    async def _go_on(self) -> None:
        self._connection.inform(self._stream, b"100")


class ServerResponder:
    """One answer: `send`, or `start_stream`, `write`..., `finish`. They raise ClientGone when the stream has
    failed."""

    __slots__ = ("_connection", "_head_only", "_stream", "started")

    def __init__(self, connection: Connection, stream: Stream, *, head_only: bool) -> None:
        self.started = False
        self._connection = connection
        self._stream = stream
        self._head_only = head_only

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        head = _response_head(status, headers)
        if status not in NO_BODY_STATUSES and not any(name == b"content-length" for name, _ in head):
            head.append((b"content-length", str(len(body)).encode()))
        self._respond(head, end=self._head_only or not body)
        if not self._stream.sent_all:
            await self._write(body, end=True)
            await self.finish()

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        self._respond(_response_head(status, headers), end=self._head_only)

    async def write(self, data: bytes) -> None:
        """Write a piece of the body. Returns when it is framed: the peer's windows had room, and so had the
        socket."""
        assert self.started
        if not self._head_only:
            await self._write(data)

    async def _write(self, data: bytes, *, end: bool = False) -> None:
        try:
            await self._stream.write(data, end=end)
        except StreamFailed as error:
            raise ClientGone from error

    async def finish(self) -> None:
        """End the answer. A request body that is still coming is declined."""
        assert self.started
        self._stream.finish()
        if self._stream.error is not None:
            raise ClientGone from self._stream.error

    def abort(self) -> None:
        """Reset the stream, and drop what was not framed yet. Never fails."""
        self._stream.reset(ErrorCode.CANCEL)

    def report(self, data: bytes) -> None:
        """Send a report on this stream to a peer that takes reports, whether or not the stream was reset."""
        self._connection.report(self._stream.id, data)

    def tell_load(self, data: bytes) -> None:
        """Tell a peer that takes reports the load, which has this stream's request in it."""
        self._connection.report(self._stream.id, data, frames.OF_LOAD)

    def _respond(self, head: HeaderList, *, end: bool) -> None:
        assert not self.started, "one answer for one request"
        try:
            self._connection.respond(self._stream, head, end=end)
        except StreamFailed as error:
            raise ClientGone from error
        self.started = True


def _response_head(status: int, headers: Mapping[str, str]) -> HeaderList:
    assert 200 <= status <= 599
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return header_list([(b":status", b"%d" % status)], pairs)


class Handler(Protocol):
    async def __call__(self, request: ServerRequest, responder: ServerResponder, /) -> None: ...


class ServerEndpoint(ConnectionEndpoint):
    def __init__(self, server: Http2Server) -> None:
        super().__init__(client=False, config=server.config, watch=server.watch, clock=server.clock)
        self._server = server
        self._handlers: dict[Stream, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._server.draining:  # SETTINGS and GOAWAY are one write, so the client sends no request
            self.connection.close(ConnectionLost("draining"))
            super().connection_made(transport)
            transport.close()
            return
        super().connection_made(transport)
        self._server.endpoints.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.forget(self)

    @property
    def open(self) -> int:
        return len(self._handlers.keys() | self.connection.streams.values())

    @property
    def busy(self) -> bool:
        return bool(self._handlers or self.connection.streams)

    def stream_opened(self, stream: Stream) -> None:
        if len(self._handlers) >= self.connection.config.streams_max:
            self._loop.call_soon(stream.reset, ErrorCode.REFUSED_STREAM)
            return
        task = self._loop.create_task(self._handle(stream))
        self._handlers[stream] = task
        task.add_done_callback(lambda _: self._handled(stream))

    def stream_closed(self, stream: Stream) -> None:
        super().stream_closed(stream)
        if stream.error is not None and (task := self._handlers.get(stream)) is not None:
            coroutine = task.get_coro()
            assert asyncio.iscoroutine(coroutine)
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                self._loop.call_soon(task.cancel)  # after its begin: one that never ran could not report
            else:
                task.cancel()

    def peer_changed(self) -> None:
        super().peer_changed()
        if self.connection.phase is ConnectionPhase.CLOSED:
            self._server.forget(self)

    def _handled(self, stream: Stream) -> None:
        del self._handlers[stream]
        self.close_if_done()
        self._server.forget(self)

    async def _handle(self, stream: Stream) -> None:
        """Run the handler, and end the stream whatever the handler did."""
        request = ServerRequest(self.connection, stream)
        responder = ServerResponder(self.connection, stream, head_only=request.method == "HEAD")
        code = ErrorCode.INTERNAL_ERROR
        try:
            await self._server.handler(request, responder)
            if stream.sent_all:
                code = ErrorCode.NO_ERROR  # the rest of the request's body is not needed
            elif stream.error is None:  # otherwise the client has left
                log.error("http2.unfinished method=%s path=%s", request.method, request.path)
        except ClientGone:
            pass  # the stream was reset already
        except Exception:
            log.exception("http2.handler_failed method=%s path=%s", request.method, request.path)
        finally:
            stream.reset(code)


class Http2Server:
    """A server for every connection whose protocol is made by `protocol`.

    `handler` gets each request. `wait_closed` returns when the last connection and handler are gone.
    """

    def __init__(
        self,
        handler: Callable[[ServerRequest, ServerResponder], Awaitable[None]],
        *,
        config: ConnectionConfig | None = None,
        watch: WatchConfig = WATCH,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.handler = handler
        self.config = config or ConnectionConfig()
        self.watch = watch
        self.clock = clock
        self.draining = False
        self.endpoints: set[ServerEndpoint] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    def protocol(self) -> ServerEndpoint:
        return ServerEndpoint(self)

    @property
    def streams(self) -> int:
        """The number of open streams on all connections, and of ended ones whose handlers still unwind."""
        return sum(one.open for one in self.endpoints)

    def push_load(self, payload: bytes) -> None:
        """Tell the load on every connection whose peer takes reports and reads."""
        for endpoint in self.endpoints:
            if not endpoint.connection.full:
                endpoint.connection.report(0, payload, frames.OF_LOAD)

    def retire(self) -> None:
        """Send GOAWAY on every connection: streams that run may finish, peers open their next streams
        elsewhere."""
        self.draining = True
        for endpoint in list(self.endpoints):
            endpoint.connection.retire()

    async def close(self) -> None:
        """End every connection now. Handlers are cancelled, and awaited."""
        self.draining = True
        for endpoint in list(self.endpoints):
            endpoint.close("the server closes")
        await self.wait_closed()

    async def wait_closed(self) -> None:
        while self.endpoints:
            self._all_gone.clear()
            await self._all_gone.wait()

    def forget(self, endpoint: ServerEndpoint) -> None:
        """Drop an endpoint once its connection is closed and its last handler has ended."""
        if endpoint.connection.phase is ConnectionPhase.CLOSED and not endpoint.busy:
            self.endpoints.discard(endpoint)
            if not self.endpoints:
                self._all_gone.set()
