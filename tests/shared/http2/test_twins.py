"""The two paths agree: on the same frames and the same calls they do, refuse and answer the same.

Frames are right, wrong, and at wrong places; header lists are well-formed, malformed, and encoded with and
without a compression table. Where the twins may differ is said once, in `answered` and `refused`.
"""

from __future__ import annotations

import struct
from typing import Any

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.http2 import connection as connections
from shared.http2 import frames, limits
from shared.http2.connection import Connection
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import ErrorCode, ProtocolViolation
from shared.http2.headers import HeaderList, LiteralEncoder
from shared.http2.stream import Stream
from tests.effort import drawn
from tests.shared.http2.pair import REQUEST, RESPONSE, End
from tests.shared.http2.plainpath import PlainConfig, path_of

Step = tuple[Any, ...]
"""What it is, and what that needs: `head`, `data` and `frame` come from the peer, a `call` is ours."""
WINDOW_LEN = 2_000
LISTS: list[HeaderList] = [
    REQUEST,
    RESPONSE,
    [*REQUEST, (b"content-length", b"5")],
    [*RESPONSE, (b"content-length", b"5"), (b"x-name", b"a value")],
    [(b":status", b"103"), (b"link", b"</style.css>")],
    [(b"x-checksum", b"1")],
    [],
]
FIELDS: list[tuple[bytes, bytes]] = [
    *REQUEST,
    *RESPONSE,
    *((b":method", method) for method in (b"GET", b"HEAD")),
    *((b":status", status) for status in (b"204", b"304", b"100", b"2000", b"abc", b"099", b"")),
    *((b"content-length", length) for length in (b"0", b"5", b"6", b"-1", b"5 ", b"", b"9" * 30)),
    *((b"te", value) for value in (b"trailers", b"gzip")),
    *((b"host", value) for value in (b"engine", b"other")),
    *((name, b"x") for name in (b"connection", b"transfer-encoding", b"upgrade", b"keep-alive")),
    *(
        (name, b"x")
        for name in (b"Capital", b"", b":", b":new", b"a:b", b"a b", b"a\nb", b"\xe9", b"a", b"a")
    ),
    *((b"x-value", value) for value in (b"", b" x", b"x\t", b"a\nb", b"a\rb", b"a\0b", b"a b\xff")),
    (b":path", b""),
    (b"cookie", b"a=1"),
    (b"cookie", b"b=2"),
    (b"x-long", b"v" * 300),
]

lists = st.one_of(
    st.sampled_from(LISTS),
    st.builds(lambda base, at, field: [*base[:at], field, *base[at:]],
              st.sampled_from(LISTS), st.integers(0, 6), st.sampled_from(FIELDS)),
    st.builds(lambda base, at: [*base[:at], *base[at + 1 :]], st.sampled_from(LISTS[:4]), st.integers(0, 5)),
    st.lists(st.sampled_from(FIELDS), max_size=7),
)  # fmt: skip
ids = st.sampled_from([1, 1, 1, 3, 3, 5, 7, 2, 0, 2**31 - 1])
tails = st.sampled_from([0, 0, frames.END_STREAM])
heads = st.tuples(
    st.just("head"), ids, lists, tails, st.sampled_from(["literal", "literal", "table"]), st.integers(0, 3)
)
data = st.tuples(
    st.just("data"), ids, st.sampled_from([0, 1, 5, 5, 6, 1_000, 1_500]), tails, st.integers(0, 9)
)
others = st.tuples(
    st.just("frame"),
    st.builds(
        frames.frame,
        st.sampled_from([0, 1, 2, 3, 3, 4, 5, 6, 8, 8, 9, 0x0A, 0x42]),
        st.sampled_from([0, 0, 1, 4, 5, 8, 0x20, 0x2D]),
        ids,
        st.one_of(
            st.sampled_from(
                [
                    b"",
                    bytes(4),
                    bytes(3),
                    bytes(5),
                    bytes(8),
                    b"\0\0\0\x01",
                    b"\x7f\xff\xff\xff",
                    b"\0\0\0\x07",
                ]
            ),
            st.binary(max_size=8),
        ),
    ),
)
values = st.sampled_from([0, 1, 100, 16_384, 65_535, 100_000])
told = st.dictionaries(st.sampled_from([1, 3, 4, 5, 6]), values, max_size=2)
sizes = st.tuples(st.just("frame"), st.builds(frames.settings, told))
calls = st.tuples(
    st.just("call"),
    st.sampled_from(["GET", "HEAD", "POST", "write", "finish", "reset", "take", "retire"]),
    st.integers(0, 3),
)
scripts = st.lists(st.one_of(heads, heads, data, others, sizes, calls, calls), max_size=25)


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams go beside `h2` or through it, as a connection's configuration says."""
    monkeypatch.setattr(connections, "FastPath", path_of)


