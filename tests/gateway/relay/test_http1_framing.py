"""What ends a head and a body of HTTP/1.1, and what is refused because it could be read in two ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.relay import http1
from gateway.relay.hop_errors import Lost, Malformed, NoConnectionInTime, Unsendable
from gateway.relay.http1 import Http1ResponseStream, Http1Transport
from gateway.relay.http1_framing import (
    HEAD_LEN_MAX,
    HEAD_LINES_MAX,
    SIZE_LINE_LEN_MAX,
    TRAILER_LEN_MAX,
    BadAnswer,
    BodyFraming,
    Chunked,
    Sized,
    UntilClosed,
    parse_head,
)
from tests.gateway.conftest import PATIENCE_S, until

OK = b"HTTP/1.1 200 OK"
READ_LEN_MAX = 256 * 1024
"""The most that an event loop reads at once."""


def body_of(*lines: bytes, first: bytes = OK, has_body: bool = True) -> BodyFraming:
    return parse_head(b"\r\n".join([first, *lines]), has_body=has_body).body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# -- heads ----------------------------------------------------------------------------------------


def test_the_framing_follows_from_the_head() -> None:
    assert isinstance(body_of(b"Transfer-Encoding: Chunked"), Chunked)
    assert isinstance(body_of(b"content-length: 12"), Sized)
    assert isinstance(body_of(b"content-type: text/plain"), UntilClosed)
    assert body_of(b"content-length: 12", has_body=False).is_done
    assert body_of(b"content-length: 12", first=b"HTTP/1.1 204 No Content").is_done


@pytest.mark.parametrize(
    ("line", "keeps"),
    [(b"connection: keep-alive", True), (b"Connection: foo, Close", False), (b"x: y", True)],
)
def test_whether_the_connection_stays(line: bytes, keeps: bool) -> None:
    assert parse_head(b"\r\n".join([OK, line, b"content-length: 0"]), has_body=True).keeps_alive is keeps
    assert not parse_head(b"\r\n".join([OK, line]), has_body=True).keeps_alive
    old = b"\r\n".join([b"HTTP/1.0 200 OK", line, b"content-length: 0"])
    assert not parse_head(old, has_body=True).keeps_alive


@pytest.mark.parametrize(
    "lines",
    [
        [b"transfer-encoding: chunked", b"content-length: 3"],
        [b"content-length: 3", b"content-length: 3"],
        [b"content-length: 3", b"content-length: 4"],
        [b"content-length: +3"],
        [b"content-length: 3, 3"],
        [b"content-length: 0x3"],
        [b"content-length: "],
        [b"content-length: " + b"9" * 30],
        [b"transfer-encoding: gzip, chunked"],
        [b"transfer-encoding: chunked", b"transfer-encoding: chunked"],
        [b"transfer-encoding: \x0bchunked"],
        [b"transfer-encoding : chunked"],
        [b" folded: line"],
        [b"name"],
        [b": value"],
        [b"a: b\rc: d"],
        [b"a: b\nc: d"],
        [b"a: b\0"],
        [b"a: b"] * (HEAD_LINES_MAX + 1),
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(lines: list[bytes]) -> None:
    with pytest.raises(BadAnswer):
        body_of(*lines)


@pytest.mark.parametrize(
    "first",
    [b"HTTP/2 200 OK", b"HTTP/1.1 200OK", b"HTTP/1.1 20 OK", b" HTTP/1.1 200 OK", b"HTTP/1.1 2000", b""],
)
def test_a_status_line_that_is_none_is_refused(first: bytes) -> None:
    with pytest.raises(BadAnswer):
        body_of(first=first)


def test_a_chunked_body_of_the_old_version_is_refused() -> None:
    with pytest.raises(BadAnswer):
        body_of(b"transfer-encoding: chunked", first=b"HTTP/1.0 200 OK")


# -- bodies ---------------------------------------------------------------------------------------


def feed_bytewise(body: BodyFraming, wire: bytes) -> None:
    for at in range(len(wire)):
        body.feed(wire[at : at + 1])


@given(
    st.lists(st.binary(min_size=1, max_size=600), max_size=6),
    st.lists(st.integers(1, 400), max_size=30),
    st.sampled_from([b"", b"x: y\r\n"]),
)
def test_chunks_come_out_as_they_went_in_however_they_are_cut(
    pieces: list[bytes], cuts: list[int], trailer: bytes
) -> None:
    wire = b"".join(map(chunk, pieces)) + b"0\r\n" + trailer + b"\r\n"
    body, read = Chunked(), b""
    for cut in [*cuts, len(wire)]:
        assert not body.is_done or not wire
        read += body.feed(wire[:cut])
        wire = wire[cut:]
    assert read == b"".join(pieces)
    assert body.is_done
    assert not body.has_surplus


@given(
    st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"1\r\n", b"A\r\n", b"0\r\n"]), max_size=8).map(b"".join),
    st.sampled_from([b"", b"1\r\n", b"1\r\na", b"1\r\na\r", chunk(b"a"), b"0\r\n", b"0\r\n\r\n", b"2;x"]),
    st.booleans(),
)
def test_a_read_is_alone_only_where_it_is_one_whole_chunk(
    data: bytes, before: bytes, is_framed: bool
) -> None:
    body, data = Chunked(), chunk(data) if is_framed else data
    body.feed(before)
    if start := body.alone(data):
        size = b"%x\r\n" % (len(data) - start - 2)  # its digits may be of either case
        assert data[:start].lower() + data[start:] == b"%b%b\r\n" % (size, data[start:-2])
        assert body.feed(data) == data[start:-2]
    else:
        assert before not in (b"", chunk(b"a")) or not is_framed or data == chunk(b"")


@pytest.mark.parametrize("size", [0x0FF, 0x100, 0xFFF, 0x1000])
def test_a_chunk_that_comes_alone(size: int) -> None:
    body, data = Chunked(), b"\r\n" * (size // 2) + b"x" * (size % 2)
    for spelt in (chunk(data), chunk(data).upper() if size else b""):
        assert body.feed(spelt) == data.upper() or body.feed(spelt) == data
    assert body.feed(b"0\r\n\r\n") == b""
    assert body.is_done


@pytest.mark.parametrize(
    "wire",
    [
        b"zz\r\n",
        b"+5\r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5\nhello\r\n",
        b"-1\r\n",
        b"\r\n",
        b"5_0\r\n",
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\rX",
        b"5;a=\rb\r\nhello\r\n",
        b"f" * 16 + b"\r\n",
        b"1" * (SIZE_LINE_LEN_MAX + 2),
        b"1;" + b"x" * SIZE_LINE_LEN_MAX + b"\r\na\r\n",
        b"0\r\nno trailer\r\n\r\n",
        b"0\r\na: " + b"x" * TRAILER_LEN_MAX + b"\r\n\r\n",
        b"0\r\n" + b"a: b\r\n" * TRAILER_LEN_MAX,
        b"0\r\na: " + b"x" * (TRAILER_LEN_MAX + 10),
    ],
)
def test_chunks_that_could_be_read_in_two_ways_are_refused(wire: bytes) -> None:
    with pytest.raises(BadAnswer):
        Chunked().feed(wire)
    with pytest.raises(BadAnswer):
        feed_bytewise(Chunked(), wire)


def test_what_follows_an_end_is_noted_and_not_read() -> None:
    chunks, sized = Chunked(), Sized(3)
    assert chunks.feed(b"1\r\na\r\n0\r\n\r\nHTTP/1.1 200 OK") == b"a"
    assert sized.feed(b"abcdef") == b"abc"
    assert chunks.has_surplus
    assert sized.has_surplus
    assert chunks.is_done
    assert sized.is_done


# -- connections ----------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Http1Transport, str]]:
    """A transport and the URL of a server that does this on each connection."""
    writers: list[asyncio.StreamWriter] = []

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)

    listening = await asyncio.start_server(run, "127.0.0.1", 0)
    transport = Http1Transport()
    try:
        yield transport, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
    finally:
        await transport.aclose()
        for writer in writers:
            writer.close()
        listening.close()


async def get(transport: Http1Transport, url: str) -> Http1ResponseStream:
    async with asyncio.timeout(PATIENCE_S):
        return await transport.exchange("GET", url, [], b"")


async def whole(answer: Http1ResponseStream) -> bytes:
    read = b""
    async with asyncio.timeout(PATIENCE_S):
        while (data := await answer.read()) is not None:
            read += data
    await answer.aclose()
    return read


def saying(answer: bytes, *, ends: bool = False) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(answer)
            if ends:
                writer.close()
                return

    return serve


async def test_interim_answers_are_passed_over_up_to_a_number() -> None:
    interim, last = b"HTTP/1.1 103 Early\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with serving(saying(interim * 3 + last)) as (transport, url):
        assert await whole(await get(transport, url)) == b"ok"
        assert transport._idle
    for refused in (interim * 50, b"a" * (HEAD_LEN_MAX + 5)):
        async with serving(saying(refused)) as (transport, url):
            with pytest.raises(Malformed):
                await get(transport, url)
            assert not transport._open


async def test_a_change_of_protocols_is_final_and_its_connection_is_not_used_again() -> None:
    async with serving(saying(b"HTTP/1.1 101 Switching\r\ncontent-length: 0\r\n\r\n")) as (transport, url):
        answer = await get(transport, url)
        assert answer.status == 101
        assert not await whole(answer)
        assert not transport._idle


async def test_a_connection_on_which_more_came_is_not_used_again() -> None:
    extra = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    async with serving(saying(extra)) as (transport, url):
        for _ in range(2):
            assert await whole(await get(transport, url)) == b"ok"
            assert not transport._idle


async def test_bytes_on_an_idle_connection_close_it() -> None:
    pushed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await pushed.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        await reader.read()

    async with serving(serve) as (transport, url):
        assert await whole(await get(transport, url)) == b"ok"
        assert transport._idle
        pushed.set()
        await until(lambda: not transport._open)
        assert not transport._idle


async def test_an_idle_connection_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "IDLE_S", 0.0)
    async with serving(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")) as (transport, url):
        assert await whole(await get(transport, url)) == b"ok"
        await until(lambda: not transport._open)


async def test_an_answer_may_end_with_its_connection_unless_it_says_otherwise() -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\nall of it", ends=True)) as (transport, url):
        assert await whole(await get(transport, url)) == b"all of it"
    cut = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"
    async with serving(saying(cut, ends=True)) as (transport, url):
        answer = await get(transport, url)
        with pytest.raises(Malformed):
            await whole(answer)
    async with serving(saying(b"HTTP/1.1 200", ends=True)) as (transport, url):
        with pytest.raises(Lost):
            await get(transport, url)


async def test_a_reader_that_takes_nothing_stops_the_socket() -> None:
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 50000000\r\n\r\n")
        for _ in range(500):
            writer.write(b"x" * 100_000)
            await writer.drain()
            written += 100_000

    async with serving(serve) as (transport, url):
        answer = await get(transport, url)
        connection = answer._connection
        await until(lambda: connection._is_paused)
        assert connection._buffered <= http1.READ_BUFFER_LEN + READ_LEN_MAX
        taken = 0
        async with asyncio.timeout(PATIENCE_S):
            while (data := await answer.read()) is not None:
                taken += len(data)
        assert taken == 50_000_000


async def test_a_large_request_is_sent_in_pieces_and_an_early_answer_ends_it() -> None:
    sent = b"x" * 24_000_000
    received: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not received:
            received.append(len(await reader.readexactly(len(sent))))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await asyncio.Event().wait()

    async with serving(serve) as (transport, url):
        for kept in (1, 0):  # the second time nobody reads it
            answer = await transport.exchange("POST", url, [(b"content-length", b"24000000")], sent)
            assert await whole(answer) == b"ok"
            assert sum(map(len, transport._idle.values())) == kept
            for idle in list(transport._idle.values()):
                for connection in list(idle):
                    connection.close()
            transport._idle.clear()
    assert received == [len(sent)]


async def test_headers_that_would_be_two_are_not_sent() -> None:
    async with serving(saying(b"")) as (transport, url):
        for bad in ((b"a", b"b\r\nc: d"), (b"a\nb", b"c"), (b"a", b"\0")):
            with pytest.raises(Unsendable):
                await transport.exchange("GET", url, [bad], b"")
        with pytest.raises(Unsendable):
            await transport.exchange("GET", "ftp://a/", [], b"")
        assert not transport._open


async def test_accept_is_called_in_turn_and_its_errors_are_raised() -> None:
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"one"))
        await go_on.wait()
        writer.write(chunk(b"two"))
        await asyncio.Event().wait()

    class Broken(Exception):
        pass

    def breaks(_: bytes) -> bool:
        raise Broken

    async with serving(serve) as (transport, url):
        answer, seen = await get(transport, url), list[bytes]()

        def accept(data: bytes) -> bool:
            seen.append(data)
            go_on.set()
            return data != b"two"

        async with asyncio.timeout(PATIENCE_S):
            assert await answer.pass_on(accept) is True
        assert b"".join(seen) == b"onetwo"
        go_on.clear()
        await answer.aclose()
        answer = await get(transport, url)
        await until(lambda: bool(answer._connection._chunks))
        answer._connection._taken()
        passing = asyncio.create_task(answer.pass_on(breaks))
        await until(lambda: answer._connection._reader is not None)
        go_on.set()
        with pytest.raises(Broken):
            await passing
        await answer.aclose()


async def test_a_transport_that_closes_ends_what_is_open() -> None:
    async with serving(saying(b"HTTP/1.1 200 OK\r\n\r\nbegun")) as (transport, url):
        answer = await get(transport, url)
        assert await answer.read() == b"begun"
        reading = asyncio.create_task(answer.read())
        await until(lambda: answer._connection._reader is not None)
        await transport.aclose()
        with pytest.raises(Lost):
            await reading


async def test_a_connection_that_takes_too_long_is_a_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    transport = Http1Transport()
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    with pytest.raises(NoConnectionInTime):
        await transport.exchange("GET", "http://a/", [], b"", connect_s=0.01)
