"""What came as a chunk of its own is offered to the reader as it came, with its framing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from tests.gateway.conftest import PATIENCE_S, until
from tests.gateway.relay.test_http1_framing import chunk, get, serving
from tests.uncollected import uncollected


class Socket:
    """A socket whose options are noted, or refused."""

    def __init__(self, *, refuses: Exception | None = None) -> None:
        self.options: list[tuple[int, int, int]] = []
        self._refuses = refuses

    def setsockopt(self, *option: int) -> None:
        if self._refuses is not None:
            raise self._refuses
        level, name, value = option
        self.options.append((level, name, value))


async def test_a_chunk_alone_is_offered_with_its_framing() -> None:
    said: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(await said.get())

    seen: list[tuple[bytes, str]] = []

    def accept(data: bytes) -> bool:
        seen.append((data, "joined"))
        return True

    def accept_chunk(data: bytes, start: int) -> bool | None:
        event = data[start:-2]
        if event == b"broken":
            raise Broken
        if event == b"not wanted":
            return None
        seen.append((data, "framed"))
        return event != b"full"

    async with serving(serve) as (transport, url), asyncio.timeout(PATIENCE_S):
        answer = await get(transport, url)
        answer._connection._socket = noted = Socket()  # type: ignore[assignment]
        passing = asyncio.create_task(answer.pass_on(accept, accept_chunk))
        for count, sent in enumerate((chunk(b"one"), chunk(b"not wanted"), chunk(b"a") + chunk(b"b")), 1):
            said.put_nowait(sent)
            await until(lambda count=count: len(seen) == count)  # type: ignore[misc]
        said.put_nowait(chunk(b"full"))
        assert await passing is True
        assert seen == [
            (chunk(b"one"), "framed"), (b"not wanted", "joined"), (b"ab", "joined"),
            (chunk(b"full"), "framed"),
        ]  # fmt: skip
        assert noted.options == [(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)]
        answer._connection._socket = Socket(refuses=OSError())  # type: ignore[assignment]
        passing = asyncio.create_task(answer.pass_on(accept, accept_chunk))
        said.put_nowait(chunk(b"broken"))
        with pytest.raises(Broken):
            await passing
        await answer.aclose()


async def test_an_answer_whose_connection_was_closed_behind_it_is_read_to_its_end() -> None:
    """As from an engine that keeps no connections, whose short answer and end come together."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"one") + b"0\r\n\r\n")
        writer.close()

    seen: list[bytes] = []

    def accept(data: bytes) -> bool:
        seen.append(data)
        return True

    async with serving(serve) as (transport, url), asyncio.timeout(PATIENCE_S):
        answer = await get(transport, url)
        connection = answer._connection
        await until(lambda: connection._transport is None)
        connection._socket = Socket(refuses=ValueError("negative file descriptor"))  # type: ignore[assignment]
        assert await answer.pass_on(accept, lambda *_: None) is False
        assert seen == [b"one"]
        await answer.aclose()


class Broken(Exception):
    pass


def breaks(*_: object) -> bool:
    raise Broken


@pytest.mark.parametrize("accept_chunk", [None, breaks])
async def test_an_error_of_the_reader_leaves_no_reference_cycle(
    accept_chunk: Callable[[bytes, int], bool | None] | None,
) -> None:
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await go_on.wait()
        writer.write(chunk(b"one"))
        await asyncio.Event().wait()

    async with serving(serve) as (transport, url):
        with uncollected(Broken) as left:
            answer = await get(transport, url)
            asyncio.get_running_loop().call_soon(go_on.set)
            with pytest.raises(Broken):
                await answer.pass_on(breaks, accept_chunk)
            await answer.aclose()
            del answer
            await until(lambda: not left())
