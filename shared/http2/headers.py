"""Header lists, between HTTP/2's rules, what the two ends use, and their bytes (RFC 7541).

Lists to send are checked before they reach HPACK: a bad header that is found half way through an encoded list
leaves the compression state of the connection different at its two ends.

Received lists are checked by RFC 9113, 8.2 and 8.3, when they come. A list is checked as a whole, not header
by header: names are joined by line ends, as none may hold one, and values by nothing. That takes a tenth of
the time.

Encoding. The encoder of the `hpack` package enters every header into a table that both ends keep, and
Huffman-codes it. On this hop most headers are ids that never come again: they push the few that do out of the
table, are searched for in vain, and cost 40 us a request. Here every header is a literal that enters no
table: 4 us, for some 200 bytes more on the wire, and no state that two ends could disagree on.

Decoding. A block of fields of the static table and literals without indexing and Huffman code depends on no
earlier block, and no later one depends on it: it is decoded here, in a fifth of the time. Any other block,
and every one that is not well-formed, is left to the `hpack` package, which keeps the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import chain, permutations
from operator import itemgetter
from typing import Final

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from shared.http2.connection_errors import ErrorCode, Http2Error, ProtocolViolation
from shared.http2.limits import HEADER_LIST_LEN_MAX, SENT_HEADER_LIST_LEN_MAX

HeaderList = list[tuple[bytes, bytes]]

CONNECTION_SPECIFIC: Final = frozenset(
    [b"connection", b"host", b"http2-settings", b"keep-alive", b"proxy-connection", b"te",
     b"transfer-encoding", b"upgrade"]
)  # fmt: skip
"""Headers for one HTTP/1.1 connection (RFC 9113, 8.2.2), which are not sent. `host` travels as
`:authority`."""

CONTENT_LENGTH_DIGITS: Final = 18  # an integer of one word, far above any real length
SENT_NAMES_MAX: Final = 256
RECEIVED_NAMES_MAX: Final = 256
"""Lists of names whose check is cached, each no longer than a header list may be."""
_NUL, _TAB, _LF, _CR, _SPACE = b"\0\t\n\r "
"""Bytes as numbers: Python finds a number in bytes ten times as fast as bytes, which it takes for a number
first."""
_FIRST: Final = itemgetter(0)
_SECOND: Final = itemgetter(1)
"""These turn pairs into columns. `zip(*pairs)` makes an iterator of each pair, and takes twice as long."""
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_NO_VALUE: Final = re.compile(rb"[\0\r\n]")


class BadHeader(Http2Error):
    """A header to send that HTTP/2 cannot carry. The value is not shown: it may be a secret."""


def header_list(pseudo: HeaderList, pairs: Sequence[tuple[bytes, bytes]]) -> HeaderList:
    """The header list of a message: `pseudo`, then `pairs` in lower case, stripped and without HTTP/1.1's own
    headers.

    A Host in `pairs` replaces an `:authority`, the last of `pseudo`. Raises BadHeader, also for a list so
    large that the peer might end the connection for it.
    """
    head = pseudo
    if pairs:
        names, host_at = _sent_names(tuple(map(_FIRST, pairs)))
        if names is None:
            head = [*pseudo, *pairs]
        else:
            if host_at is not None and pairs[host_at][1] and pseudo[-1][0] == b":authority":
                head = [*pseudo[:-1], (b":authority", pairs[host_at][1])]
            sent = zip(names, pairs, strict=True)
            head = head + [(name, value) for name, (_, value) in sent if name is not None]
    text = b"".join(chain.from_iterable(head))
    if _SPACE in text or _TAB in text:
        head = [(name, value.strip(b" \t")) for name, value in head]
    if _NUL in text or _CR in text or _LF in text:
        bad = next(name for name, value in head if _NO_VALUE.search(value))
        raise BadHeader(f"header {bad!r} cannot be sent")
    if len(text) + 32 * len(head) > SENT_HEADER_LIST_LEN_MAX:
        raise BadHeader(f"the headers are larger than {SENT_HEADER_LIST_LEN_MAX} bytes")
    return head


@lru_cache(maxsize=SENT_NAMES_MAX)
def _sent_names(raw_names: tuple[bytes, ...]) -> tuple[tuple[bytes | None, ...] | None, int | None]:
    """The names as they are sent, with None for HTTP/1.1's own, or None where all are sent as they are; and
    the index of the first Host, or None.

    Cached, because most messages have the same names. Raises BadHeader.
    """
    names = tuple(name.lower() for name in raw_names)
    for name, raw_name in zip(names, raw_names, strict=True):
        if not _NAME.fullmatch(name):
            raise BadHeader(f"header {raw_name!r} cannot be sent")
    host_at = names.index(b"host") if b"host" in names else None
    if names == raw_names and CONNECTION_SPECIFIC.isdisjoint(names):
        return None, None
    return tuple(None if name in CONNECTION_SPECIFIC else name for name in names), host_at


# -- received lists -------------------------------------------------------------------------------

_CONNECTION_FIELDS: Final = frozenset(
    [b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"]
)
_NAMES: Final = re.compile(rb"((?::[a-z]+\n)*)(?:[!-9;-@\[-~]+\n)*")
"""A list's names: pseudo-headers first, then visible ASCII without capitals and colons."""


