"""The load client counts right however the server's bytes are cut."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.bench.client import LoadConnection, TimedRequest

EVENT = b'data: {"choices":[],"n":%d}\n\n'
USAGE = (
    b'data: {"usage":{"prompt_tokens":3,"completion_tokens":7,"total_tokens":10,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)


def sse_answer(payload: bytes, chunk_len: int) -> bytes:
    cut = [payload[i : i + chunk_len] for i in range(0, len(payload), chunk_len)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in cut)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n\r\n"
    )


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data


async def exchange(pieces: list[bytes]) -> TimedRequest:
    connection = LoadConnection()
    connection.connection_made(FakeTransport())
    task = asyncio.ensure_future(connection.exchange(b"GET"))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    connection.connection_lost(None)
    return await task


@given(st.integers(0, 5), st.integers(1, 50), st.integers(1, 60))
def test_events_are_counted_whatever_the_cuts(events: int, chunk_len: int, piece_len: int) -> None:
    payload = b"".join(EVENT % i for i in range(events)) + USAGE + b"data: [DONE]\n\n"
    wire = sse_answer(payload, chunk_len)
    pieces = [wire[i : i + piece_len] for i in range(0, len(wire), piece_len)]
    done = asyncio.run(exchange(pieces))
    assert done.error is None
    assert done.saw_done
    assert len(done.event_times) == events + 1
    assert done.usage is not None
    assert done.usage.completion_tokens == 7


async def test_a_truncated_stream_is_an_error() -> None:
    done = await exchange([sse_answer(EVENT % 1, 100)])
    assert done.error is not None
    assert "without [DONE]" in done.error


async def test_a_lost_connection_is_an_error() -> None:
    done = await exchange([sse_answer(EVENT % 1, 100)[:-10]])
    assert done.error == "connection closed"


async def test_a_refusal_is_an_error_with_its_body() -> None:
    done = await exchange([b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nslow"])
    assert done.status == 429
    assert done.error == "HTTP 429: b'slow'"
