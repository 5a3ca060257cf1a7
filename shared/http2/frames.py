"""Frames as bytes: splitting a byte stream into frames, and building the few that `h2` does not build.

`h2` parses and judges frames. It is fed through a `Splitter` because three things must happen before
it sees them: a frame that is too long is refused by its header, before it is buffered; GOAWAY is kept
from it (it would close its state machine, and the streams that GOAWAY promises to finish with it);
and the fast path takes the frames of streams for itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from shared.http2.connection_errors import ErrorCode, ProtocolViolation
from shared.http2.limits import CONTINUATION_COUNT_MAX, FRAME_LEN_MAX, HEADER_LIST_LEN_MAX

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_LEN: Final = 9
STREAM_ID_MAX: Final = 2**31 - 1
PRIORITY_LEN: Final = 5

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9
REPORT: Final = 0xF1
"""A frame type of ours (RFC 9113, 5.5), on stream 0: the id of a stream, and the server's report on it when
its handler has ended. With `OF_LOAD` the report is on the server's load, which has that stream's request in
it; the id is 0 where no request is meant. Sent only to a peer whose SETTINGS have `TAKES_REPORTS`."""
TAKES_REPORTS: Final = 0xF1F1

END_STREAM: Final = 0x1
OF_LOAD: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

_ORDERED: Final = frozenset({HEADERS, PUSH_PROMISE, CONTINUATION})
_HEADER: Final = struct.Struct(">HBBBL")  # length / 256, length % 256, type, flags, stream id
_SETTING: Final = struct.Struct(">HL")
_TWO_WORDS: Final = struct.Struct(">LL")

Frame = tuple[int, int, int, int, int]
"""Type, flags, stream id, offset of the header, offset behind the payload."""
FrameHandler = Callable[[int, int, bytes], bool]
"""A handler of one frame, with its flags, stream id and payload. It returns True when h2 must not see the
frame."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    length = len(payload)
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id) + payload


def data_header(stream_id: int, length: int, flags: int = 0) -> bytes:
    return _HEADER.pack(length >> 8, length & 0xFF, DATA, flags, stream_id)


def window_update(stream_id: int, increment: int) -> bytes:
    return _HEADER.pack(0, 4, WINDOW_UPDATE, 0, stream_id) + increment.to_bytes(4, "big")


def rst_stream(stream_id: int, code: int) -> bytes:
    return _HEADER.pack(0, 4, RST_STREAM, 0, stream_id) + code.to_bytes(4, "big")


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(code, value) for code, value in values.items()))


def ignore(_flags: int, _stream_id: int, _payload: bytes) -> bool:
    """A `FrameHandler` that drops the frame."""
    return True


def goaway(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, _TWO_WORDS.pack(last_stream_id, code) + debug)


def report(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    return frame(REPORT, flags, 0, stream_id.to_bytes(4, "big") + payload)


def parse_report(payload: bytes) -> tuple[int, bytes]:
    """The stream id and the payload of a REPORT. Raises ProtocolViolation."""
    if len(payload) < 4:
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "REPORT is too short")
    return int.from_bytes(payload[:4], "big"), payload[4:]


def unpadded(payload: bytes, flags: int) -> bytes:
    """The payload of DATA or HEADERS without padding (RFC 9113, 6.1). Raises ProtocolViolation."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a length")
    if payload[0] > len(payload) - 1:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def header_fragment(payload: bytes, flags: int, stream_id: int) -> bytes:
    """The part of a header block in HEADERS (RFC 9113, 6.2). Raises ProtocolViolation."""
    payload = unpadded(payload, flags)
    if not flags & PRIORITIZED:
        return payload
    if len(payload) < PRIORITY_LEN:
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its priority")
    if int.from_bytes(payload[:4], "big") & STREAM_ID_MAX == stream_id:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
    return payload[PRIORITY_LEN:]


def parse_goaway(payload: bytes) -> tuple[int, int]:
    """The last stream id and the error code of a GOAWAY. Raises ProtocolViolation."""
    if len(payload) < _TWO_WORDS.size:
        raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
    last_stream_id, code = _TWO_WORDS.unpack_from(payload)
    return last_stream_id & STREAM_ID_MAX, code


class Splitter:
    """Cuts a byte stream into whole frames and holds back the last, partial one.

    Holds at most one frame of FRAME_LEN_MAX plus what one read of the socket brought. Raises
    ProtocolViolation for a wrong preface, a first frame that is not SETTINGS, a frame that is too
    long, a header block that is interrupted or too long, and a push.
    """

    __slots__ = ("_block_frames", "_block_len", "_block_stream", "_greeted", "_partial", "_preface", "whole")

    def __init__(self, preface: bytes) -> None:
        self._preface = preface
        self._partial = b""
        self._greeted = False
        self._block_stream = 0  # the stream whose header block is open, 0 if none
        self._block_len = 0
        self._block_frames = 0
        self.whole = 0  # frames seen to their end; a header block counts as one

    @property
    def unfinished(self) -> bool:
        """True if the peer has begun the preface, a frame or a header block and not ended it."""
        return bool(self._partial or self._preface or self._block_stream)

    def feed(self, data: bytes) -> tuple[bytes, list[Frame]]:
        """Split what was received. Returns the bytes that the frames' offsets refer to, and the whole
        frames."""
        if self._partial:
            data = self._partial + data
        if self._preface:
            data = self._skip_preface(data)
        frames: list[Frame] = []
        start, size = 0, len(data)
        while size - start >= HEADER_LEN:
            high, low, kind, flags, stream_id = _HEADER.unpack_from(data, start)
            length = high << 8 | low
            if length > FRAME_LEN_MAX:
                raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            stop = start + HEADER_LEN + length
            if stop > size:
                break
            stream_id &= STREAM_ID_MAX
            if self._block_stream or kind in _ORDERED or not self._greeted:
                self._check_order(kind, flags, stream_id, length)
            frames.append((kind, flags, stream_id, start, stop))
            start = stop
        self._partial = data[start:] if start < size else b""
        self.whole += len(frames)
        return data, frames

    def _skip_preface(self, data: bytes) -> bytes:
        head = data[: len(self._preface)]
        if not self._preface.startswith(head):
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "not an HTTP/2 preface")
        self._preface = self._preface[len(head) :]
        return data[len(head) :]

    def _check_order(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        if not self._greeted:
            if kind != SETTINGS:
                raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._greeted = True
        if self._block_stream:
            if kind != CONTINUATION or stream_id != self._block_stream:
                raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
            self._block_frames += 1
            self._block_len += length
        elif kind == PUSH_PROMISE:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "push is off")
        elif kind == CONTINUATION:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        elif kind == HEADERS:
            self._block_stream, self._block_len, self._block_frames = stream_id, length, 0
        if self._block_len > HEADER_LIST_LEN_MAX or self._block_frames > CONTINUATION_COUNT_MAX:
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long")
        if kind in (HEADERS, CONTINUATION) and flags & END_HEADERS:
            self._block_stream = self._block_len = self._block_frames = 0
        elif self._block_stream:
            self.whole -= 1
