"""What the hop alone costs: a bare relay over our HTTP/2 against the same relay over aiohttp's HTTP/1.1.

    python -m tests.bench.hop [--seconds 2.5] [--streams 128 256] [--interval-ms 20]

A process serves paced event streams, by HTTP/2 and HTTP/1.1 on one port; another relays them to this process.
The relay's CPU time, as the kernel counts it, is divided by the events that arrive here. The relay has none
of a gateway's features, so that what is compared is the transport. Only the ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import httpx
import msgspec
import uvloop
from aiohttp import web

from shared.bench.client import Endpoint, Exchange
from shared.bench.cpu import cpu_s
from shared.bench.figures import Figure, at_most, figure, write
from shared.bench.services import free_port, service
from shared.http2.client import STREAM_EXTENSION, Http2Transport
from shared.http2.connection import ConnectionConfig
from shared.http2.server import Http2Server, ServerRequest, ServerResponder
from shared.http2.sniff import SniffingProtocol
from shared.sse import DONE

EVENTS = {"content-type": "text/event-stream"}
UNARY = b'"stream":false'
"""In a body that asks for an answer in one piece."""
EVENT = b"data: " + b"x" * 152 + b"\n\n"
BODY_LEN_MAX = 64 * 1024
UPSTREAMS = ("aiohttp HTTP/1.1", "plain", "fast")
RATIO_TARGET = at_most(0.7)

Write = Callable[[bytes], Awaitable[None]]


class Wants(msgspec.Struct):
    events: int


# -- the engine -----------------------------------------------------------------------------------


class Ticks:
    """All streams emit in one turn of the event loop, as an engine's do when a step ends."""

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
            await write_to(EVENT)
        await write_to(DONE)


async def engine(port: int, interval_s: float) -> None:
    ticks = Ticks(interval_s)

    async def handle(request: ServerRequest, responder: ServerResponder) -> None:
        body = await request.body(len_max=BODY_LEN_MAX, deadline_s=10.0)
        await responder.start_stream(200, EVENTS)
        await ticks.stream(body, responder.write)
        await responder.finish()

    async def handle_http1(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response()
        body = await request.read()
        response = web.StreamResponse(headers=EVENTS)
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
async def over_http2(url: str, fast: bool) -> AsyncIterator[Callable[[bytes, Write], Awaitable[None]]]:
    transport = Http2Transport(config=ConnectionConfig(fast=fast))

    async def relay(body: bytes, write_to: Write) -> None:
        request = httpx.Request("POST", url, content=body)
        response = await transport.handle_async_request(request)
        stream = response.extensions[STREAM_EXTENSION]
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


async def gateway(port: int, upstream: str, url: str) -> None:
    opened = over_http1(url) if upstream == UPSTREAMS[0] else over_http2(url, upstream == "fast")
    async with opened as relay:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "GET":
                return web.Response()
            body = await request.read()
            response = web.StreamResponse(headers=None if UNARY in body else EVENTS)
            await response.prepare(request)
            await relay(body, response.write)
            return response

        await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", port, backlog=2048)
        await asyncio.Event().wait()


# -- the load -------------------------------------------------------------------------------------


async def load(url: str, streams: int, events: int) -> int:
    """How many events came."""
    endpoint = Endpoint(url)
    request = endpoint.request("/", msgspec.json.encode(Wants(events)))

    async def one() -> Exchange:
        connection = await endpoint.connect()
        try:
            return await connection.exchange(request)
        finally:
            connection.close()

    done = await asyncio.gather(*(one() for _ in range(streams)))
    assert all(exchange.error is None for exchange in done), {exchange.error for exchange in done}
    return sum(len(exchange.event_times) for exchange in done)


async def measure(loop: str, upstream: str, engine_url: str, options: argparse.Namespace) -> dict[int, float]:
    """CPU in us per event, by the number of streams."""
    port = free_port()
    argv = [
        *SELF,
        "gateway",
        "--port",
        str(port),
        "--loop",
        loop,
        "--upstream",
        upstream,
        "--url",
        engine_url,
    ]
    url = f"http://127.0.0.1:{port}"
    costs: dict[int, float] = {}
    async with service(argv, url) as process:
        for streams in options.streams:
            await load(url, streams, 2)  # connections are made, code is warm
            before_s = cpu_s(process.pid)
            events = await load(url, streams, int(options.seconds * 1e3 / options.interval_ms))
            costs[streams] = 1e6 * (cpu_s(process.pid) - before_s) / events
    return costs


async def bench(options: argparse.Namespace) -> list[Figure]:
    port = free_port()
    engine_argv = [*SELF, "engine", "--port", str(port), "--interval-ms", str(options.interval_ms)]
    engine_url = f"http://127.0.0.1:{port}"
    figures: list[Figure] = []
    async with service([*engine_argv, "--loop", "uvloop"], engine_url):
        for loop in ("asyncio", "uvloop"):
            costs = {upstream: await measure(loop, upstream, engine_url, options) for upstream in UPSTREAMS}
            for streams in options.streams:
                name = f"{loop}, {streams} streams at {options.interval_ms:g} ms"
                floor = costs[UPSTREAMS[0]][streams]
                for upstream in UPSTREAMS:
                    cost = costs[upstream][streams]
                    figures.append(figure(f"{name}: {upstream}", cost, "us/event"))
                    if upstream != UPSTREAMS[0]:
                        target = RATIO_TARGET if upstream == "fast" else None
                        figures.append(figure(f"{name}: {upstream} / HTTP/1.1", cost / floor, "x", target))
    return figures


SELF = [sys.executable, "-m", "tests.bench.hop"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["engine", "gateway"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", choices=UPSTREAMS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="uvloop", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=2.5, help="length of each run")
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between two events of a stream")
    options = parser.parse_args()
    run = uvloop.run if options.loop == "uvloop" else asyncio.run
    if options.role == "engine":
        run(engine(options.port, options.interval_ms / 1e3))
    elif options.role == "gateway":
        run(gateway(options.port, options.upstream, options.url))
    else:
        write(asyncio.run(bench(options)))


if __name__ == "__main__":
    main()
