"""Heads of requests, beyond what aiohttp's parser does: where each ends in what a connection receives, and
the refusal of those that a proxy in front may read otherwise.

aiohttp's parser is given what was received in pieces that end behind a head, and parses.

A proxy's path rules, its routing by host and its framing must see the request that is served here. So there
is one spelling of a path, a host is a host, and a body has one of two framings. A target in absolute form
(`http://host/path`, RFC 9112 section 3.2.2) names the host of the header, and its path is spelled as any.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Final

from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage

from shared.wire.errors import InvalidRequest

HEAD_LEN_MAX: Final = 32 * 1024
"""Bytes of a request's line and headers together. The bounds of each add up to half a megabyte, which no
client needs, and which any client could send without a key."""
_HOST: Final = re.compile(r"[A-Za-z0-9._~-]*(:[0-9]{0,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{0,5})?")
_ABSOLUTE: Final = re.compile(r"(?P<scheme>[^/?#]*)://(?P<authority>[^/?#]*)")
"""The beginning of a target in absolute form, up to its path."""
HOSTS_MAX: Final = 64
"""The number of values of `host` whose check is cached: there are few of them."""
_SINGLE: Final = ("authorization", "x-api-key", "host", "content-encoding")
"""Headers that must not be repeated, because proxies and servers differ in which of them counts."""


@lru_cache(maxsize=HOSTS_MAX)
def _is_host(host: str) -> bool:
    return _HOST.fullmatch(host) is not None


def path_of(request: web.BaseRequest) -> str:
    """The path as it was sent, without the query. An escaped letter makes it another path."""
    raw = request.raw_path
    if not raw.startswith("/") and (found := _ABSOLUTE.match(raw)) is not None:
        raw = raw[found.end() :]
    return raw.partition("?")[0]


def host_of(request: web.BaseRequest) -> str:
    """The host that a request is sent to, without the port. Its head is sound (`check`)."""
    host = request.headers.get("host", "")
    return host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]


def is_address(host: str) -> bool:
    """True if it is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check(request: web.BaseRequest) -> None:
    """Check a request's head. Raises InvalidRequest."""
    headers = request.headers
    if sum(map(len, chain.from_iterable(request.raw_headers))) > HEAD_LEN_MAX:
        raise InvalidRequest("The request's headers are too large.")
    if request._version not in (HttpVersion10, HttpVersion11):  # `version` would keep what it returns
        request._version = HttpVersion11  # the answer's: aiohttp would repeat the one that it was sent
        raise InvalidRequest("The request's version must be HTTP/1.0 or HTTP/1.1.")
    if request.method == "CONNECT":  # aiohttp reads no body of it, so its body would be the next request
        raise InvalidRequest("This is no proxy: there is no CONNECT.")
    for name in _SINGLE:
        if len(headers.getall(name, ())) > 1:
            raise InvalidRequest(f"The header {name} is given more than once.", param=name)
    if not _is_host(headers.get("host", "")):
        raise InvalidRequest("The header host names no host.", param="host")
    if not request.raw_path.startswith("/"):
        _check_absolute(request.raw_path, headers.get("host"))
    if (coding := headers.get("transfer-encoding")) is not None and coding.lower() != "chunked":
        raise InvalidRequest("The only transfer-encoding is chunked.", param="transfer-encoding")


def _check_absolute(target: str, host: str | None) -> None:
    """Check a target that is no path. `host` is the header. Raises InvalidRequest."""
    if (found := _ABSOLUTE.match(target)) is None:
        return  # the asterisk of OPTIONS, which names nothing
    authority = found["authority"]
    if found["scheme"].lower() not in ("http", "https"):
        raise InvalidRequest("The request's target must be a path, or a URL with http or https.")
    if "@" in authority:
        raise InvalidRequest("The request's target must name no user.")
    if not _is_host(authority):
        raise InvalidRequest("The request's target names no host.")
    if host is not None and authority.lower() != host.lower():
        raise InvalidRequest("The request's target names another host than the header host.", param="host")


# -- where heads end ------------------------------------------------------------------------------


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