def _orders(*names: bytes) -> set[bytes]:
    return {b"".join(b"%b\n" % name for name in order) for order in permutations(names)}


_STATUS: Final = b":status\n"
_CONNECT: Final = _orders(b":method", b":authority") | _orders(b":method")
_REQUEST: Final = _orders(b":method", b":scheme", b":path") | _orders(
    b":method", b":scheme", b":path", b":authority"
)


def _malformed(what: str) -> ProtocolViolation:
    """The error of a malformed message. Names and values are not shown: they may be secrets."""
    return ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"malformed message: {what}")


def _screened(head: HeaderList) -> bytes:
    """Check a received list. Returns the names of its pseudo-headers. Raises ProtocolViolation."""
    if not head:
        return b""
    pseudo, wrong, names_te = _judged(tuple(map(_FIRST, head)))
    if wrong:
        raise _malformed(wrong)
    values = [*map(_SECOND, head)]
    text = b"".join(values)
    if _NUL in text or _CR in text or _LF in text:
        raise _malformed("a forbidden character in a header's value")
    if [value.strip(b" \t") for value in values] != values:
        raise _malformed("space around a header's value")
    if names_te and any(name == b"te" and value.lower() != b"trailers" for name, value in head):
        raise _malformed("TE")
    return pseudo


@lru_cache(maxsize=RECEIVED_NAMES_MAX)
def _judged(names: tuple[bytes, ...]) -> tuple[bytes, str, bool]:
    """The names of the pseudo-headers, what is wrong with the list's names (empty if nothing), and whether TE
    is among them.

    Cached, because most messages have the same names.
    """
    listed = b"%b\n" % b"\n".join(names)
    matched = _NAMES.fullmatch(listed)
    if matched is None or listed.count(b"\n") != len(names):
        return b"", "a header's name, or the place of a pseudo-header", False
    wrong = "" if _CONNECTION_FIELDS.isdisjoint(names) else "a header of HTTP/1.1's"
    return matched[1], wrong, b"te" in names


def check_request(head: HeaderList) -> None:
    """Check a request's header list. Raises ProtocolViolation."""
    pseudo, values = _screened(head), dict(head)
    if pseudo not in (_CONNECT if values.get(b":method") == b"CONNECT" else _REQUEST):
        raise _malformed("a request's pseudo-headers")
    if values.get(b":path") == b"":
        raise _malformed("an empty path")
    authority, host = values.get(b":authority"), values.get(b"host")
    if host is None:
        if authority is None:
            raise _malformed("neither :authority nor Host")
    elif authority not in (None, host) or sum(name == b"host" for name, _ in head) > 1:
        raise _malformed("more than one host")


def check_response(head: HeaderList) -> bool:
    """Check a response's header list. Returns whether it is an interim response. Raises ProtocolViolation."""
    if _screened(head) != _STATUS:
        raise _malformed("a response's pseudo-headers")
    return check_status(head)


def check_status(head: HeaderList) -> bool:
    status = head[0][1]
    if len(status) != 3 or not status.isdigit() or status < b"100":
        raise _malformed("a status that is none")
    return status < b"200"


def check_trailers(head: HeaderList) -> None:
    """Check the header list of trailers. Raises ProtocolViolation."""
    if _screened(head):
        raise _malformed("pseudo-headers in trailers")


def content_length(head: HeaderList) -> int | None:
    """The declared length of the message; None when it declares none. Raises ProtocolViolation."""
    declared: bytes | None = None
    for name, value in head:
        if name == b"content-length":
            if not value.isdigit() or len(value) > CONTENT_LENGTH_DIGITS or declared not in (None, value):
                raise _malformed("content-length")
            declared = value
    return None if declared is None else int(declared)


class Headers(dict[str, str]):
    """A received header list without pseudo-headers, by names in small letters. Repeated fields are joined
    (RFC 9110, 5.3)."""

    __slots__ = ()

    def __init__(self, head: HeaderList) -> None:
        names, pseudo, is_repeated = _texts(tuple(map(_FIRST, head)))
        # no value holds a NUL, so all are decoded at once
        values = b"\0".join(map(_SECOND, head)).decode("latin-1").split("\0")
        if not is_repeated:
            super().__init__(zip(names[pseudo:], values[pseudo:]))  # noqa: B905 - an empty list is one empty text
        else:
            for name, value in zip(names[pseudo:], values[pseudo:], strict=True):
                before = f"{self[name]}{'; ' if name == 'cookie' else ', '}" if name in self else ""
                self[name] = before + value
        if ":authority" in names[:pseudo]:
            self.setdefault("host", values[names.index(":authority")])


@lru_cache(maxsize=RECEIVED_NAMES_MAX)
def _texts(names: tuple[bytes, ...]) -> tuple[tuple[str, ...], int, bool]:
    """A list's names as text, the number of pseudo-headers, which come first, and whether a name is there
    twice. Cached, because most messages have the same names."""
    pseudo = sum(name.startswith(b":") for name in names)
    return tuple(name.decode("latin-1") for name in names), pseudo, len(set(names)) < len(names)


