"""The framing of HTTP/1.1 answers: where a head ends, and where its body. No I/O.

A gateway and an engine that read the same bytes differently would give one caller's answer to another. So
everything that may be read in two ways is an error: a length beside a transfer coding, two lengths, a coding
other than `chunked`, a folded or nameless header line, a bare CR or LF, a chunk's size with a sign, a space
or a prefix. After an error, and after bytes that follow an answer's end, the connection is not used again.

Bodies are taken a whole read at a time: what the chunks of a read hold is joined, and handed on as one piece.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol

from msgspec import Struct

from shared.http2.headers import HeaderList

HEAD_LEN_MAX: Final = 64 * 1024
HEAD_LINES_MAX: Final = 256
SIZE_LINE_LEN_MAX: Final = 256
"""Bytes of a chunk's size with its extensions."""
TRAILER_LEN_MAX: Final = 8 * 1024
HEAD_END: Final = b"\r\n\r\n"
_CRLF: Final = b"\r\n"
_LF: Final = b"\n"
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [^\0-\x08\x0a-\x1f\x7f]*)?")
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FORBIDDEN: Final = re.compile(rb"[\0\r\n]")
_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[^\0-\x08\x0a-\x1f\x7f]*)?")
_SIZES: Final = {form % size: size for size in range(1, 0x1000) for form in (b"%x\r\n", b"%X\r\n")}
"""The sizes that up to three digits tell, by their lines as these are mostly written."""
_SIZE_LEN_MAX: Final = 3
_KEPT: Final = re.compile(rb"(?:^|[ \t,;])timeout=([0-9]{1,6})(?![0-9])", re.IGNORECASE)
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")


class BadAnswer(Exception):
    """An answer that is not HTTP/1.1. Nothing of it is shown."""