class Encoders:
    """One step to the bytes of its frames. Made once, for both twins: the compression table is one."""

    def __init__(self) -> None:
        self.table, self.literal = hpack.Encoder(), LiteralEncoder()
        self.literal.encode([])  # which says that there is no table; here there is

    def head(self, stream_id: int, head: HeaderList, tail: int, how: str, shape: int) -> bytes:
        block = self.literal.encode(head) if how == "literal" else self.table.encode(head)
        flags, whole = tail, block
        if shape == 1:
            flags, whole = flags | frames.PADDED, b"\x04" + block + bytes(4)
        elif shape == 2:
            flags, whole = flags | frames.PRIORITIZED, struct.pack(">LB", 9, 15) + block
        elif shape == 3 and len(block) > 1:
            rest = frames.frame(frames.CONTINUATION, frames.END_HEADERS, stream_id, block[1:])
            return frames.frame(frames.HEADERS, flags, stream_id, block[:1]) + rest
        return frames.frame(frames.HEADERS, flags | frames.END_HEADERS, stream_id, whole)

    def frames_of(self, step: Step) -> bytes:
        kind, *rest = step
        if kind == "head":
            return self.head(*rest)
        if kind == "data":
            stream_id, length, tail, padding = rest
            payload = b"d" * length if padding < 8 else bytes([padding]) + b"d" * length + bytes(padding)
            return frames.frame(
                frames.DATA, tail | (frames.PADDED if padding >= 8 else 0), stream_id, payload
            )
        content: bytes = rest[0]
        return content


class Twin:
    """One end, and all that can be told of it from outside."""

    def __init__(self, *, client: bool, fast: bool) -> None:
        config = (ConnectionConfig if fast else PlainConfig)(
            stream_window_len=WINDOW_LEN, connection_window_len=limits.INITIAL_WINDOW_LEN
        )
        self.end = End(client=client, config=config)
        self.connection = self.end.connection
        self.refusal: int | None = None
        self.known: list[Stream] = []
        self.begun: set[Stream] = set()  # our message has its head
        self.connection.take_output()
        self.receive(frames.settings({0x3: 100}) if client else frames.PREFACE + frames.settings({}))

    def receive(self, content: bytes) -> None:
        try:
            self.connection.receive(content)
        except ProtocolViolation as violation:
            self.refusal = refused(violation.code)
        self.known += self.end.opened
        self.end.opened.clear()

    def call(self, what: str, which: int) -> None:
        connection = self.connection
        if what in ("GET", "HEAD", "POST"):
            if connection.client and connection.streams_room > 0:
                head = [(b":method", what.encode()), *REQUEST[1:]]
                self.known.append(connection.open(head, end=what != "POST"))
                self.begun.add(self.known[-1])
        elif what == "retire":
            connection.retire()
        elif self.known:
            self.act(what, self.known[which % len(self.known)])

    def act(self, what: str, stream: Stream) -> None:
        connection = self.connection
        if what == "reset":
            stream.reset()
        elif what == "take":
            stream.read_nowait()
        elif stream.error is None and stream not in self.begun:
            self.begun.add(stream)
            connection.respond(stream, RESPONSE, end=what == "finish")
        elif stream.error is None and not stream.sent_all and stream.pending is None:
            if what == "finish":
                stream.finish()
            else:
                stream.pending = stream.write_nowait(b"w" * 700)
                connection.enqueue(stream)

    def seen(self) -> dict[str, Any]:
        connection, path = self.connection, self.connection.path
        common = {"refusal": self.refusal, "phase": connection.phase, "room": connection.streams_room}
        if self.refusal is not None:
            return common | {"failed": [(one.id, type(one.error)) for one in self.known]}
        return common | {
            "streams": [seen(stream) for stream in self.known],
            "open": {one.id: path.stream_room(one) for one in connection.streams.values()},
            "windows": (path.window, path.uncredited, path.connection_room),
            "answers": answered(connection.take_output(), connection.reset_ids),
        }


