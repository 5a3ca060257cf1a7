"""`Stream.pass_on`: what comes is handed over in the turn in which it came, under the same laws as `read`."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from shared.http2.connection_errors import ErrorCode, StreamReset
from shared.http2.stream import Stream
from tests.shared.http2.pair import Pair

TURNS = 3


@pytest.fixture
def pair() -> Pair:
    return Pair()


class Reader:
    """Takes what it is given, and has room for `room` pieces."""

    def __init__(self, stream: Stream, room: float = float("inf")) -> None:
        self.pieces: list[bytes] = []
        self.room = room
        self.task = asyncio.create_task(stream.pass_on(self.accept))

    def accept(self, data: bytes) -> bool:
        self.pieces.append(data)
        return len(self.pieces) < self.room


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_bytes_of_one_turn_are_passed_on_as_one_piece_in_that_turn(pair: Pair) -> None:
    ours, theirs = pair.exchange()
    reader = Reader(ours)
    await turns()
    pair.server.write(theirs, b"a")
    pair.server.write(theirs, b"b")
    pair.settle()
    assert reader.pieces == [b"ab"], "without the event loop"
    pair.server.write(theirs, b"c")
    theirs.finish()
    pair.settle()
    assert await reader.task is False
    assert b"".join(reader.pieces) == b"abc"


async def test_what_was_queued_before_comes_first(pair: Pair) -> None:
    ours, theirs = pair.exchange()
    pair.server.write(theirs, b"before")
    pair.settle()
    reader = Reader(ours)
    await turns()
    pair.server.write(theirs, b"after")
    pair.settle()
    assert reader.pieces == [b"before", b"after"]
    reader.task.cancel()


async def test_backpressure_a_reader_without_room_closes_its_window_and_resumes(pair: Pair) -> None:
    """Nothing beyond one window is taken from the peer, and nothing is lost, doubled or reordered."""
    ours, theirs = pair.exchange()
    window = pair.client.connection.config.stream_window_len
    reader = Reader(ours, room=1)
    await turns()
    pair.server.write(theirs, b"first")
    pair.settle()
    text = bytes(itertools.islice(itertools.cycle(range(256)), 2 * window))
    pair.server.write(theirs, text)
    pair.settle()
    assert await reader.task is True
    assert reader.pieces == [b"first"]
    assert ours.buffered <= window
    assert theirs.pending is not None
    pair.check_laws()
    reader = Reader(ours)
    await turns()
    pair.settle()
    assert b"".join(reader.pieces) == text
    pair.check_laws()
    reader.task.cancel()


async def test_a_stream_that_is_cut_off_raises_stream_failed(pair: Pair) -> None:
    ours, theirs = pair.exchange()
    reader = Reader(ours)
    await turns()
    pair.server.write(theirs, b"a")
    pair.settle()
    theirs.reset(ErrorCode.INTERNAL_ERROR)
    pair.settle()
    with pytest.raises(StreamReset):
        await reader.task
    assert reader.pieces == [b"a"]


async def test_an_error_of_the_readers_is_the_readers_alone(pair: Pair) -> None:
    ours, theirs = pair.exchange()
    other, others = pair.exchange()

    def accept(_: bytes) -> bool:
        raise ValueError("no place for it")

    failing, reader = asyncio.create_task(ours.pass_on(accept)), Reader(other)
    await turns()
    pair.server.write(theirs, b"a")
    pair.server.write(others, b"b")
    pair.settle()
    assert reader.pieces == [b"b"]
    with pytest.raises(ValueError, match="no place"):
        await failing
    reader.task.cancel()


@pytest.mark.parametrize("room", [1, 2], ids=["full", "cancelled"])
async def test_nothing_is_passed_to_a_cancelled_reader(pair: Pair, room: int) -> None:
    """From that moment, though its task has not run yet."""
    ours, theirs = pair.exchange()
    reader = Reader(ours, room)
    await turns()
    pair.server.write(theirs, b"a")
    pair.settle()
    if room > 1:
        reader.task.cancel()
    pair.server.write(theirs, b"b")
    pair.settle()
    assert reader.pieces == [b"a"]
    await turns()
    assert reader.task.done()
    assert ours.read_nowait() == b"b"
