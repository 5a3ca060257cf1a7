"""The core's laws, on two cores joined in memory."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.http2 import connection as connections
from shared.http2 import frames, limits
from shared.http2.connection import ConnectionPhase
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import (
    ConnectionLost,
    ErrorCode,
    ProtocolViolation,
    StreamRefused,
    StreamReset,
)
from shared.http2.headers import LiteralEncoder
from shared.http2.stream import Stream
from tests.shared.http2.pair import REQUEST, RESPONSE, End, Pair

BARE_REQUEST = b"\x82\x86\x84\x41\x06engine"  # GET http://engine/, without the compression table
PONG = 0x1


@pytest.fixture
def pair() -> Pair:
    return Pair()


def drain(pair: Pair, stream: Stream) -> bytes:
    """Everything that the far end has to write, read to its end."""
    received = bytearray()
    while True:
        pair.settle()
        data = stream.read_nowait()
        if not data:
            return bytes(received)
        received += data
        pair.check_laws()


def test_a_request_and_its_answer(pair: Pair) -> None:
    ours, theirs = pair.request()
    assert theirs.head == REQUEST
    pair.client.write(ours, b"question")
    ours.finish()
    pair.settle()
    assert theirs.read_nowait() == b"question"
    assert theirs.received_all
    pair.server.connection.respond(theirs, RESPONSE, end=False)
    pair.server.write(theirs, b"answer")
    theirs.finish()
    pair.settle()
    assert ours.head == RESPONSE
    assert ours.read_nowait() == b"answer"
    assert ours.received_all
    assert not pair.client.connection.streams
    assert not pair.server.connection.streams
    assert pair.client.closed == [ours]
    assert pair.server.closed == [theirs]
    pair.check_laws()


def test_backpressure_an_unread_stream_holds_one_window_and_no_more(pair: Pair) -> None:
    ours, theirs = pair.exchange(end=True)
    pair.server.write(theirs, bytes(10 * limits.STREAM_WINDOW_LEN))
    pair.settle()
    assert ours.buffered == limits.STREAM_WINDOW_LEN
    assert theirs.pending is not None
    assert len(theirs.pending) == 9 * limits.STREAM_WINDOW_LEN
    pair.check_laws()
    assert drain(pair, ours) == bytes(9 * limits.STREAM_WINDOW_LEN) + bytes(limits.STREAM_WINDOW_LEN)
    assert theirs.pending is None


def test_many_unread_streams_leave_the_connection_open_for_one_that_is_read(pair: Pair) -> None:
    stalled = [pair.exchange(end=True) for _ in range(300)]  # 300 windows are more than the connection's
    for _, theirs in stalled:
        pair.server.write(theirs, bytes(2 * limits.STREAM_WINDOW_LEN))
    pair.settle()
    ours, theirs = pair.exchange(end=True)
    pair.server.write(theirs, bytes(5 * limits.STREAM_WINDOW_LEN))
    assert len(drain(pair, ours)) == 5 * limits.STREAM_WINDOW_LEN
    assert all(one.buffered == limits.STREAM_WINDOW_LEN for one, _ in stalled)
    pair.check_laws()


def test_streams_take_turns_when_the_transport_is_full(pair: Pair) -> None:
    streams = [pair.exchange(end=True) for _ in range(8)]
    server = pair.server.connection
    server.paused = True
    for _, theirs in streams:
        pair.server.write(theirs, bytes(3 * limits.FRAME_LEN_MAX))
    assert not server.take_output()
    server.paused = False
    server.pump()
    sent = [3 * limits.FRAME_LEN_MAX - len(theirs.pending or b"") for _, theirs in streams]
    assert sum(sent) >= limits.OUT_LEN_SOFT, "as much as the output may hold"
    assert max(sent) - min(sent) <= limits.FRAME_LEN_MAX, "nobody is a frame ahead"
    pair.settle()
    assert all(len(drain(pair, ours)) == 3 * limits.FRAME_LEN_MAX for ours, _ in streams)


def test_data_after_our_reset_is_credited_to_the_connection(pair: Pair) -> None:
    ours, theirs = pair.exchange(end=True)
    pair.server.write(theirs, bytes(50_000))
    pair.server.flush()
    ours.reset()
    pair.move(pair.server)
    assert ours.buffered == 0
    pair.settle()
    assert isinstance(theirs.error, StreamReset)
    assert theirs.error.code == ErrorCode.CANCEL
    assert not pair.server.connection.streams
    pair.check_laws()
    assert pair.client.connection.phase is ConnectionPhase.OPEN


def test_a_reset_before_headers_keeps_the_header_compression_whole(pair: Pair) -> None:
    ours, theirs = pair.request(end=True)
    pair.server.connection.respond(theirs, [*RESPONSE, (b"x-first", b"a value for the table")], end=False)
    pair.server.flush()
    ours.reset()
    pair.settle()
    ours, theirs = pair.request(end=True)
    head = [*RESPONSE, (b"x-first", b"a value for the table")]
    pair.server.connection.respond(theirs, head, end=True)
    pair.settle()
    assert ours.head == head


def test_a_message_that_ended_is_readable_though_the_stream_was_reset_after(pair: Pair) -> None:
    """A server answers before it has read the request, then declines the rest of it."""
    ours, theirs = pair.exchange()
    pair.server.write(theirs, b"too large")
    theirs.finish()
    theirs.reset(ErrorCode.NO_ERROR)
    pair.settle()
    assert ours.read_nowait() == b"too large"
    assert ours.received_all
    with pytest.raises(StreamReset):
        ours.write_nowait(b"more")


def test_interim_responses_and_trailers_are_passed_over(pair: Pair) -> None:
    ours, theirs = pair.request(end=True)
    pair.server.connection.inform(theirs, b"103")
    pair.settle()
    assert ours.head is None
    pair.server.connection.respond(theirs, RESPONSE, end=False)
    pair.server.write(theirs, b"answer")
    pair.server.connection.path.send_head(theirs, [(b"x-checksum", b"1")], end=True)
    pair.settle()
    assert ours.head == RESPONSE
    assert ours.read_nowait() == b"answer"
    assert ours.received_all


def test_shrinking_windows_by_settings_makes_a_stream_wait_and_growing_wakes_it(pair: Pair) -> None:
    _ours, theirs = pair.exchange(end=True)
    pair.server.write(theirs, bytes(60_000))
    pair.settle()
    shrunk = frames.settings({0x4: 1_000})
    pair.server.connection.receive(shrunk)
    assert pair.server.connection.path.stream_room(theirs) < 0
    pair.server.write(theirs, bytes(5_000))
    assert theirs.pending is not None
    pair.server.connection.receive(frames.settings({0x4: limits.STREAM_WINDOW_LEN}))
    assert theirs.pending is None, "SETTINGS woke the writer"


def test_the_connection_window_wakes_every_waiting_stream(pair: Pair) -> None:
    server = pair.server.connection
    streams = [pair.exchange(end=True) for _ in range(300)]
    for _, theirs in streams:  # without a word from the client the connection's window runs out
        pair.server.write(theirs, bytes(limits.STREAM_WINDOW_LEN))
        pair.server.flush()
    waiting = [theirs for _, theirs in streams if theirs.pending is not None]
    assert waiting
    assert server.path.connection_room == 0
    server.receive(frames.window_update(0, limits.CONNECTION_WINDOW_LEN))
    pair.server.flush()
    assert all(theirs.pending is None for theirs in waiting)


async def test_what_is_written_after_a_write_that_was_given_up_is_sent(pair: Pair) -> None:
    ours, theirs = pair.exchange(end=True)
    server = pair.server.connection
    server.paused = True
    given_up = asyncio.create_task(theirs.write(b"given up"))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    server.paused = False
    server.pump()
    server.paused = True
    pair.server.write(theirs, b"written")
    pair.settle()
    assert ours.read_nowait() == b"written"


def test_a_peer_that_exceeds_a_window_is_disconnected() -> None:
    pair = Pair()
    ours, _ = pair.exchange(end=True)
    chunk = frames.frame(frames.DATA, 0, ours.id, bytes(limits.FRAME_LEN_MAX))
    with pytest.raises(ProtocolViolation) as caught:
        pair.client.connection.receive(5 * chunk)
    assert caught.value.code == ErrorCode.FLOW_CONTROL_ERROR
    assert pair.client.connection.phase is ConnectionPhase.CLOSED
    assert ours.error is not None


def test_an_overflowing_window_resets_the_stream_or_ends_the_connection() -> None:
    pair = Pair()
    _, theirs = pair.exchange(end=True)
    pair.server.connection.receive(frames.window_update(theirs.id, limits.WINDOW_LEN_MAX))
    assert isinstance(theirs.error, StreamReset)
    assert theirs.error.code == ErrorCode.FLOW_CONTROL_ERROR
    with pytest.raises(ProtocolViolation):
        pair.server.connection.receive(frames.window_update(0, limits.WINDOW_LEN_MAX))


def test_padding_is_credited_and_a_content_length_is_held_to() -> None:
    pair = Pair()
    head = [*REQUEST, (b"content-length", b"6")]
    ours, theirs = pair.request(head=head)
    padded = frames.frame(frames.DATA, frames.PADDED, ours.id, b"\x03abc" + bytes(3))
    pair.server.connection.receive(padded)
    assert theirs.read_nowait() == b"abc"
    assert theirs.uncredited == 7
    pair.server.connection.receive(frames.frame(frames.DATA, frames.END_STREAM, ours.id, b"def"))
    assert theirs.read_nowait() == b"def"
    assert theirs.received_all
    path = pair.server.connection.path
    assert path.window + path.uncredited == limits.CONNECTION_WINDOW_LEN

    ours, theirs = pair.request(head=head)
    with pytest.raises(ProtocolViolation):
        pair.server.connection.receive(frames.frame(frames.DATA, frames.END_STREAM, ours.id, b"short"))


def test_padding_alone_closes_no_window() -> None:
    pair = Pair()
    ours, theirs = pair.request()
    padded = frames.frame(frames.DATA, frames.PADDED, ours.id, bytes([255]) + bytes(255))
    for _ in range(2 * limits.STREAM_WINDOW_LEN // 256):  # nobody reads, as nothing comes
        pair.server.connection.receive(padded)
        pair.server.connection.take_output()
    assert theirs.error is None
    assert theirs.buffered == 0


@pytest.mark.parametrize("hosts", [[b"engine", b"engine"], [b"engine", b"other"]], ids=["equal", "different"])
def test_a_request_with_two_hosts_is_malformed(hosts: list[bytes]) -> None:
    """What a proxy takes for the host may not be what the handler takes for it."""
    server = Pair().server.connection
    head = [*REQUEST[:2], REQUEST[3], *((b"host", host) for host in hosts)]
    block = LiteralEncoder().encode(head)
    with pytest.raises(ProtocolViolation):
        server.receive(frames.frame(frames.HEADERS, frames.END_STREAM | frames.END_HEADERS, 1, block))


@pytest.mark.parametrize("other", [b"5", b"6"])
def test_a_message_with_two_lengths_is_malformed_unless_they_are_equal(other: bytes) -> None:
    """What a proxy takes for the end of the body may not be what the handler takes for it."""
    server = Pair().server.connection
    head = [*REQUEST, (b"content-length", b"5"), (b"content-length", other)]
    block = LiteralEncoder().encode(head)
    with nullcontext() if other == b"5" else pytest.raises(ProtocolViolation):
        server.receive(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block))


def test_a_connection_whose_stream_ids_are_used_up_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    ours, _ = pair.request()
    assert pair.client.connection.streams_room > 0
    monkeypatch.setattr(connections, "LAST_ID_TO_OPEN", ours.id)
    assert pair.client.connection.streams_room == 0


def test_goaway_fails_what_was_not_processed_and_lets_the_rest_finish(pair: Pair) -> None:
    first, served = pair.exchange(end=True)
    second, _ = pair.request(end=True)
    pair.client.connection.receive(frames.goaway(first.id, ErrorCode.NO_ERROR))
    assert isinstance(second.error, StreamRefused)
    assert first.error is None
    assert pair.client.connection.streams_room == 0
    pair.server.write(served, b"the rest")
    served.finish()
    pair.settle()
    assert first.read_nowait() == b"the rest"
    assert first.received_all
    assert pair.client.connection.may_close


def test_retiring_serves_what_is_on_its_way_and_refuses_what_comes_after(pair: Pair) -> None:
    early = pair.client.connection.open(REQUEST, end=True)
    pair.server.connection.retire()
    pair.settle()
    assert early.error is None
    served = pair.server.opened[-1]
    late = frames.frame(frames.HEADERS, frames.END_STREAM | frames.END_HEADERS, early.id + 2, BARE_REQUEST)
    pair.server.connection.receive(late)
    refused = frames.frame(frames.RST_STREAM, 0, early.id + 2, (7).to_bytes(4, "big"))
    assert refused in pair.server.connection.take_output()
    pair.server.connection.respond(served, RESPONSE, end=True)
    pair.settle()
    assert early.received_all
    assert pair.server.connection.may_close


def test_a_retiring_server_says_its_last_stream_once(pair: Pair) -> None:
    server = pair.server.connection
    server.retire()
    server.take_output()
    pong = frames.frame(frames.PING, PONG, 0, connections.DRAIN_PING)
    server.receive(pong)
    assert frames.goaway(0, ErrorCode.NO_ERROR) in server.take_output()
    server.receive(pong)
    assert not server.take_output()


def test_streams_beyond_the_limit_are_refused_one_by_one() -> None:
    pair = Pair(server=ConnectionConfig(streams_max=2))
    head = BARE_REQUEST
    flags = frames.END_STREAM | frames.END_HEADERS
    for stream_id in (1, 3, 5):
        pair.server.connection.receive(frames.frame(frames.HEADERS, flags, stream_id, head))
    assert [stream.id for stream in pair.server.opened] == [1, 3]
    assert pair.server.connection.phase is ConnectionPhase.OPEN


def test_a_lost_connection_fails_every_stream(pair: Pair) -> None:
    streams = [pair.exchange()[0] for _ in range(3)]
    pair.client.connection.lost(ConnectionLost("gone"))
    assert all(isinstance(stream.error, ConnectionLost) for stream in streams)
    raised = []
    for stream in streams * 3:
        with pytest.raises(ConnectionLost, match="gone") as caught:
            stream.write_nowait(b"more")
        raised.append(caught.value)
        assert len(caught.traceback) <= 3, "tracebacks do not grow"
        assert stream.error is not None
        assert stream.error.__traceback__ is None, "nor are they kept"
    assert len({id(error) for error in raised}) == 9, "nor shared"
    assert not pair.client.connection.streams
    with pytest.raises(AssertionError):
        pair.client.connection.open(REQUEST, end=True)


# -- random interleavings -------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "write", "write", "read", "read", "move", "move", "pause", "end", "reset"]),
        st.booleans(),  # which end acts
        st.integers(0, 7),  # on which stream
        st.integers(0, 100_000),  # how much
    ),
    max_size=60,
)


class Run:
    """Random moves by both ends, with a book of what each wrote and read."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.streams: list[tuple[Stream, Stream]] = []
        self.wrote: dict[Stream, bytearray] = {}
        self.read: dict[Stream, bytearray] = {}
        self.clean: set[int] = set()

    def step(self, action: str, by_client: bool, which: int, amount: int) -> None:
        end = self.pair.client if by_client else self.pair.server
        if action == "open":
            if len(self.streams) < 8:
                self.add(self.pair.exchange())
        elif action == "move":
            self.pair.move(end, amount)
        elif action == "pause":
            end.connection.paused = not end.connection.paused
            end.connection.pump()
        elif self.streams:
            near, far = self.streams[which % len(self.streams)]
            self.act(action, end, *((near, far) if by_client else (far, near)), amount)

    def add(self, streams: tuple[Stream, Stream]) -> None:
        self.streams.append(streams)
        self.clean.add(streams[0].id)
        for stream in streams:
            self.wrote[stream] = bytearray()
            self.read[stream] = bytearray()

    def act(self, action: str, end: End, near: Stream, far: Stream, amount: int) -> None:
        writable = near.error is None and not near.sent_all and near.pending is None
        if action == "write" and writable:
            data = bytes((len(self.wrote[near]) + i) % 251 for i in range(amount % 3_000)) * (
                1 + amount // 3_000
            )
            self.wrote[near] += data
            end.write(near, data)
        elif action == "read":
            self.read[near] += near.read_nowait()
        elif action == "end" and writable:
            near.finish()
        elif action == "reset" and near.open:
            self.clean.discard(near.id)
            near.reset()

    def finish(self) -> None:
        """Everything is delivered and read."""
        progress = True
        while progress:
            self.pair.settle()
            progress = False
            for stream in itertools.chain.from_iterable(self.streams):
                data = stream.read_nowait()
                self.read[stream] += data
                progress |= bool(data)


@given(
    steps=steps,
    window=st.one_of(st.integers(1, 2_000), st.integers(2_000, 200_000)),
    connection_window=st.integers(limits.INITIAL_WINDOW_LEN, 200_000),
)
@settings(max_examples=100, deadline=None)
def test_bytes_in_are_bytes_out_and_no_credit_is_lost(
    steps: list[tuple[str, bool, int, int]], window: int, connection_window: int
) -> None:
    config = ConnectionConfig(stream_window_len=window, connection_window_len=connection_window)
    pair = Pair(config, config)
    run = Run(pair)
    for step in steps:
        run.step(*step)
        pair.check_laws()
    run.finish()
    pair.check_laws()
    for near, far in run.streams:
        for writer, reader in ((near, far), (far, near)):
            assert run.wrote[writer].startswith(run.read[reader])
            if near.id in run.clean:
                assert run.wrote[writer] == run.read[reader]
    for connection in (pair.client.connection, pair.server.connection):
        assert connection.phase is ConnectionPhase.OPEN
        assert all(stream.open for stream in connection.streams.values()), "what ended is kept nowhere"
        assert not connection._backlog
        assert not connection.to_flush
