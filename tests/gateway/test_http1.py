"""The HTTP/1.1 transport by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from gateway.relay.http1 import Http1ResponseStream, Http1Transport
from tests.gateway.conftest import PATIENCE_S, until


class Server:
    """Answers every request with the bytes it is given, and counts its connections."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        self.opened = 0
        self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed += 1
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listening.close()
    await until(lambda: server.closed == server.opened)


@pytest.fixture
async def transport() -> AsyncIterator[Http1Transport]:
    transport = Http1Transport()
    yield transport
    await transport.aclose()


async def get(
    transport: Http1Transport, url: str, connected: Callable[[], None] | None = None
) -> Http1ResponseStream:
    return await transport.exchange("GET", url, [], b"", connected=connected)


async def test_a_connection_is_reused_and_the_caller_is_told(
    server: tuple[Server, str], transport: Http1Transport
) -> None:
    told: list[int] = []
    for _ in range(3):
        response = await get(transport, server[1], lambda: told.append(1))
        assert (response.status, response.headers["Content-Length"]) == (200, "2")
        assert await response.read() == b"ok"
        assert await response.read() is None
        await response.aclose()
    assert server[0].opened == 1
    assert len(told) == 3


async def test_an_unfinished_answer_closes_its_connection(
    server: tuple[Server, str], transport: Http1Transport
) -> None:
    server[0].answer = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    response = await get(transport, server[1])
    assert await response.read() == b"half"
    await response.aclose()
    await until(lambda: server[0].closed == 1)


async def test_a_cancelled_request_closes_its_connection(
    server: tuple[Server, str], transport: Http1Transport
) -> None:
    server[0].answer = b""
    task = asyncio.create_task(get(transport, server[1]))
    await until(lambda: server[0].opened == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server[0].closed == 1)


@pytest.mark.parametrize(
    "answer",
    [b"NOT HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
    ids=["no http", "bad chunk"],
)
async def test_a_server_that_speaks_no_http(
    server: tuple[Server, str], transport: Http1Transport, answer: bytes
) -> None:
    server[0].answer = answer

    async def whole() -> None:
        response = await get(transport, server[1])
        try:
            while await response.read() is not None:
                pass
        finally:
            await response.aclose()

    with pytest.raises(httpx.TransportError):
        await whole()


async def test_an_unreachable_server_is_a_connect_error(transport: Http1Transport) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(httpx.ConnectError):
            await get(transport, "http://127.0.0.1:1")
        with pytest.raises(httpx.ConnectError):
            await get(transport, "http://no-such-host.invalid")
