"""One port for HTTP/2 and for aiohttp's HTTP/1.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from aiohttp import web

from engine.api.http.http2_server import Http2Server
from engine.api.http.sniff import SniffingProtocol
from gateway.relay.http2_client import Http2Transport
from shared.http2 import frames
from tests.fakes import VirtualClock
from tests.shared.http2.loopback import PATIENCE_S, OverHttp2, hello, listening, until
from tests.shared.http2.test_server import raw


@asynccontextmanager
async def both(clock: VirtualClock | None = None) -> AsyncIterator[tuple[int, Http2Server]]:
    async def old(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        return web.Response(body=b"HTTP/1.1 " + request.path.encode() + b" " + body)

    http1 = web.Server(old)
    http2 = Http2Server(hello)
    options = {} if clock is None else {"clock": clock}

    def sniffing() -> SniffingProtocol:
        return SniffingProtocol(http2.protocol, http1, **options)  # type: ignore[arg-type]

    async with listening(sniffing) as listener:
        yield listener.sockets[0].getsockname()[1], http2
    await http2.close()
    await http1.shutdown(1.0)


async def test_both_protocols_on_one_port() -> None:
    async with both() as (port, _):
        url = f"http://127.0.0.1:{port}/path"
        async with httpx.AsyncClient(transport=OverHttp2(Http2Transport())) as http:
            assert (await http.get(url)).content == b"hello from /path"
        async with httpx.AsyncClient() as http:
            for _ in range(2):
                answer = await http.post(url, content=b"body")
                assert (answer.http_version, answer.content) == ("HTTP/1.1", b"HTTP/1.1 /path body")


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (b"PROPFIND /path HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /path HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"HTTP/1.1 200"),
        (
            frames.PREFACE + frames.settings({}) + frames.goaway(0, 0),
            frames.frame(frames.SETTINGS, 1, 0, b""),
        ),
    ],
    ids=["a method that begins like the preface", "http 1", "http 2"],
)
async def test_the_first_bytes_may_come_one_by_one(says: bytes, expected: bytes) -> None:
    async with both() as (port, _):
        peer = await raw(port)
        for byte in says:
            peer.transport.write(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: expected in peer.received)
        peer.transport.abort()


@pytest.mark.parametrize("says", [b"", frames.PREFACE[:5]])
async def test_a_silent_connection_is_closed_after_its_timeout(says: bytes) -> None:
    clock = VirtualClock()
    async with both(clock) as (port, _):
        peer = await raw(port)
        peer.transport.write(says)
        await until(lambda: clock.sleeping == 1)
        clock.advance(10.0)
        async with asyncio.timeout(PATIENCE_S):
            await peer.lost.wait()


async def test_a_disconnect_before_the_first_byte_leaks_nothing() -> None:
    clock = VirtualClock()
    before = len(asyncio.all_tasks())
    async with both(clock) as (port, _):
        peer = await raw(port)
        await until(lambda: clock.sleeping == 1)
        peer.transport.abort()
        await until(lambda: len(asyncio.all_tasks()) == before)
