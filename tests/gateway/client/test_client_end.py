"""The client's end as bytes on its connection: how an answer is framed, and what its head may hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp.http import HttpVersion11

from gateway.client.answer import PIECE_LEN, Client
from gateway.client.blocked import BlockedSpan, note_blocked
from gateway.client.deadlines import Watch
from shared.wire.completed_line import BLOCKED_SHOWN_MAX
from tests.gateway.conftest import CHAT, KEY, PATIENCE_S, House
from tests.gateway.fake_engine import Script

ANSWER = b'{"object":"chat.completion"}'
EVENT = b"data: {}\n\n"
STREAM = [EVENT, b"data: [DONE]\n\n"]


async def asked(
    house: House, version: str, *headers: str, until_closed: bool, streams: bool = False
) -> tuple[list[bytes], bytes]:
    """The lines of an answer's head, and its body as it was framed."""
    body = msgspec.json.encode({**CHAT, "stream": streams})
    head = [f"POST /v1/chat/completions HTTP/{version}", "host: a", f"authorization: Bearer {KEY}"]
    head += [*headers, f"content-length: {len(body)}"]
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    try:
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(PATIENCE_S):
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().splitlines()[:-1]
            if until_closed:
                return lines, await reader.read()
            if b"transfer-encoding: chunked" in lines:
                return lines, await reader.readuntil(b"\r\n0\r\n\r\n")
            [length] = [int(line.split()[1]) for line in lines if line.startswith(b"content-length: ")]
            return lines, await reader.readexactly(length)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("version", "asks", "said"),
    [
        ("1.1", (), None),
        ("1.1", ("connection: close",), b"connection: close"),
        ("1.0", ("connection: keep-alive",), b"connection: keep-alive"),
        ("1.0", (), b"connection: close"),
    ],
)
async def test_a_whole_answer_tells_its_length_and_whether_the_connection_is_kept(
    house: House, version: str, asks: tuple[str, ...], said: bytes | None
) -> None:
    house.engine.script = Script([ANSWER], content_type="application/json")
    closes = said == b"connection: close"
    lines, body = await asked(house, version, *asks, until_closed=closes)
    assert lines[0] == f"http/{version} 200 ok".encode()
    assert body == ANSWER
    assert f"content-length: {len(ANSWER)}".encode() in lines
    assert not any(line.startswith(b"transfer-encoding") for line in lines)
    assert [line for line in lines if line.startswith(b"connection")] == ([said] if said else [])
    assert sum(line.startswith((b"date: ", b"server: ", b"x-request-id: ")) for line in lines) == 3


async def test_a_stream_is_chunked_or_ends_with_the_connection(house: House) -> None:
    house.engine.script = Script(STREAM)
    lines, body = await asked(house, "1.1", until_closed=False, streams=True)
    assert b"transfer-encoding: chunked" in lines
    assert b"".join(body.split(b"\r\n")[1::2]) == b"".join(STREAM)
    lines, body = await asked(house, "1.0", "connection: keep-alive", until_closed=True, streams=True)
    assert b"connection: close" in lines
    assert not any(line.startswith((b"transfer-encoding", b"content-length")) for line in lines)
    assert body == b"".join(STREAM)


class Wire:
    """A request as `Client` needs one, that remembers what was written."""

    def __init__(self) -> None:
        self.sent = b""
        self.lengths: list[int] = []
        """Of what was written at once."""
        self.method, self.version, self.keep_alive = "POST", HttpVersion11, True
        self.writer = SimpleNamespace(output_size=0)
        transport = SimpleNamespace(is_closing=lambda: False, write=self._write)
        self.protocol = SimpleNamespace(writing_paused=False, transport=transport)

    def _write(self, data: bytes) -> None:
        self.sent += data
        self.lengths.append(len(data))


def client_of(wire: Any) -> Client:
    return Client(wire, Watch(1.0), slow_client_s=1.0)


async def test_a_header_value_with_a_line_end_is_refused() -> None:
    wire = Wire()
    for value in ("a\r\nset-cookie: b", "a\nb", "a\rb", "a\r\n"):
        with pytest.raises(ValueError, match="line end"):
            await client_of(wire).begin(200, {"content-type": value}, b"body", whole=True)
    assert not wire.sent


async def test_a_long_answer_is_written_in_pieces_between_which_its_client_is_waited_for() -> None:
    wire, drained = Wire(), asyncio.Event()
    wire.writer.drain = drained.wait
    wire.protocol.writing_paused = True
    body = b"a" * 200_000
    beginning = asyncio.ensure_future(client_of(wire).begin(200, {"content-type": "a/b"}, body, whole=True))
    await asyncio.sleep(0)
    assert wire.lengths == [PIECE_LEN]
    drained.set()
    await beginning
    assert wire.sent.endswith(b"\r\n\r\n" + body)
    assert max(wire.lengths) == PIECE_LEN


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_has_no_framing(status: int) -> None:
    wire = Wire()
    client = client_of(wire)
    await client.begin(status, {"content-type": "a/b"}, b"", whole=False)
    await client.finish()
    assert wire.sent.endswith(b"\r\n\r\n")
    assert b"content-length" not in wire.sent
    assert b"transfer-encoding" not in wire.sent
    assert wire.writer.output_size == len(wire.sent)


async def test_any_status_of_an_engine_has_a_line() -> None:
    wire = Wire()
    await client_of(wire).begin(299, {"content-type": "a/b"}, b"", whole=True)
    assert wire.sent.startswith(b"HTTP/1.1 299 \r\ncontent-type: a/b\r\ncontent-length: 0\r\n")


# -- the times in which a client was behind ------------------------------------------------------------


def test_waits_that_follow_each_other_are_one_time_and_there_are_few() -> None:
    blocked: list[BlockedSpan] = []
    for at_s in (1.0, 1.3, 1.6, 9.0):
        note_blocked(blocked, at_s, at_s + 0.1)
    told = [(one.began_s, round(one.ended_s, 6), round(one.waited_s, 6)) for one in blocked]
    assert told == [(1.0, 1.7, 0.3), (9.0, 9.1, 0.1)]
    for at in range(100):
        note_blocked(blocked, 10.0 * (at + 1), 10.0 * (at + 1) + 0.5)
    assert len(blocked) == BLOCKED_SHOWN_MAX
    assert sum(one.waited_s for one in blocked) == pytest.approx(50.4)
    assert blocked[-1].ended_s == 1000.5
