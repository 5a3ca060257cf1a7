"""Both ends on real sockets of one event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx

from engine.api.http.http2_server import Http2Server, ServerRequest, ServerResponder
from gateway.relay.http2_client import ClientEndpoint, Http2Transport, ResponseStream, _target
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import StreamFailed
from shared.http2.headers import HeaderList, header_list
from tests.waiting import PATIENCE_S as PATIENCE_S
from tests.waiting import until as until

Handler = Callable[[ServerRequest, ServerResponder], Awaitable[None]]

STREAM = "penstock_stream"
EVENTS = {"content-type": "text/event-stream"}


@dataclass(slots=True)
class Served:
    server: Http2Server
    listener: asyncio.Server
    scheme: str = "http"

    @property
    def port(self) -> int:
        port: int = self.listener.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"


@asynccontextmanager
async def listening(
    protocol: Callable[[], asyncio.BaseProtocol], *, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[asyncio.Server]:
    listener = await asyncio.get_running_loop().create_server(
        protocol, "127.0.0.1", port, ssl=tls, backlog=2048
    )
    try:
        yield listener
    finally:
        listener.close()


@asynccontextmanager
async def serving(
    handler: Handler,
    *,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    streams_max: int = 1024,
) -> AsyncIterator[Served]:
    server = Http2Server(handler, config=ConnectionConfig(streams_max=streams_max))
    async with listening(server.protocol, port=port, tls=tls) as listener:
        yield Served(server, listener, "https" if tls else "http")
        async with asyncio.timeout(PATIENCE_S):
            await server.close()


async def drained_server(server: Http2Server) -> None:
    """Have a server finish what runs, and accept nothing new."""
    server.retire()
    await server.wait_closed()


def endpoints(transport: Http2Transport) -> list[ClientEndpoint]:
    return [one for pool in transport._pools.values() for one in pool.endpoints]  # type: ignore[misc]


async def hello(request: ServerRequest, responder: ServerResponder) -> None:
    await responder.send(200, {"content-type": "text/plain"}, b"hello from " + request.path.encode())


async def echo(request: ServerRequest, responder: ServerResponder) -> None:
    body = await request.body(len_max=1 << 28, deadline_s=PATIENCE_S)
    await responder.send(200, {"content-type": "application/octet-stream"}, body)


class Silent:
    """A handler that never answers, and knows when it was cancelled."""

    def __init__(self, *, start: bool = False, events: bool = False) -> None:
        self.start = start
        self.events = events
        self.running = 0
        self.cancelled = 0

    async def __call__(self, request: ServerRequest, responder: ServerResponder) -> None:
        self.running += 1
        try:
            if self.start:
                await responder.start_stream(200, EVENTS)
                await responder.write(b": open\n\n")
            while self.events:
                await responder.write(b"data: {}\n\n")
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class Read(httpx.AsyncByteStream):
    """An answer, for httpx to read."""

    def __init__(self, response: ResponseStream) -> None:
        self.response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (data := await self.response.read()) is not None:
            yield data

    async def aclose(self) -> None:
        await self.response.aclose()


class OverHttp2(httpx.AsyncBaseTransport):
    """The gateway's transport, for httpx to send by. The answer itself is the extension `STREAM`."""

    def __init__(self, transport: Http2Transport) -> None:
        self.transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        connect_s = request.extensions.get("timeout", {}).get("connect")
        sent, content = (request.method, str(request.url), request.headers.raw), request.stream
        if isinstance(content, httpx.ByteStream):
            answer = await self.transport.exchange(*sent, b"".join(content), connect_s=connect_s)
        else:
            assert isinstance(content, httpx.AsyncByteStream)
            answer = await self._in_pieces(*sent, content)
        fields = list(answer.headers.items())
        extensions = {"http_version": b"HTTP/2", STREAM: answer}
        return httpx.Response(answer.status, headers=fields, stream=Read(answer), extensions=extensions)

    async def _in_pieces(
        self, method: str, url: str, headers: HeaderList, content: httpx.AsyncByteStream
    ) -> ResponseStream:
        """Send a body as it comes, as the gateway never does."""
        target = _target(method, url)
        pool = self.transport._pools.get(target.origin) or self.transport._new_pool(target.origin)
        stream = await pool.open(header_list(target.head, headers), end=False, within_s=PATIENCE_S)

        async def send() -> None:
            with suppress(StreamFailed):
                async for piece in content:
                    await stream.write(piece)
                stream.finish()

        sending = asyncio.create_task(send())
        return ResponseStream(await stream.wait_head(), stream, sending)

    async def aclose(self) -> None:
        await self.transport.aclose()


def client(transport: Http2Transport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=OverHttp2(transport), timeout=None)
