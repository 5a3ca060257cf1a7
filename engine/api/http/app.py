"""The listener: one port for HTTP/2 and HTTP/1.1. The first bytes of a connection tell which of the two it
is.

HTTP/2, which gateways speak, is served by `shared.http2`, and everything else by aiohttp. This module puts
aiohttp's requests and responses into the two protocols of `shared.wire.http`, sets its limits, and gives its
own errors our envelope. aiohttp's low-level server is used, without its router: routes belong to the
handlers, which both servers run.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import ClientConnectionError, ClientPayloadError, web
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from engine.api.answer.exchange import log_unparsed
from engine.api.http.http2_server import Http2Server
from engine.api.http.sniff import SniffingProtocol
from shared.process.accepting import Accepting
from shared.process.clock import SYSTEM_CLOCK
from shared.process.listening import BACKLOG_LEN, CLOSE_GRACE_S, SERVER, bound_socket, http1_options
from shared.wire.envelope import error_envelope
from shared.wire.errors import (
    ApiError,
    InternalError,
    InvalidRequest,
    error_headers,
    forget_frames,
)
from shared.wire.http import ClientGone, HttpRequest, Responder
from shared.wire.ids import REQUEST_ID_HEADER
from shared.wire.request_body import misframed, read_body, send_continue

Handle = Callable[[HttpRequest, Responder], Awaitable[None]]


class AioRequest:
    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.method = request.method
        self.path = request.path
        self.headers: Mapping[str, str] = request.headers

    async def body(
        self, *, len_max: int, deadline_s: float, hold: Callable[[int], None] = lambda _: None
    ) -> bytes:
        request = self._request
        try:
            return await read_body(
                request.headers,
                request.content.readany,
                self._go_on,
                len_max=len_max,
                deadline_s=deadline_s,
                hold=hold,
            )
        except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError) as error:
            raise misframed(error) from None

    async def _go_on(self) -> None:
        await send_continue(self._request.writer)


class AioResponder:
    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._writer: StreamWriter | None = None
        self.response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        return self.response is not None

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        assert self.response is None
        response = web.Response(status=status, headers=headers, body=body)
        if not self._request.content.is_eof():
            response.force_close()  # the rest of the request's body will not be read
        await self._begin(response)
        await self.finish()

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        assert self.response is None
        await self._begin(web.StreamResponse(status=status, headers=headers))

    async def write(self, data: bytes) -> None:
        assert self._writer is not None
        try:
            await self._writer.write(data)
            await self._writer.drain()  # `write` alone waits for a slow client only every 64 KiB
        except (ConnectionError, ClientConnectionError) as error:
            raise ClientGone from error

    async def finish(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except (ConnectionError, ClientConnectionError) as error:
            raise ClientGone from error

    def report(self, data: bytes) -> None:
        """Do nothing: HTTP/1.1 has no frame that could carry a report."""

    def tell_load(self, data: bytes) -> None:
        """Do nothing, for the same reason."""

    def abort(self) -> None:
        if (transport := self._request.transport) is not None:
            transport.abort()

    async def _begin(self, response: web.StreamResponse) -> None:
        self.response = response
        response.headers["server"] = SERVER
        try:
            writer = await response.prepare(self._request)
        except (ConnectionError, ClientConnectionError) as error:
            raise ClientGone from error
        assert isinstance(writer, StreamWriter)
        self._writer = writer


class _Protocol(RequestHandler):
    """aiohttp's protocol, with our error envelope for what it refuses by itself: malformed request lines,
    headers and framing."""

    __slots__ = ()

    def connection_lost(self, exc: BaseException | None) -> None:
        forget_frames(exc)  # aiohttp keeps the error of a failed write, and its frames keep the request
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client left before its error was sent")
        error: ApiError
        detail = type(exc).__name__
        if status == HTTPStatus.BAD_REQUEST:
            message = "The request is not well-formed HTTP, or its headers are too large."
            error = InvalidRequest(message, detail=detail)
        else:
            error = InternalError("The server had an error while processing your request.", detail=detail)
        request_id = log_unparsed(error, SYSTEM_CLOCK)
        response = web.Response(
            status=error.status,
            body=error_envelope(error),
            content_type="application/json",
            headers={**error_headers(error), REQUEST_ID_HEADER: request_id, "server": SERVER},
        )
        response.force_close()
        return response


class _Server(web.Server):
    def __init__(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], options: dict[str, Any]
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._options = options

    def __call__(self) -> RequestHandler:
        return _Protocol(self, loop=self._loop, **self._options)


class HttpServer:
    """A server of `handle` on one address, over HTTP/2 by prior knowledge and over HTTP/1.1."""

    def __init__(
        self,
        handle: Handle,
        *,
        host: str,
        port: int,
        keepalive_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        is_for_operators: bool = False,
    ) -> None:
        """`is_for_operators` is true if the descriptors that are reserved are for its connections."""
        self._handle = handle
        self._is_for_operators = is_for_operators
        self._tls = tls
        self._host, self._port = host, port
        self._keepalive_timeout_s = keepalive_timeout_s
        self._http2: Http2Server | None = None
        self._http1: web.ServerRunner | None = None
        self._accepting: Accepting | None = None
        self._silent: dict[SniffingProtocol, None] = {}
        """Connections of which it is not known yet which server they belong to, the oldest first."""

    async def start(self) -> int:
        """Begin to listen. Returns the port. Raises OSError."""
        http1 = _Server(self._serve, http1_options(self._keepalive_timeout_s))
        self._http1 = web.ServerRunner(http1, shutdown_timeout=CLOSE_GRACE_S)
        await self._http1.setup()
        self._http2 = http2 = Http2Server(self._handle)
        listener = bound_socket(self._host, self._port)
        self._accepting = Accepting(
            listener,
            BACKLOG_LEN,
            lambda: SniffingProtocol(http2.protocol, http1, silent=self._silent),
            self._tls,
            displace=self._displace,
            is_reserved_for=self._is_for_operators,
        )
        port = listener.getsockname()[1]
        assert isinstance(port, int)
        return port

    @property
    def http2_streams(self) -> int:
        """The number of open HTTP/2 streams."""
        return 0 if self._http2 is None else self._http2.streams

    def push_load(self, payload: bytes) -> None:
        """Tell gateways the load, over HTTP/2."""
        if self._http2 is not None:
            self._http2.push_load(payload)

    def retire(self) -> None:
        """Tell HTTP/2 peers to open no more streams here. Streams that are open may finish."""
        if self._http2 is not None:
            self._http2.retire()

    async def stop(self) -> None:
        """End every connection, and cancel the handlers that still run."""
        if self._accepting is not None:
            await self._accepting.aclose()
        if self._http2 is not None:
            await self._http2.close()
        if self._http1 is not None:
            await self._http1.cleanup()
        for silent in tuple(self._silent):
            silent.abort()

    def _displace(self) -> bool:
        """Close the connection that has been silent for longest. Returns whether there was one."""
        if (first := next(iter(self._silent), None)) is None:
            return False
        del self._silent[first]
        first.abort()
        return True

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        responder = AioResponder(request)
        await self._handle(AioRequest(request), responder)
        assert responder.response is not None
        return responder.response
