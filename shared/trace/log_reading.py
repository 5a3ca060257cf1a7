"""The completed lines of one request id, picked from logs with any other lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush, nlargest
from typing import BinaryIO, Final

import msgspec
from msgspec import Struct

from shared.wire.completed_line import EVENT, EngineLine, GatewayLine, Line
from shared.wire.undecodable import UNDECODABLE

LINE_LEN_MAX: Final = 64 * 1024
"""Bytes of the longest line that is read. A completed line has a few thousand at most."""
LINES_MAX: Final = 1000
"""The most completed lines that are kept. Callers may use an id as often as they like."""
ENGINES_EACH: Final = 8
"""Engines' lines that are kept for each of the slowest requests, until it is known which are theirs."""
_MARK: Final = f'"{EVENT}"'.encode()


class _Head(Struct):
    """The fields by which a completed line, its service and its request are recognised."""

    event: str = ""
    service: str = ""
    request_id: str = ""


_decode_head: Final = msgspec.json.Decoder(_Head).decode
_DECODE: Final[dict[str, Callable[[bytes], Line]]] = {
    "gateway": msgspec.json.Decoder(GatewayLine).decode,
    "engine": msgspec.json.Decoder(EngineLine).decode,
}


class DamagedLine(ValueError):
    """The error of a line that seems to be about the request, and fits no service's schema."""


class LogReading:
    """The completed lines found so far, in the order in which they were read."""

    def __init__(self, request_id: str) -> None:
        self.lines: list[Line] = []
        self.damaged = 0
        """The number of lines that name the request's end and could not be read."""
        self.left_out = 0
        """The number of lines that came after the first `LINES_MAX`."""
        self._request_id = request_id
        self._marks = (f'"{request_id}"'.encode(), f'"{EVENT}"'.encode())

    def read(self, log: BinaryIO) -> None:
        """Read a log to its end. Raises OSError."""
        for text in bounded_lines(log):
            if not all(mark in text for mark in self._marks):
                continue
            try:
                line = parse(text)
            except DamagedLine:
                self.damaged += 1
                continue
            if line is None or line.request_id != self._request_id:
                continue
            if len(self.lines) < LINES_MAX:
                self.lines.append(line)
            else:
                self.left_out += 1


class SlowestReading:
    """The completed lines of the slowest requests: the gateway's, and of engines those that are as slow."""

    def __init__(self, count: int) -> None:
        self.damaged = 0
        self._count = count
        self._heaps: dict[bool, list[tuple[float, int, Line]]] = {True: [], False: []}
        """The slowest lines, the fastest of them first, by whether they are the gateway's."""
        self._number = 0

    @property
    def lines(self) -> list[Line]:
        """The lines that were found: of engines only those of requests that are shown."""
        gateways = [line for _, _, line in self._heaps[True]]
        engines = [line for _, _, line in self._heaps[False]]
        if gateways:
            spans = {line.span_id for line in gateways}
            return gateways + [line for line in engines if line.parent_span_id in spans]
        return [line for _, _, line in nlargest(self._count, self._heaps[False])]

    def read(self, log: BinaryIO) -> None:
        """Read a log to its end. Raises OSError."""
        for text in bounded_lines(log):
            self.take(text)

    def take(self, text: bytes) -> None:
        """Take one line of a log."""
        if _MARK not in text:
            return
        try:
            line = parse(text)
        except DamagedLine:
            self.damaged += 1
            return
        if line is None:
            return
        is_gateways = isinstance(line, GatewayLine)
        heap, room = self._heaps[is_gateways], self._count if is_gateways else ENGINES_EACH * self._count
        self._number += 1
        heappush(heap, (line.total_ms, self._number, line))
        if len(heap) > room:
            heappop(heap)


class Tail:
    """The lines that are appended to a log file, as they come."""

    def __init__(self, log: BinaryIO) -> None:
        self._log = log
        self._rest = b""
        self._is_long = False

    def lines(self) -> Iterator[bytes]:
        """The lines that are whole by now. A line that grows too long is left out."""
        while piece := self._log.read(LINE_LEN_MAX):
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for line in whole:
                if not self._is_long:
                    yield line
                self._is_long = False
            if len(self._rest) > LINE_LEN_MAX:
                self._rest, self._is_long = b"", True


def bounded_lines(log: BinaryIO) -> Iterator[bytes]:
    """The lines of a log. Those of more than `LINE_LEN_MAX` bytes are left out, and never held as a whole."""
    is_long = False
    while piece := log.readline(LINE_LEN_MAX):
        is_whole = piece.endswith(b"\n") or len(piece) < LINE_LEN_MAX
        if is_whole and not is_long:
            yield piece
        is_long = not is_whole


def parse(text: bytes) -> Line | None:
    """The completed line in a line of a log; None when it is another one. A prefix before the JSON, as
    container runtimes write it, is skipped. Raises DamagedLine."""
    json = text[max(0, text.find(b"{")) :]
    try:
        head = _decode_head(json)
        if head.event != EVENT:
            return None
        decode = _DECODE.get(head.service)
        return decode(json) if decode is not None else None
    except UNDECODABLE as error:
        raise DamagedLine(str(error)) from None
