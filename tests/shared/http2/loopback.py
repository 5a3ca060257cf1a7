"""Both ends on real sockets of one event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from engine.api.http.http2_server import Http2Server, ServerRequest, ServerResponder
from gateway.relay.http2_client import ClientEndpoint, Http2Transport
from tests.shared.http2.plainpath import config_of
from tests.waiting import PATIENCE_S as PATIENCE_S
from tests.waiting import until as until

Handler = Callable[[ServerRequest, ServerResponder], Awaitable[None]]

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
    fast: bool = True,
    tls: ssl.SSLContext | None = None,
    streams_max: int = 1024,
) -> AsyncIterator[Served]:
    server = Http2Server(handler, config=config_of(fast=fast, streams_max=streams_max))
    async with listening(server.protocol, port=port, tls=tls) as listener:
        yield Served(server, listener, "https" if tls else "http")
        async with asyncio.timeout(PATIENCE_S):
            await server.close()


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


def client(transport: Http2Transport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=transport, timeout=None)
