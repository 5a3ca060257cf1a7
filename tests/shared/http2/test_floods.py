"""What costs a peer little and us much is refused; what an honest peer does is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.http2 import frames, limits
from shared.http2.connection import ConnectionPhase
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import ErrorCode, ProtocolViolation
from tests.effort import drawn
from tests.shared.http2.pair import REQUEST, RESPONSE, End

GREETING = frames.PREFACE + frames.settings({})
HEAD = b"\x82\x86\x84\x41\x06engine"
OPEN = frames.END_HEADERS
CODE = ErrorCode.CANCEL.to_bytes(4, "big")


@pytest.fixture
def server() -> End:
    end = End(client=False, config=ConnectionConfig())
    end.connection.receive(GREETING)
    end.connection.take_output()
    return end


def flood(server: End, make: Callable[[int], bytes], count: int) -> ProtocolViolation | None:
    """Sends `make(0)`, `make(1)`, ... until they are refused; our answers are read."""
    for i in range(count):
        try:
            server.connection.receive(make(i))
        except ProtocolViolation as violation:
            return violation
        server.connection.take_output()
    return None


def rapid_reset(i: int) -> bytes:
    stream_id = 2 * i + 1
    return frames.frame(frames.HEADERS, OPEN, stream_id, HEAD) + frames.frame(
        frames.RST_STREAM, 0, stream_id, CODE
    )


def made_reset(i: int) -> bytes:
    """The peer makes us reset: a window beyond its maximum."""
    stream_id = 2 * i + 1
    return frames.frame(frames.HEADERS, OPEN, stream_id, HEAD) + frames.window_update(
        stream_id, limits.WINDOW_LEN_MAX
    )


FLOODS: dict[str, Callable[[int], bytes]] = {
    "rapid reset": rapid_reset,
    "made reset": made_reset,
    "ping": lambda i: frames.frame(frames.PING, 0, 0, bytes(8)),
    "settings": lambda i: frames.settings({0x4: 65_535 + i % 2}),
    "priority": lambda i: frames.frame(frames.PRIORITY, 0, 2 * i + 1, bytes(5)),
    "unknown": lambda i: frames.frame(0x55, 0, 0, b"x"),
    "empty data": lambda i: (
        (frames.frame(frames.HEADERS, OPEN, 1, HEAD) if i == 0 else b"")
        + frames.frame(frames.DATA, 0, 1, b"")
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_refused(server: End, name: str) -> None:
    violation = flood(server, FLOODS[name], 10_000)
    assert violation is not None
    assert violation.code == ErrorCode.ENHANCE_YOUR_CALM
    assert server.connection.phase is ConnectionPhase.CLOSED
    assert violation.code.to_bytes(4, "big") in server.connection.take_output(), "GOAWAY says why"


def test_data_for_a_stream_that_has_ended_is_a_flood(server: End) -> None:
    """Each piece is answered by a reset."""
    server.connection.receive(frames.frame(frames.HEADERS, OPEN | frames.END_STREAM, 1, HEAD))
    server.connection.respond(server.opened[0], RESPONSE, end=True)
    violation = flood(server, lambda i: frames.frame(frames.DATA, 0, 1, b"x"), 10_000)
    assert violation is not None
    assert violation.code == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_the_same_frames_at_a_normal_rate_are_accepted(server: End, name: str) -> None:
    def slowly(i: int) -> bytes:
        server.now_s += 1.0
        return FLOODS[name](i)

    assert flood(server, slowly, 6_000) is None


def test_disconnects_of_all_clients_at_once_are_no_flood(server: End) -> None:
    assert flood(server, rapid_reset, 2 * limits.STREAMS_MAX) is None


def test_the_ids_of_streams_that_were_reset_are_kept_for_a_while_alone(
    server: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RESET_IDS_MAX", 8)
    assert flood(server, rapid_reset, 20) is None
    assert [*server.connection.reset_ids] == [2 * i + 1 for i in range(12, 20)]


def test_clients_that_do_nothing_but_leave_cost_the_others_of_their_gateway_no_stream(server: End) -> None:
    """A gateway with a core to itself passes on so many resets a second (0.37 ms of CPU for each)."""
    server.connection.receive(frames.frame(frames.HEADERS, OPEN, 1, HEAD))
    [victim] = server.opened

    def busily(i: int) -> bytes:
        server.now_s += 1 / 2_700
        return rapid_reset(i + 1)

    assert flood(server, busily, 4 * 2_700) is None
    assert server.connection.streams == {1: victim}
    assert victim not in server.closed


@pytest.mark.parametrize(
    ("piece_len", "pieces"),
    [
        (limits.FRAME_LEN_MAX, limits.HEADER_LIST_LEN_MAX // limits.FRAME_LEN_MAX + 1),
        (1, limits.CONTINUATION_COUNT_MAX + 2),
    ],
    ids=["length", "pieces"],
)
def test_a_header_block_is_bounded_in_length_and_in_pieces(server: End, piece_len: int, pieces: int) -> None:
    def block(i: int) -> bytes:
        return frames.frame(frames.CONTINUATION if i else frames.HEADERS, 0, 1, bytes(piece_len))

    violation = flood(server, block, pieces)
    assert violation is not None
    assert violation.code == ErrorCode.ENHANCE_YOUR_CALM


def test_a_compressed_header_list_is_bounded_by_its_real_length(server: End) -> None:
    """HPACK: one long value into the table, then repeated by one byte each."""
    value = b"v" * 4_000
    entry = b"\x40\x01n\x7f" + bytes([(4_000 - 127) % 128 + 128, (4_000 - 127) // 128]) + value
    bomb = HEAD + entry + b"\xbe" * 1_000
    with pytest.raises(ProtocolViolation) as caught:
        server.connection.receive(frames.frame(frames.HEADERS, OPEN, 1, bomb))
    assert caught.value.code == ErrorCode.ENHANCE_YOUR_CALM


def test_a_frame_that_is_too_long_is_refused_by_its_header(server: End) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        server.connection.receive(b"\x01\0\0\0\0\0\0\0\x01")
    assert caught.value.code == ErrorCode.FRAME_SIZE_ERROR


def test_a_peer_that_causes_answers_and_does_not_read_is_disconnected(
    server: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OUT_LEN_MAX", limits.OUT_LEN_MAX // 8)  # a tenth of a million frames is slow
    server.connection.paused = True

    answers = 0
    while server.connection.phase is not ConnectionPhase.CLOSED:
        server.now_s += 1.0
        answers += 1
        assert 17 * answers < 1.1 * limits.OUT_LEN_MAX
        with contextlib.suppress(ProtocolViolation):
            server.connection.receive(frames.frame(frames.PING, 0, 0, bytes(8)))
    assert "does not read" in str(server.connection.error)
    assert 17 * answers > limits.OUT_LEN_MAX


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\n\r\n", frames.PREFACE + frames.frame(frames.PING, 0, 0, bytes(8))]
)
def test_bytes_that_are_not_http_2_are_refused(first: bytes) -> None:
    end = End(client=False, config=ConnectionConfig())
    with pytest.raises(ProtocolViolation):
        end.connection.receive(first)


def test_frames_may_arrive_byte_by_byte(server: End) -> None:
    opening = frames.frame(frames.HEADERS, 0, 1, HEAD[:3]) + frames.frame(
        frames.CONTINUATION, frames.END_HEADERS, 1, HEAD[3:]
    )
    body = frames.frame(frames.DATA, 0, 1, b"abc") + frames.frame(frames.DATA, frames.END_STREAM, 1, b"def")
    for byte in opening + body:
        server.connection.receive(bytes([byte]))
    (stream,) = server.opened
    assert stream.read_nowait() == b"abcdef"
    assert stream.received_all
    assert not server.connection.unfinished


junk = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.one_of(st.sampled_from([0, 1, 4, 5, 8, 9, 0x20, 0x2D]), st.integers(0, 255)),
        st.sampled_from([0, 1, 1, 2, 3, 5, 2**31 - 1, 2**31 + 1]),
        st.one_of(
            st.sampled_from([b"", bytes(4), bytes(5), bytes(8), HEAD, b"\0\0\0\x01", b"\x88"]),
            st.binary(max_size=40),
        ),
    ),
    max_size=20,
)


@pytest.mark.parametrize("client", [False, True])
@given(junk=junk, cut=st.integers(0, 300))
@settings(max_examples=drawn(37, whole=750), deadline=None)
def test_random_bytes_are_accepted_or_raise_protocol_violation(
    client: bool, junk: list[tuple[int, int, int, bytes]], cut: int
) -> None:
    end = End(client=client, config=ConnectionConfig())
    end.connection.receive(frames.settings({0x3: 100}) if client else GREETING)
    if client:
        for _ in range(3):
            end.connection.open(REQUEST, end=False)
    data = b"".join(frames.frame(*one) for one in junk)
    with contextlib.suppress(ProtocolViolation):
        end.connection.receive(data[:cut])
        end.connection.receive(data[cut:])
    path = end.connection.path
    assert path.window >= 0
    for stream in end.connection.streams.values():
        assert 0 <= stream.buffered <= limits.STREAM_WINDOW_LEN