# -- their bytes ----------------------------------------------------------------------------------


NAMES_MAX: Final = 1024

_STATIC: Final = tuple(HeaderTable.STATIC_TABLE)
_STATIC_FIELD_LEN_MAX: Final = max(len(name) + len(value) for name, value in _STATIC) + 32
_INDEX_BITS: Final = 0x0F
_LEN_BITS: Final = 0x7F
_LENS: Final = tuple(bytes((length,)) for length in range(_LEN_BITS))
"""Lengths that take one byte, each at its own index."""

_NO_TABLE: Final = b"\x20"
"""A change of the table's size to zero. Sent once, it fits every size that the peer may allow later."""
_INDEXED: Final = {pair: bytes([0x80 | at]) for at, pair in enumerate(_STATIC, 1) if pair[1]}
_PSEUDO: Final = frozenset(name for name, _ in _INDEXED if name.startswith(b":"))
_NAMED: Final = {name: at for at, (name, _) in reversed(list(enumerate(_STATIC, 1)))}


class LiteralEncoder:
    """An HPACK encoder without a table, with the interface that `h2` expects."""

    def __init__(self) -> None:
        self.header_table_size = 0
        """Set by `h2` when the peer's SETTINGS say so; without effect."""
        self._opening = _NO_TABLE

    def encode(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        parts, self._opening = [self._opening], b""
        for name, value in headers:
            # only pseudo-headers are ever equal to a whole field of the static table
            if name in _PSEUDO and (indexed := _INDEXED.get((name, value))) is not None:
                parts.append(indexed)
                continue
            length = len(value)
            parts.append(_names[name] if name in _names else _learned(name))
            parts.append(_LENS[length] if length < _LEN_BITS else _len(length))
            parts.append(value)
        return b"".join(parts)


_names: Final[dict[bytes, bytes]] = {}
"""A cache of encoded names: there are few of them, and every message has them."""


def _learned(name: bytes) -> bytes:
    index = _NAMED.get(name)
    encoded = b"\x00" + _len(len(name)) + name if index is None else _integer(0x00, 4, index)
    if len(_names) < NAMES_MAX:
        _names[name] = encoded
    return encoded


def _len(length: int) -> bytes:
    return _integer(0x00, 7, length)


def _integer(flags: int, prefix_len: int, value: int) -> bytes:
    """An integer by RFC 7541, section 5.1. `flags` are the bits beside the prefix."""
    most = (1 << prefix_len) - 1
    if value < most:
        return bytes((flags | value,))
    encoded, value = bytearray((flags | most,)), value - most
    while value >= 0x80:
        encoded.append(0x80 | value & 0x7F)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class BlockDecoder:
    """An HPACK decoder. Raises ProtocolViolation for a block that cannot be decoded or is too large."""

    def __init__(self) -> None:
        self._hpack = Decoder(max_header_list_size=HEADER_LIST_LEN_MAX)

    def decode(self, block: bytes) -> HeaderList:
        if (head := _stateless(block)) is not None:
            return head
        try:
            return [(name, value) for name, value in self._hpack.decode(block, raw=True)]
        except OversizedHeaderListError as error:
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, "a header list is too long") from error
        except HPACKError as error:
            raise ProtocolViolation(ErrorCode.COMPRESSION_ERROR, "a header block cannot be read") from error


def _stateless(block: bytes) -> HeaderList | None:
    """The block's header list. None if it is not well-formed, is large, or depends on the table."""
    read = BytesIO(block).read
    head: HeaderList = []
    length, value = 0, b""
    try:
        while byte := read(1):
            first = byte[0]
            if not first:
                length = read(1)[0]
                name = read(length if length < _LEN_BITS else _long(read, length))
            elif first > 0x80:
                head.append(_STATIC[first - 0x81])
                continue
            elif first >= 0x20:
                return None
            else:
                index = first & _INDEX_BITS
                if index == _INDEX_BITS:
                    index = _continued(read, index)
                name = _STATIC[index - 1][0] if index else read(_long(read, read(1)[0]))
            length = read(1)[0]
            if length >= _LEN_BITS:
                length = _long(read, length)
            value = read(length)
            head.append((name, value))
    except IndexError:  # also behind a name that is cut off
        return None
    fits = len(block) + len(head) * _STATIC_FIELD_LEN_MAX <= HEADER_LIST_LEN_MAX
    return head if fits and len(value) == length else None


def _long(read: Callable[[int], bytes], length: int) -> int:
    """The length of a string whose first byte is `length`. Raises IndexError, also for Huffman code."""
    if length > _LEN_BITS:
        raise IndexError
    return length if length < _LEN_BITS else _continued(read, length)


def _continued(read: Callable[[int], bytes], prefix: int) -> int:
    """An integer that its prefix does not hold (RFC 7541, 5.1). Raises IndexError."""
    low = read(1)[0]
    if low < 0x80:
        return prefix + low
    high = read(1)[0]
    if high >= 0x80:
        raise IndexError
    return prefix + (low & 0x7F) + (high << 7)
