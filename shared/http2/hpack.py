"""Header lists to bytes, without a compression table (RFC 7541, section 6.2.2).

The encoder of the `hpack` package enters every header into a table that both ends keep, and Huffman-codes it.
On this hop most headers are ids that never come again: they push the few that do out of the table, are
searched for in vain, and cost 40 us a request. Here every header is a literal that nobody remembers: 4 us,
for some 200 bytes more on the wire, and no state that two ends could disagree on.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from hpack.table import HeaderTable

NAMES_MAX: Final = 1024

_NO_TABLE: Final = b"\x20"
"""A change of the table's size, to zero. Said once, it fits every size that the peer may allow later."""
_INDEXED: Final = {pair: bytes([0x80 | at]) for at, pair in enumerate(HeaderTable.STATIC_TABLE, 1) if pair[1]}
_NAMED: Final = {name: at for at, (name, _) in reversed(list(enumerate(HeaderTable.STATIC_TABLE, 1)))}


class LiteralEncoder:
    """What `h2` needs of an encoder."""

    def __init__(self) -> None:
        self.header_table_size = 0
        """Set by `h2` when the peer's SETTINGS say so; of no consequence."""
        self._opening = _NO_TABLE

    def encode(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        opening, self._opening = self._opening, b""
        return opening + b"".join(
            [_INDEXED.get((name, value)) or _literal(name, value) for name, value in headers]
        )


def _literal(name: bytes, value: bytes) -> bytes:
    return _name(name) + _integer(0x00, 7, len(value)) + value


@lru_cache(maxsize=NAMES_MAX)
def _name(name: bytes) -> bytes:
    if (index := _NAMED.get(name)) is not None:
        return _integer(0x00, 4, index)
    return b"\x00" + _integer(0x00, 7, len(name)) + name


def _integer(flags: int, prefix_len: int, value: int) -> bytes:
    """RFC 7541, section 5.1. `flags` are the bits beside the prefix."""
    most = (1 << prefix_len) - 1
    if value < most:
        return bytes((flags | value,))
    encoded, value = bytearray((flags | most,)), value - most
    while value >= 0x80:
        encoded.append(0x80 | value & 0x7F)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