def seen(stream: Stream) -> tuple[Any, ...]:
    error = None if stream.error is None else (type(stream.error), getattr(stream.error, "code", None))
    state = (stream.received_all, stream.sent_all, stream.buffered, stream.uncredited, stream.left)
    return stream.id, stream.head, *state, len(stream.pending or b""), error


def refused(code: ErrorCode) -> int:
    """The fast path names the RFC's codes more closely."""
    near = (ErrorCode.COMPRESSION_ERROR, ErrorCode.STREAM_CLOSED, ErrorCode.FRAME_SIZE_ERROR)
    return ErrorCode.PROTOCOL_ERROR if code in near else code


def answered(output: bytes, reset_ids: dict[int, None]) -> list[tuple[int, int, int, bytes]]:
    """The frames; but GOAWAY's message is an end's own, and h2 answers HEADERS for a stream that was reset by
    resetting it again, where RFC 9113, 5.1 would have them dropped."""
    output, whole = frames.Splitter(b"").feed(frames.settings({}) + output)
    told = [
        (kind, flags, stream_id, output[start + frames.HEADER_LEN : stop])
        for kind, flags, stream_id, start, stop in whole[1:]
    ]
    again = ErrorCode.STREAM_CLOSED.to_bytes(4, "big")
    return [
        one
        for one in told
        if one[0] != frames.GOAWAY
        and not (one[0] == frames.RST_STREAM and one[2] in reset_ids and one[3] == again)
    ]


def disputed(connection: Connection, step: Step, content: bytes) -> bool:
    """What h2 refuses and RFC 9113 does not: an interim response after the end, which is an error of its
    stream, a content-length in trailers, which means nothing, HEADERS of padding and nothing else, and
    WINDOW_UPDATE with its reserved bit set, which is ignored."""
    if (
        content[3:4] == bytes([frames.WINDOW_UPDATE])
        and content[frames.HEADER_LEN : frames.HEADER_LEN + 1] > b"\x7f"
    ):
        return True
    if content[3:4] == bytes([frames.HEADERS]) and content[4] & frames.PADDED:
        length = int.from_bytes(content[:3], "big")
        if length > 1 and content[frames.HEADER_LEN] == length - 1:
            return True
    stream = connection.streams.get(step[1]) if step[0] == "head" else None
    if stream is None or stream.head is None:
        return False
    if stream.received_all:
        return any(name == b":status" and value[:1] == b"1" for name, value in step[2])
    return any(name == b"content-length" for name, _ in step[2])


def check_agreement(client: bool, script: list[Step]) -> None:
    encoders = Encoders()
    fast, plain = Twin(client=client, fast=True), Twin(client=client, fast=False)
    for step in script:
        content = b"" if step[0] == "call" else encoders.frames_of(step)
        if disputed(fast.connection, step, content):
            continue
        for twin in (fast, plain):
            if step[0] == "call":
                twin.call(step[1], step[2])
            else:
                twin.receive(content)
        assert fast.seen() == plain.seen(), step
        if fast.refusal is not None:
            return


