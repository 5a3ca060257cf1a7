"""Finds what followed the last time that a sequence's newest tokens stood in it, prompt or answer.

Where each n-gram ended last is kept in a table by its hash. Of two that share a place the later one stays:
what is found is compared, so a collision loses a draft and makes no wrong one. The lengths of `LEVELS` are
tried in turn, the longest first.

Rules:

1. A table has two places or more for each token that the sequence may come to, 4 bytes each, and at most
   `PLACES_MAX`: of a longer sequence, what came later takes the places.
2. A token is put in once, when it is known which one follows: half a microsecond of the core's thread for
   both levels.
   What is not in yet, a prompt at first, is put in by parts (`extend`), and nothing is found before that is
   done. To find takes no longer in a longer sequence.
"""

from __future__ import annotations

from array import array
from itertools import islice, repeat
from typing import Final, NamedTuple

LEVELS: Final = (4, 2)
PLACES_MAX: Final = 1 << 18
PLACE_LEN: Final = 4
"""Bytes of a place."""
LONG: Final = 8
"""Tokens before the found place that are the newest ones in a long match."""


class Found(NamedTuple):
    """Tokens that are likely to follow."""

    tokens: list[int]
    matched: int
    """The number of newest tokens that stand before them, as far as it was looked at: one of `LEVELS`, or
    `LONG`."""


def places_for(length: int) -> int:
    """The places of a table for so many tokens (rule 1)."""
    return min(2 << max(5, (length - 1).bit_length()), PLACES_MAX)


class NGrams:
    """The n-grams of one sequence's tokens, which only grow."""

    __slots__ = ("_mask", "_tables", "known_len")

    def __init__(self, len_max: int) -> None:
        """`len_max`: the most tokens that the sequence may come to."""
        places = places_for(len_max)
        self._mask: Final = places - 1
        self._tables: Final = [array("I", bytes(PLACE_LEN * places)) for _ in LEVELS]
        self.known_len = 0
        """The leading tokens whose n-grams are known, as far as it is known what follows them."""

    @property
    def size(self) -> int:
        """Bytes of its tables."""
        return len(LEVELS) * PLACE_LEN * (self._mask + 1)

    def extend(self, tokens: array[int], most: int) -> int:
        """Put in what is new of the tokens, `most` of them at most. Returns how many are known now."""
        start = max(1, self.known_len)
        end = min(len(tokens), start + most)
        mask = self._mask
        for n, table in zip(LEVELS, self._tables, strict=True):
            first = max(start, n)
            if first < end:
                own = tokens[first - n : end - 1]
                behind = map(islice, repeat(own), range(n), repeat(None))  # each a token further on
                for at, key in enumerate(map(hash, zip(*behind)), first):  # noqa: B905
                    table[key & mask] = at
        self.known_len = end
        return end

    def find(self, tokens: array[int], most: int) -> Found | None:
        """The tokens that followed the newest ones last time, `most` at most, and again from their
        beginning where it reaches the end. None where they are new. All tokens must be known."""
        assert self.known_len == len(tokens)
        for n, table in zip(LEVELS, self._tables, strict=True):
            newest = tokens[-n:]
            at = table[hash(tuple(newest)) & self._mask]
            if at and len(newest) == n and tokens[at - n : at] == newest:
                is_long = at >= LONG and tokens[at - LONG : at] == tokens[-LONG:]
                drafts = tokens[at : at + most].tolist()
                while len(drafts) < most:
                    drafts += drafts[: most - len(drafts)]
                return Found(drafts, LONG if is_long else n)
        return None
