"""The HTTP/1.1 transport by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.relay import http1
from gateway.relay.hop_errors import HopError, Lost, LostTwice, Malformed, NoConnection
from gateway.relay.http1 import INTERIM_MAX, Http1ResponseStream, Http1Transport
from gateway.relay.http1_framing import kept_s, parse_head
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


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Closing(Server):
    """Answers the first request of each connection, and at the next one closes it without reading on, as a
    server does whose time for idle connections is over just then."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 1
        """The connections that are answered at all."""
        self.parting = b""
        """What is said before the end."""
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        if self.opened <= self.answers:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
            self.bodies.append(await reader.readexactly(length))
            writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self.parting)
        await writer.drain()
        self.closed += 1
        writer.close()


@pytest.fixture
async def closing() -> AsyncIterator[tuple[Closing, asyncio.Server, str]]:
    server = Closing()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    yield server, listening, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listening.close()


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
        assert (response.status, response.headers["content-length"]) == (200, "2")
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

    with pytest.raises(HopError):
        await whole()


async def test_interim_answers_are_bounded(server: tuple[Server, str], transport: Http1Transport) -> None:
    interim, final = b"HTTP/1.1 103 Early Hints\r\n\r\n", server[0].answer
    server[0].answer = INTERIM_MAX * interim + final
    assert (await get(transport, server[1])).status == 200
    server[0].answer = (INTERIM_MAX + 1) * interim + final
    with pytest.raises(Malformed):
        await get(transport, server[1])


async def test_an_unreachable_server_is_a_connect_error(transport: Http1Transport) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(NoConnection):
            await get(transport, "http://127.0.0.1:1")
        with pytest.raises(NoConnection):
            await get(transport, "http://no-such-host.invalid")


# -- connections that are closed while a request is under way ------------------------------------------


@pytest.fixture
def idled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept connection counts as one that was unused for long."""
    monkeypatch.setattr(http1, "UNUSED_S_MIN", 0.0)


async def post(
    transport: Http1Transport,
    url: str,
    content: bytes,
    connected: Callable[[], None] | None = None,
    *,
    is_repeated: bool = False,
) -> bytes | None:
    headers = [(b"content-length", b"%d" % len(content))]
    async with asyncio.timeout(PATIENCE_S):
        response = await transport.exchange(
            "POST", url, headers, content, connected=connected, is_repeated=is_repeated
        )
        answer = await response.read()
        await response.aclose()
        return answer


@pytest.mark.parametrize("length", [10, 3 * http1.PIECE_LEN])
async def test_a_request_that_crosses_the_end_of_a_kept_connection_is_sent_on_a_new_one(
    closing: tuple[Closing, asyncio.Server, str], transport: Http1Transport, length: int
) -> None:
    server, _, url = closing
    server.answers = 2
    told: list[int] = []
    for letter in (b"a", b"b"):
        assert await post(transport, url, letter * length, lambda: told.append(1)) == b"ok"
    assert server.bodies == [b"a" * length, b"b" * length]
    assert (server.opened, len(told)) == (2, 2), "the caller is told once"


@pytest.mark.parametrize("unused_s", [0.0, 60.0])
async def test_it_is_sent_once_more_and_not_again(
    closing: tuple[Closing, asyncio.Server, str],
    transport: Http1Transport,
    monkeypatch: pytest.MonkeyPatch,
    unused_s: float,
) -> None:
    """Where the first connection was just used, it may have been lost by the request, as the second was."""
    monkeypatch.setattr(http1, "UNUSED_S_MIN", unused_s)
    server, _, url = closing
    await post(transport, url, b"a")
    with pytest.raises(Lost) as lost:
        await post(transport, url, b"b")
    assert isinstance(lost.value, LostTwice) is (unused_s > 0.0)
    assert server.opened == 2
    with pytest.raises(Lost):  # no connection is kept, and a new one was not closed for that
        await post(transport, url, b"c")
    assert server.opened == 3


@pytest.mark.parametrize(("unused_s", "opened"), [(0.0, 2), (60.0, 1)])
async def test_what_was_lost_with_another_server_is_sent_once_more_where_it_surely_reached_nobody(
    closing: tuple[Closing, asyncio.Server, str],
    transport: Http1Transport,
    monkeypatch: pytest.MonkeyPatch,
    unused_s: float,
    opened: int,
) -> None:
    monkeypatch.setattr(http1, "UNUSED_S_MIN", unused_s)
    server, _, url = closing
    await post(transport, url, b"a")
    with pytest.raises(Lost):
        await post(transport, url, b"b", is_repeated=True)
    assert server.opened == opened


@pytest.mark.usefixtures("idled")
@pytest.mark.parametrize("parting", [b"H", b"HTTP/1.1 103 Early\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
async def test_a_request_whose_answer_had_begun_is_not_sent_again(
    closing: tuple[Closing, asyncio.Server, str], transport: Http1Transport, parting: bytes
) -> None:
    server, _, url = closing
    server.answers, server.parting = 9, parting
    await post(transport, url, b"a")
    with pytest.raises(HopError):
        await post(transport, url, b"b")
    assert server.opened == 1


@pytest.mark.usefixtures("idled")
async def test_a_request_that_an_engine_had_for_long_is_not_sent_again(
    closing: tuple[Closing, asyncio.Server, str],
    transport: Http1Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine may have died of it, and behind a proxy another would die of it as well."""
    monkeypatch.setattr(http1, "CROSSED_S", 0.0)
    server, _, url = closing
    server.answers = 9
    await post(transport, url, b"a")
    with pytest.raises(Lost):
        await post(transport, url, b"b")
    assert server.opened == 1


async def test_a_request_that_an_engine_may_have_died_of_counts_as_sent(
    closing: tuple[Closing, asyncio.Server, str], transport: Http1Transport
) -> None:
    """A ConnectError would let every other engine have it."""
    _, listening, url = closing
    await post(transport, url, b"a")
    listening.close()
    with pytest.raises(Lost):
        await post(transport, url, b"b")


@pytest.mark.parametrize(
    ("headers", "told_s"),
    [
        ([], None),
        ([(b"keep-alive", b"timeout=5, max=100")], 5.0),
        ([(b"keep-alive", b"max=100,Timeout=60")], 60.0),
        ([(b"keep-alive", b"timeout=0")], 0.0),
        ([(b"keep-alive", b"mytimeout=5")], None),
        ([(b"keep-alive", b"timeout=-5")], None),
        ([(b"keep-alive", b"timeout=99999999")], None),
    ],
)
def test_a_server_says_how_long_it_keeps_a_connection(
    headers: list[tuple[bytes, bytes]], told_s: float | None
) -> None:
    assert kept_s(headers) == told_s


def test_connections_are_kept_for_less_than_their_servers_keep_them() -> None:
    """uvicorn's 5 s where nothing is said."""
    assert http1.IDLE_S < 4.0
    said = [(b"", 3.0), (b"timeout=5", 2.5), (b"timeout=600", http1.IDLE_S_MAX), (b"timeout=0", 0.0)]
    for value, kept in said:
        head = parse_head(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nkeep-alive: " + value, has_body=True)
        assert http1._idle_s(head) == kept
