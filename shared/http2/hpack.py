"""Header lists to bytes and back (RFC 7541), without a compression table where that is possible.

Encoding. The encoder of the `hpack` package enters every header into a table that both ends keep, and
Huffman-codes it. On this hop most headers are ids that never come again: they push the few that do out of the
table, are searched for in vain, and cost 40 us a request. Here every header is a literal that enters no
table: 4 us, for some 200 bytes more on the wire, and no state that two ends could disagree on.

Decoding. A block of fields of the static table and literals without indexing and Huffman code depends on no
earlier block, and no later one depends on it: it is decoded here, in a fifth of the time. Any other block,
and every one that is not well-formed, is left to the `hpack` package, which keeps the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Final

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from shared.http2.errors import ErrorCode, ProtocolViolation
from shared.http2.headers import HeaderList
from shared.http2.limits import HEADER_LIST_LEN_MAX

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
