"""Server-sent events, as both services write and read them. No I/O.

The engine ends every stream with a comment that the gateway does not pass on:

    data: {...}\\n\\n  data: {...}\\n\\n  data: [DONE]\\n\\n  : penstock {json}\\n\\n

(`[DONE]` is the last event of a whole answer in one dialect of streams; others have another.) The gateway
relays bytes and parses no event. `TailScanner` finds the comment under these rules:

1. A comment counts only as the very last thing on the stream, and only at an event boundary (at the
   start, or after an empty line). JSON has no raw newline, so no payload can forge a boundary.
2. Whatever the chunking, the bytes forwarded are the stream's events without the comment, in order.
3. What is forwarded ends at a boundary, so that an error event can be appended at any moment: the beginning
   of an event is withheld until its end comes. It is dropped when that never comes, as a client would do.
4. At most `EVENT_LEN_MAX` bytes are withheld. A longer event is forwarded as it comes, and nothing can be
   appended within it.
5. A chunk of whole events, none of which may be the comment, comes back as the same object: no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shared.wire.causes import CAUSES_MAX, Cause, Count
from shared.wire.envelope import event_envelope
from shared.wire.errors import ApiError
from shared.wire.load_report import LoadReport
from shared.wire.shapes import USED_TOKENS_MAX
from shared.wire.undecodable import UNDECODABLE

DONE: Final = b"data: [DONE]\n\n"
CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
CLOSING_HEADER: Final = "x-penstock-closing"
"""The header that has the closing's JSON on answers that are not streams."""
CLOSING_LEN_MAX: Final = 4096
EVENT_LEN_MAX: Final = 64 * 1024
"""The bytes of an event that are withheld at most until it is whole."""

KEEPALIVE: Final = b": keep-alive\n\n"
"""A comment for clients and proxies that take silence for the end; readers of events skip it."""
LINE_LEN_MAX: Final = 16 * 1024 * 1024

_BOUNDARY: Final = b"\n\n"
_LF: Final = b"\n"
_DATA: Final = b"data:"
_EVENT: Final = b"event: "
_NAMED_LINES: Final = 3
"""The lines of an event with a name: that, its data, and an empty one."""
_COMMENT: Final = b": penstock "
_MAY_CONTINUE: Final = (b":", b"\n:")
"""The beginnings of a chunk that continues a boundary at the end of the chunk before, and may begin a
comment."""
assert len(_COMMENT) < CLOSING_LEN_MAX < EVENT_LEN_MAX


UsedTokens = Annotated[int, Meta(ge=0, le=USED_TOKENS_MAX)]


class Closing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine's report at the end of every answer. Most of it is zero, and left out on the wire."""

    end_reason: str
    prompt_tokens: UsedTokens = 0
    completion_tokens: UsedTokens = 0
    cached_tokens: UsedTokens = 0
    """Prompt tokens that were found in the prefix cache, in any tier."""
    host_tokens: UsedTokens = 0
    """The part of them that came back from host memory."""
    disk_tokens: UsedTokens = 0
    """The part that came from disk."""
    reasoning_tokens: UsedTokens = 0
    """The part of `completion_tokens` that is reasoning."""
    calls: Count = 0
    """Calls of functions in the answers."""
    drafted_tokens: UsedTokens = 0
    """Tokens that were guessed and verified beside others."""
    accepted_tokens: UsedTokens = 0
    """The part of them that was right: so many steps were saved."""
    accepted_prediction_tokens: UsedTokens = 0
    """Tokens of the answers that their caller had predicted, and that were tried as such."""
    rejected_prediction_tokens: UsedTokens = 0
    """The part of `completion_tokens` that was tried as predicted, and is in no answer."""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    preempted_ms: float = 0.0
    preemptions: Count = 0
    swaps: Count = 0
    """The preemptions after which the pages were kept in host memory."""
    stalled_ms: float = 0.0
    """The time for which the request was paused, because the client was behind in reading."""
    edge_ms: float = 0.0
    """This and the following are the engine's stages before the core."""
    body_ms: float = 0.0
    validate_ms: float = 0.0
    tokenize_ms: float = 0.0
    grammar_ms: float = 0.0
    masks_ms: float = 0.0
    """The time that the core took for grammars and masks, beside the steps: no stage."""
    handover_ms: float = 0.0
    """The time that the ways between the engine's processes took."""
    first_byte_ms: float = 0.0
    """The time from the request's headers to the answer's first byte, at the engine; 0.0: there was none."""
    causes: Annotated[tuple[Cause, ...], Meta(max_length=CAUSES_MAX)] = ()
    load: LoadReport | msgspec.UnsetType = msgspec.UNSET
    """The engine's load, at the end of a stream alone."""


