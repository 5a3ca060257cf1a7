"""A bare engine and bare relays: the transport that a gateway uses, with nothing else around it.

    python -m tests.bench.gateway.bare engine --port 1 --interval-ms 20
    python -m tests.bench.gateway.bare relay --port 2 --upstream HTTP/2 --url http://127.0.0.1:1

The engine serves paced event streams, by HTTP/2 and HTTP/1.1 on one port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from engine.api.http.http2_server import Http2Server, ServerRequest, ServerResponder
from engine.api.http.sniff import SniffingProtocol
from gateway.relay.http2_client import Http2Transport
from shared.wire.sse import DONE

HTTP1: Final = "aiohttp HTTP/1.1"
HTTP2: Final = "HTTP/2"
UPSTREAMS: Final = (HTTP1, HTTP2)
"""The protocols between a relay and the engine."""
_EVENTS: Final = {"content-type": "text/event-stream"}
_UNARY: Final = b'"stream":false'
"""The part of a body that asks for an answer in one piece."""
_EVENT: Final = b"data: " + b"x" * 152 + b"\n\n"
_BODY_LEN_MAX: Final = 64 * 1024

Write = Callable[[bytes], Awaitable[None]]


class Wants(msgspec.Struct):
    """The body of a request to the bare engine."""

    events: int


# -- the engine -----------------------------------------------------------------------------------


class Ticks:
    """One clock for all streams: they emit in one turn of the event loop, as an engine's do when a step
    ends."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            passed, self._next = self._next, loop.create_future()
            passed.set_result(None)

    async def stream(self, body: bytes, write_to: Write) -> None:
        for _ in range(msgspec.json.decode(body, type=Wants).events):
            await asyncio.shield(self._next)
            await write_to(_EVENT)
        await write_to(DONE)


async def engine(port: int, interval_s: float) -> None:
    ticks = Ticks(interval_s)

    async def handle(request: ServerRequest, responder: ServerResponder) -> None:
        body = await request.body(len_max=_BODY_LEN_MAX, deadline_s=10.0)
        await responder.start_stream(200, _EVENTS)
        await ticks.stream(body, responder.write)
        await responder.finish()

    async def handle_http1(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response()
        body = await request.read()
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        await ticks.stream(body, response.write)
        return response

    http1, http2 = web.Server(handle_http1), Http2Server(handle)
    await asyncio.get_running_loop().create_server(
        lambda: SniffingProtocol(http2.protocol, http1), "127.0.0.1", port, backlog=2048
    )
    await ticks.run()


# -- the relay ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def over_http2(url: str) -> AsyncIterator[Callable[[bytes, Write], Awaitable[None]]]:
    transport = Http2Transport()

    async def relay(body: bytes, write_to: Write) -> None:
        stream = await transport.exchange("POST", url, [], body)
        try:
            while (data := await stream.read()) is not None:
                await write_to(data)
        finally:
            await stream.aclose()

    async with transport:
        yield relay


@contextlib.asynccontextmanager
async def over_http1(url: str) -> AsyncIterator[Callable[[bytes, Write], Awaitable[None]]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def relay(body: bytes, write_to: Write) -> None:
            async with session.post(url, data=body) as response:
                async for data in response.content.iter_any():
                    await write_to(data)

        yield relay


async def relay_to(port: int, upstream: str, url: str) -> None:
    """Serve a relay to the engine at `url` until cancelled."""
    opened = over_http1(url) if upstream == HTTP1 else over_http2(url)
    async with opened as relay:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "GET":
                return web.Response()
            body = await request.read()
            response = web.StreamResponse(headers=None if _UNARY in body else _EVENTS)
            await response.prepare(request)
            await relay(body, response.write)
            return response

        await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", port, backlog=2048)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("role", choices=["engine", "relay"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--upstream", choices=UPSTREAMS, default=HTTP1)
    parser.add_argument("--url")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="uvloop")
    options = parser.parse_args()
    run = uvloop.run if options.loop == "uvloop" else asyncio.run
    if options.role == "engine":
        run(engine(options.port, options.interval_ms / 1e3))
    else:
        run(relay_to(options.port, options.upstream, options.url))


if __name__ == "__main__":
    main()