@pytest.mark.parametrize("client", [False, True], ids=["server", "client"])
@given(script=scripts)
@settings(max_examples=drawn(50, whole=1000), deadline=None)
def test_both_paths_agree_on_random_histories(client: bool, script: list[Step]) -> None:
    check_agreement(client, script)


def head(
    fields: HeaderList, tail: int = 0, *, how: str = "literal", shape: int = 0, stream_id: int = 1
) -> Step:
    return "head", stream_id, fields, tail, how, shape


def call(what: str) -> Step:
    return "call", what, 0


END = frames.END_STREAM
RESET: Step = ("frame", frames.rst_stream(1, ErrorCode.CANCEL))
SIZED = (b"content-length", b"5")
SERVER_STATES: list[list[Step]] = [
    [],
    [head(REQUEST, stream_id=3)],  # the first is closed by that
    [head(REQUEST)],
    [head([*REQUEST, SIZED])],
    [head(REQUEST, END)],
    [head(REQUEST), call("respond")],
    [head(REQUEST), call("finish")],
    [head(REQUEST, END), call("finish")],
    [head(REQUEST), call("reset")],
    [head(REQUEST), RESET],
]
CLIENT_STATES: list[list[Step]] = [
    [],
    *([call(what)] for what in ("POST", "GET", "HEAD")),
    *([call(what), head([*RESPONSE, *more])] for what in ("POST", "GET", "HEAD") for more in ([], [SIZED])),
    *([call(what), head(RESPONSE, END)] for what in ("POST", "GET")),
    [call("GET"), call("reset")],
    [call("POST"), RESET],
]
FRAMES: list[Step] = [
    *(head(fields, tail, how=how, shape=shape)
      for fields in LISTS for tail in (0, END) for how in ("literal", "table") for shape in range(4)),
    *(("data", 1, length, tail, padding) for length in (0, 5, 6) for tail in (0, END) for padding in (0, 8)),
    *(("frame", frames.window_update(1, step)) for step in (0, 1, limits.WINDOW_LEN_MAX)),
    *(("frame", frames.frame(kind, flags, 1, bytes(length)))
      for kind in range(11) for flags in (0, 0x2D) for length in (0, 1, 4, 5, 8)),
    *(("frame", frames.frame(frames.HEADERS, flags, 1, payload)) for flags in (0x0C, 0x24)
      for payload in (b"", b"\1", b"\2\x88\0", b"\xff\x88")),
    RESET,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("client", [False, True], ids=["server", "client"])
def test_both_paths_agree_on_every_frame_in_every_state(client: bool) -> None:
    """And on what comes after: the compression table is whole, and so are the windows."""
    own = RESPONSE if client else REQUEST
    after: list[Step] = [
        head(own, how="table", stream_id=1 if client else 5),
        ("frame", frames.frame(frames.PING, 0, 0, bytes(8))),
        ("data", 1, 1, END, 0),
    ]
    for state in CLIENT_STATES if client else SERVER_STATES:
        for frame in FRAMES:
            check_agreement(client, [*state, frame, *after])


@pytest.mark.parametrize("client", [False, True], ids=["server", "client"])
def test_both_paths_agree_on_every_header_at_every_place(client: bool) -> None:
    """Of a message, and of its trailers; and on every header that is missing."""
    own = RESPONSE if client else REQUEST
    state = [call("GET")] if client else []
    lists = [own[:at] + own[at + 1 :] for at in range(len(own))]
    lists += [[*own[:at], field, *own[at:]] for field in FIELDS for at in range(len(own) + 1)]
    lists += [[*own[:at], field, *own[at + 1 :]] for field in FIELDS for at in range(len(own))]
    for fields in lists:
        check_agreement(client, [*state, head(fields)])
    on_itself = frames.frame(frames.HEADERS, 0x24, 1, b"\0\0\0\1\x0f" + LiteralEncoder().encode(own))
    check_agreement(client, [*state, ("frame", on_itself)])
    for field in FIELDS:
        check_agreement(client, [*state, head(own), head([field], END)])
        check_agreement(client, [*state, head(own), head([(b"x-a", b"1"), field], END)])
