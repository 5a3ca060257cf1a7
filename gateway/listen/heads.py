"""Heads of requests in what a connection receives: where each ends, and what is left of one that does not.

aiohttp's parser is given the pieces, and parses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from aiohttp import StreamReader
from aiohttp.http import RawRequestMessage

from gateway.client.hygiene import HEAD_LEN_MAX

AHEAD_MAX: Final = 8
"""Requests that a connection may send before the answer to the first; with more it is closed. No client of
this API does that, and a packet may hold thousands."""
HEAD_END: Final = b"\r\n\r\n"
_CONTENT_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: *(\d{1,12})\r\n")
"""The header as clients write it; other spellings only cost a second piece."""

Received = tuple[RawRequestMessage, StreamReader]
"""A request's head and its body, as aiohttp's parser gives them."""


def is_one_request(data: bytes) -> bool:
    """True if this is one request and nothing else, by the length that its head states: the usual packet."""
    end = data.find(HEAD_END, 0, HEAD_LEN_MAX) + len(HEAD_END)
    return end >= len(HEAD_END) and _behind(data, 0, end) == len(data)


def cut_behind_heads(data: bytes) -> list[bytes]:
    """The pieces of what was received, each ending behind a head, and the last one of what is left: aiohttp's
    parser drops the requests that it has read of a piece in which something malformed follows. The usual
    packet, one request with its body, is one piece. A head is looked for as far as one may go, behind the
    body of the one before where its length is stated, and no more are than may be sent ahead."""
    pieces: list[bytes] = []
    begin = at = 0
    for _ in range(AHEAD_MAX):
        end = data.find(HEAD_END, at, at + HEAD_LEN_MAX) + len(HEAD_END)
        if end < at + len(HEAD_END) or (at := _behind(data, at, end)) >= len(data):
            break
        pieces.append(data[begin:end])
        begin = end
    return [*pieces, data[begin:]]


def _behind(data: bytes, begin: int, end: int) -> int:
    """The place behind the request whose head lies there; behind its head alone if its body's length is not
    stated."""
    length = _CONTENT_LENGTH.search(data, begin, end) if end < len(data) else None
    return end if length is None else end + int(length[1])


def open_len(data: bytes, at: int | None, requests: Iterable[Received]) -> int:
    """The number of bytes at the end of what was received that belong to a head which is not complete.

    `at` is where the first head begins, behind the body before it; None if that was in chunks. `requests` are
    those whose heads ended here, with bodies that did, too. A head ends at the first empty line behind its
    beginning, and a body of stated length is as long as what came of it; chunks and a trailer end with an
    empty line, and nothing behind the last one of those is complete.
    """
    for message, body in requests:
        if at is None or message.chunked:
            at = None
            break
        at = data.find(HEAD_END, at) + len(HEAD_END) + body.total_bytes
    if at is None:
        at = data.rfind(HEAD_END) + len(HEAD_END)
    return max(0, len(data) - at)