class BodyFraming(Protocol):
    @property
    def is_done(self) -> bool: ...

    @property
    def ends_with_connection(self) -> bool:
        """True if the end of the connection may be its end."""
        ...

    @property
    def has_surplus(self) -> bool:
        """True if bytes came behind its end."""
        ...

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in what was read next. Raises BadAnswer."""
        ...

    def alone(self, data: bytes) -> int:
        """The index of the body's bytes in `data`, which was read next, if that is one whole chunk: they end
        before its last two. 0 for anything else."""
        ...


class Head(Struct, frozen=True):
    status: int
    headers: HeaderList
    """Names in lower case."""
    body: BodyFraming
    keeps_alive: bool
    """True if another request may follow the body on this connection."""


def parse_head(block: bytes, *, has_body: bool) -> Head:
    """The head in `block`, which ends before the empty line. `has_body` is False for an answer to HEAD.
    Raises BadAnswer."""
    first, *lines = block.split(_CRLF)
    matched = _STATUS.fullmatch(first)
    if matched is None:
        raise BadAnswer("the status line is malformed")
    if len(lines) > HEAD_LINES_MAX:
        raise BadAnswer("there are too many headers")
    is_current, status = matched[1] == b"1", int(matched[2])
    headers = [_field(line) for line in lines]
    body = _body_of(headers, is_current) if has_body and status not in (204, 304) else Sized(0)
    options = b",".join(_values(headers, b"connection")).lower()
    closes = not is_current or b"close" in options or body.ends_with_connection or status == 101
    return Head(status, headers, body, not closes)


def kept_s(headers: HeaderList) -> float | None:
    """The time for which the server keeps an unused connection, in seconds, by `Keep-Alive: timeout=`. None
    where it does not say."""
    for name, value in headers:
        if name == b"keep-alive" and (told := _KEPT.search(value)) is not None:
            return float(told[1])
    return None


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None or _FORBIDDEN.search(value) is not None:
        raise BadAnswer("a header is malformed")
    return name.lower(), value.strip(b" \t")


def _values(headers: HeaderList, wanted: bytes) -> Sequence[bytes]:
    return [value for name, value in headers if name == wanted]


def _body_of(headers: HeaderList, is_current: bool) -> BodyFraming:
    codings, lengths = _values(headers, b"transfer-encoding"), _values(headers, b"content-length")
    if codings:
        if lengths or not is_current or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise BadAnswer("the body's framing is not clear")
        return Chunked()
    if not lengths:
        return UntilClosed()
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise BadAnswer("the body's length is malformed")
    return Sized(int(lengths[0]))


class Sized:
    """A body of a length that is known."""

    __slots__ = ("_left", "has_surplus")
    ends_with_connection = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.has_surplus = False

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            self.has_surplus, data = True, data[: self._left]
        self._left -= len(data)
        return data

    def alone(self, data: bytes) -> int:
        return 0


class UntilClosed:
    """A body that ends with its connection."""

    __slots__ = ()
    ends_with_connection = True
    is_done = has_surplus = False

    def feed(self, data: bytes) -> bytes:
        return data

    def alone(self, data: bytes) -> int:
        return 0


class Chunked:
    """A body in chunks, each with its size before it, the last of which is empty."""

    __slots__ = (
        "_in_chunk", "_in_trailer", "_is_between", "_left", "_partial", "_trailer_len",
        "has_surplus", "is_done",
    )  # fmt: skip
    ends_with_connection = False

    def __init__(self) -> None:
        self.is_done = self.has_surplus = False
        self._left = 0  # of the chunk's bytes
        self._is_between = True  # a chunk's size comes next
        self._in_chunk = False  # until the line end behind it
        self._in_trailer = False
        self._trailer_len = 0
        self._partial = b""
        """The beginning of a line, or of a line end."""

    def alone(self, data: bytes) -> int:
        if not self._is_between:
            return 0
        start = data.find(_LF) + 1
        size = _SIZES.get(data[:start])
        return start if size is not None and len(data) == start + size + 2 and data.endswith(_CRLF) else 0

    def feed(self, data: bytes) -> bytes:
        if start := self.alone(data):
            return data[start:-2]  # an event alone in its chunk, as mostly
        if self._partial:
            data, self._partial = self._partial + data, b""
        piece = self._unframed(data)
        self._is_between = not (self._left or self._in_chunk or self._in_trailer or self._partial)
        return piece

    def _unframed(self, data: bytes) -> bytes:
        pieces: list[bytes] = []
        at = self._take_whole(data, pieces) if self._is_between else 0
        while not self.is_done:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            if self._in_chunk:
                if (end := data[at : at + 2]) != _CRLF:
                    self._wait(end, b"\r")
                    break
                at += 2
                self._in_chunk = False
            end_at = data.find(_CRLF, at)
            if end_at < 0:
                self._wait_for_line(data[at:])
                break
            self._take_line(data, at, end_at)
            at = end_at + 2
        self.has_surplus = at < len(data) and self.is_done
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @staticmethod
    def _take_whole(data: bytes, pieces: list[bytes]) -> int:
        """Take the whole chunks at the beginning of `data`. Returns the index behind them. What is not clear
        at a glance is left to the caller."""
        at = 0
        while True:
            start = data.find(_LF, at, at + _SIZE_LEN_MAX + 2) + 1
            size = _SIZES.get(data[at:start])
            if size is None:
                return at
            stop = start + size
            if data[stop : stop + 2] != _CRLF:
                return at
            pieces.append(data[start:stop])
            at = stop + 2

    def _wait(self, begun: bytes, allowed: bytes) -> None:
        if begun not in (b"", allowed):
            raise BadAnswer("a chunk does not end where it should")
        self._partial = begun

    def _wait_for_line(self, begun: bytes) -> None:
        if len(begun) > (TRAILER_LEN_MAX if self._in_trailer else SIZE_LINE_LEN_MAX):
            raise BadAnswer("a line of a chunk is too long")
        self._partial = begun

    def _take_line(self, data: bytes, at: int, end: int) -> None:
        if self._in_trailer:
            self._trailer_len += end - at
            if self._trailer_len > TRAILER_LEN_MAX:
                raise BadAnswer("the trailer is too long")
            if at == end:
                self.is_done = True
            else:
                _field(data[at:end])
            return
        if end - at > SIZE_LINE_LEN_MAX or (matched := _SIZE.fullmatch(data, at, end)) is None:
            raise BadAnswer("a chunk's size is malformed")
        self._left = int(matched[1], 16)
        self._in_chunk = self._left > 0
        self._in_trailer = self._left == 0
