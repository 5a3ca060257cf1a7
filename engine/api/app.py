"""The listener: one port, where the first bytes of a connection say who speaks HTTP/2.

HTTP/2, which gateways speak, is served by `shared.http2`; everything else by aiohttp, whose requests
and responses are put into the two protocols of `shared.http` here, its limits set, its own error
answers in our envelope. aiohttp's low-level server is used, without its router: routes belong to the
handlers, which both servers run.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import ClientConnectionError, ClientPayloadError, web
from aiohttp.http import StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from engine.api.exchange import log_unparsed
from shared.clock import SYSTEM_CLOCK
from shared.errors import (
    ApiError,
    BodyTimeout,
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    error_headers,
    forget_frames,
)
from shared.http import ClientGone, Request, Responder
from shared.http2.server import Http2Server
from shared.http2.sniff import SniffingProtocol
from shared.http2.sockets import bound_listener
from shared.ids import REQUEST_ID_HEADER
from shared.openai import error_envelope

LINE_LEN_MAX: Final = 8190
HEADER_LEN_MAX: Final = 8190
HEADERS_MAX: Final = 64
LINGER_S: Final = 1.0
"""How long an unread body is still swallowed, so that the client sees our answer and not a reset."""
LENGTH_DIGITS_MAX: Final = 18
"""Digits of a `Content-Length`. Longer ones are larger than any body, or padded with zeros."""
BACKLOG: Final = 1024
CLOSE_GRACE_S: Final = 2.0
"""When the server closes, handlers that are still there after the drain get so long to unwind."""

SERVER: Final = "penstock"
"""The `server` header. aiohttp's own tells its version and Python's."""

Handle = Callable[[Request, Responder], Awaitable[None]]


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
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise InvalidRequest("Compressed request bodies are not accepted.", param=None)
        declared = request.headers.get("Content-Length", "0").lstrip("0")
        if len(declared) > LENGTH_DIGITS_MAX or int(declared or "0") > len_max:
            raise BodyTooLarge(f"The request body is larger than {len_max} bytes.")
        try:
            async with asyncio.timeout(deadline_s):
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    request.writer.output_size = 0
                return await self._read(len_max, hold)
        except TimeoutError:
            raise BodyTimeout(f"The request body did not arrive within {deadline_s:g} s.") from None
        except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError) as error:
            raise InvalidRequest(
                "The request body is not framed as its headers say.", detail=type(error).__name__
            ) from None

    async def _read(self, len_max: int, hold: Callable[[int], None]) -> bytes:
        received = bytearray()
        async for chunk in self._request.content.iter_any():
            received += chunk
            if len(received) > len_max:
                raise BodyTooLarge(f"The request body is larger than {len_max} bytes.")
            hold(len(received))
        return bytes(received)


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
            response.force_close()  # the rest of the body is not worth reading
        await self._begin(response)
        await self.finish()

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        assert self.response is None
        await self._begin(web.StreamResponse(status=status, headers=headers))

    async def write(self, data: bytes) -> None:
        assert self._writer is not None
        try:
            await self._writer.write(data, drain=False)
            await self._writer.drain()  # by itself, aiohttp feels a slow client every 64 KiB only
        except (ConnectionError, ClientConnectionError) as error:
            raise ClientGone from error

    async def finish(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except (ConnectionError, ClientConnectionError) as error:
            raise ClientGone from error

    def report(self, data: bytes) -> None:
        """HTTP/1.1 has nothing to carry it."""

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
    """Answers what aiohttp refuses by itself (bad request lines, headers, framing) as we answer."""

    __slots__ = ()

    def connection_lost(self, exc: BaseException | None) -> None:
        forget_frames(exc)  # of the write that failed, which aiohttp keeps with the request that wrote
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
    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], **options: Any):
        super().__init__(handler, handler_cancellation=True)
        self._options = options

    def __call__(self) -> RequestHandler:
        return _Protocol(self, loop=self._loop, **self._options)


class HttpServer:
    """Serves `handle` on one address, over HTTP/2 by prior knowledge and over HTTP/1.1."""

    def __init__(
        self,
        handle: Handle,
        *,
        host: str,
        port: int,
        keepalive_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._handle = handle
        self._tls = tls
        self._host, self._port = host, port
        self._keepalive_timeout_s = keepalive_timeout_s
        self._http2: Http2Server | None = None
        self._http1: web.ServerRunner | None = None
        self._listener: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen. Returns the port."""
        http1 = _Server(
            self._serve,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._keepalive_timeout_s,
            lingering_time=LINGER_S,
            max_line_size=LINE_LEN_MAX,
            max_field_size=HEADER_LEN_MAX,
            max_headers=HEADERS_MAX,
        )
        self._http1 = web.ServerRunner(http1, shutdown_timeout=CLOSE_GRACE_S)
        await self._http1.setup()
        self._http2 = http2 = Http2Server(self._handle)
        listener = _listening_socket(self._host, self._port)
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: SniffingProtocol(http2.protocol, http1), sock=listener, backlog=BACKLOG, ssl=self._tls
        )
        port = listener.getsockname()[1]
        assert isinstance(port, int)
        return port

    @property
    def http2_streams(self) -> int:
        """Open ones."""
        return 0 if self._http2 is None else self._http2.streams

    def retire(self) -> None:
        """Tell HTTP/2 peers to open no more streams here; those that run may finish."""
        if self._http2 is not None:
            self._http2.retire()

    async def stop(self) -> None:
        """End every connection, whatever runs on it."""
        if self._listener is not None:
            self._listener.close()
        if self._http2 is not None:
            await self._http2.close()
        if self._http1 is not None:
            await self._http1.cleanup()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        responder = AioResponder(request)
        await self._handle(AioRequest(request), responder)
        assert responder.response is not None
        return responder.response


def _listening_socket(host: str, port: int) -> socket.socket:
    """Bound, with what the kernel may hold for a reader who does not read. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_listener(listener)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