_decode_closing = msgspec.json.Decoder(Closing).decode
_encode_closing = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One event with `data`, which is JSON and so holds no newline."""
    return b"data: " + data + _BOUNDARY


def named_event(name: bytes, data: bytes) -> bytes:
    """One event of this name, as `event` makes one without."""
    return b"event: " + name + b"\ndata: " + data + _BOUNDARY


def error_event(error: ApiError, request_id: str = "") -> bytes:
    """The event that ends a stream which fails after its first byte; no `[DONE]` follows it."""
    return event(event_envelope(error, request_id))


def encode_closing(closing: Closing) -> bytes:
    """The closing as JSON, for the header of a unary answer."""
    return _encode_closing(closing)


def parse_closing(data: bytes | str) -> Closing | None:
    """The closing in `data`. None when it is not one: the answer came from an engine of another make, or its
    numbers are out of all bounds."""
    try:
        return _decode_closing(data)
    except UNDECODABLE:
        return None


def closing_comment(closing: Closing, load: LoadReport | None = None) -> bytes:
    if load is not None:
        closing = msgspec.structs.replace(closing, load=load)
    comment = _COMMENT + encode_closing(closing) + _BOUNDARY
    assert len(comment) <= CLOSING_LEN_MAX
    return comment


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream without their ends, which are LF or CRLF and nothing else: the other line ends of
    `str.splitlines`, such as U+2028, may stand unescaped in JSON. Raises ValueError for a line of more than
    `LINE_LEN_MAX` bytes."""
    rest = bytearray()
    for chunk in chunks:
        start, searched = 0, len(rest)
        rest += chunk
        while (end := rest.find(b"\n", max(start, searched))) >= 0:
            yield bytes(rest[start:end]).removesuffix(b"\r")
            start = end + 1
        del rest[:start]
        if len(rest) > LINE_LEN_MAX:
            raise ValueError(f"a line of more than {LINE_LEN_MAX} bytes")
    if rest:
        yield bytes(rest)


