"""Lists of token ids as bytes. A list of Python's takes ten times the room, and time for each number."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

TOKENS: Final = "I"
"""Type code of the arrays that keep token ids: packed unsigned 32-bit integers."""
TOKEN_LEN: Final = 4
assert array(TOKENS).itemsize == TOKEN_LEN
VALUES: Final = "d"


def packed(ids: Sequence[int]) -> bytes:
    """Token ids, packed. Raises OverflowError for one that is none."""
    return array(TOKENS, ids).tobytes()


def unpacked(ids: bytes) -> array[int]:
    tokens = array(TOKENS)
    tokens.frombytes(ids)
    return tokens


class Biases(msgspec.Struct, array_like=True, frozen=True):
    """Pairs of a token id and the number that is added to its logit. A thousand take 12 KB, and not 121."""

    ids: bytes = b""
    values: bytes = b""

    @staticmethod
    def of(pairs: Iterable[tuple[int, float]]) -> Biases:
        ids, values = array(TOKENS), array(VALUES)
        for token_id, value in pairs:
            ids.append(token_id)
            values.append(value)
        return Biases(ids.tobytes(), values.tobytes())

    def __len__(self) -> int:
        return len(self.ids) // TOKEN_LEN

    def __iter__(self) -> Iterator[tuple[int, float]]:
        values = array(VALUES)
        values.frombytes(self.values)
        return zip(unpacked(self.ids), values, strict=True)