class TailScanner:
    """A scanner of a stream's chunks: it returns the bytes to forward, and keeps the closing comment."""

    __slots__ = ("_end", "_held", "_tail")

    def __init__(self, done: bytes = DONE) -> None:
        """`done` is the last event of a whole answer."""
        self._end = _BOUNDARY + done
        self._held = b""
        """The bytes that are not forwarded: they start at a boundary, and are the beginning of an event, or
        may be the comment."""
        self._tail = _BOUNDARY
        """The last bytes that were forwarded. The start of a stream counts as a boundary."""

    def takes(self, event: bytes) -> bool:
        """Take a chunk that is one event, of one line of data, and may be forwarded as it is: nearly every
        chunk. Returns False, and takes nothing, of any other, which is for `feed`."""
        length, room = len(event), len(self._end)
        if (  # slices, and a search for one byte: the methods for beginnings and ends cost twice as much
            event[:5] != _DATA
            or event[-2:] != _BOUNDARY
            or event.find(_LF) != length - 2
            or length < room
            or self._held
        ):
            return False
        self._tail = event[-room:]
        return True

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that may be forwarded at once: `chunk` itself, less or more than it, or none."""
        data = self._held + chunk if self._held else chunk
        if data.endswith(_BOUNDARY) and data.find(b"\n\n:") < 0 and not data.startswith(_MAY_CONTINUE):
            self._held, forward = b"", data
        else:
            end = self._forwarded_end(data)
            self._held, forward = data[end:], data[:end]
        room = len(self._end)
        self._tail = forward[-room:] if len(forward) >= room else (self._tail + forward)[-room:]
        return forward

    def finish(self) -> bytes:
        """The whole events that were withheld and turned out to be no closing comment, at the end of the
        stream."""
        if self.closing is not None:
            return b""
        rest, self._held = self._held, b""
        rest = rest[: self._boundary_end(rest)]
        self._tail = (self._tail + rest)[-len(self._end) :]
        return rest

    @property
    def closing(self) -> Closing | None:
        """The comment, if the stream ends here. None without one."""
        return parse_closing(self._held[len(_COMMENT) :]) if self._held.endswith(_BOUNDARY) else None

    @property
    def saw_done(self) -> bool:
        """True if the last event forwarded was the one that ends a whole answer."""
        return self._tail == self._end

    @property
    def at_boundary(self) -> bool:
        """True if the forwarded bytes end a whole event, so that another may be appended."""
        return self._tail.endswith(_BOUNDARY)

    def _forwarded_end(self, data: bytes) -> int:
        """The index in `data` up to which it may be forwarded."""
        if (start := self._comment_start(data)) is not None:
            return start
        end = self._boundary_end(data)
        return end if len(data) - end <= EVENT_LEN_MAX else len(data)

    def _boundary_end(self, data: bytes) -> int:
        """The index in `data` behind its last boundary. 0 without one."""
        if (at := data.rfind(_BOUNDARY)) >= 0:
            return at + len(_BOUNDARY)
        return int(data.startswith(b"\n") and self._tail.endswith(b"\n"))

    def _comment_start(self, data: bytes) -> int | None:
        """The index in `data` at which the comment begins: only behind the last boundary that a colon
        follows. None when there is no such place."""
        at = data.rfind(b"\n\n:")
        if at >= 0:
            start = at + 2
        elif data.startswith(b":") and self._tail.endswith(_BOUNDARY):
            start = 0
        elif data.startswith(b"\n:") and self._tail.endswith(b"\n"):
            start = 1
        else:
            return None
        return start if _may_be_comment(data[start : start + CLOSING_LEN_MAX + 1]) else None


class NamedScanner(TailScanner):
    """The scanner of a stream whose events have names: two lines each."""

    __slots__ = ("_hot", "_hot_len", "_silent")

    def __init__(self, done: bytes, hot: bytes, silent: tuple[bytes, ...] = ()) -> None:
        """`hot` is the beginning of nearly every event, which tells of the answer; `silent` are those of
        events that begin so and do not."""
        super().__init__(done)
        self._hot = hot
        self._hot_len = len(hot)
        self._silent = silent

    def takes(self, event: bytes) -> bool:
        """Take a chunk that is one event which begins as nearly all do. Returns False, and takes nothing, of
        any other, which is for `feed`."""
        room = len(self._end)
        if (
            event[: self._hot_len] != self._hot
            or event[-2:] != _BOUNDARY
            or event.count(_LF) != 3
            or len(event) < room
            or self._held
            or (self._silent and event.startswith(self._silent))
        ):
            return False
        self._tail = event[-room:]
        return True


def _may_be_comment(data: bytes) -> bool:
    """True if `data`, the end of all bytes so far, is the comment or a beginning of it."""
    if not data.startswith(_COMMENT):
        return _COMMENT.startswith(data)
    rest = data.partition(b"\n")[2]
    return len(data) <= CLOSING_LEN_MAX and rest in (b"", b"\n")
