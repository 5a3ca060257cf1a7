"""Grammars without llguidance: what a fake one allows depends on all tokens before, so that a mask of another
sequence, or of an earlier token, changes the tokens from there on.

A grammar's text is its number. It allows about two tokens in three, is complete after some tokens or never,
and may fail; by `BAD` it cannot be compiled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final
from zlib import crc32

from engine.core.grammars.masks import Filled, MatcherStanding, is_allowed

BAD: Final = "bad"
END: Final = 0
"""The only token behind a complete answer."""
FILL_S: Final = 0.0001


@dataclass(slots=True)
class FakeMatcher:
    grammar: str
    vocab_size: int
    past: int = 0
    """A digest of the tokens so far."""
    length: int = 0
    is_failed: bool = False

    @property
    def standing(self) -> MatcherStanding:
        drawn = hash((crc32(self.grammar.encode()), self.past, self.length))
        if self.grammar == BAD or self.is_failed or (self.length and drawn % 61 == 0):
            return MatcherStanding.FAILED
        return MatcherStanding.COMPLETE if self.length and drawn % 17 == 0 else MatcherStanding.GOES_ON

    @property
    def mask(self) -> bytes:
        match self.standing:
            case MatcherStanding.FAILED:
                return b""
            case MatcherStanding.COMPLETE:
                return mask_of(range(END, END + 1), self.vocab_size)
            case MatcherStanding.GOES_ON:
                return two_in_three(hash((crc32(self.grammar.encode()), self.past)) % 3, self.vocab_size)

    def take(self, token: int) -> None:
        self.is_failed = self.standing is MatcherStanding.FAILED or not is_allowed(self.mask, token)
        self.past, self.length = hash((self.past, token)), self.length + 1


def mask_of(allowed: Iterable[int], vocab_size: int) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(4 * -(-vocab_size // 32), "little")


@cache
def two_in_three(phase: int, vocab_size: int) -> bytes:
    return mask_of((token for token in range(vocab_size) if token % 3 != phase), vocab_size)


class FakeGrammars:
    """Implements `engine.core.grammars.masks.Grammars`: masks come some time after they were asked for."""

    def __init__(
        self, now: Callable[[], float], vocab_size: int, fill_s: Callable[[int], float] = lambda handle: 0.0
    ) -> None:
        """`fill_s`: the time that the next mask of a sequence takes, by handle."""
        self._now = now
        self._vocab_size = vocab_size
        self._fill_s = fill_s
        self.matchers: dict[int, FakeMatcher] = {}
        self._drafts: dict[int, Sequence[int]] = {}
        self._coming: dict[int, float] = {}
        """The time at which the next mask of a sequence is there, by handle."""
        self.waits_s: list[float] = []

    def open(self, handle: int, grammar: str, tenant: str) -> None:
        assert handle not in self.matchers, "opened twice"
        self.matchers[handle] = FakeMatcher(grammar, self._vocab_size)
        self._coming[handle] = self._now() + self._fill_s(handle)

    def advance(self, tokens: Iterable[tuple[int, int]], drafts: Mapping[int, Sequence[int]] = {}) -> None:
        fresh = set[int]()
        for handle, token in tokens:
            assert handle in fresh or handle not in self._coming, "a token without its mask"
            assert self.matchers[handle].standing is MatcherStanding.GOES_ON or handle not in fresh
            fresh.add(handle)
            self.matchers[handle].take(token)
            self._coming[handle] = self._now() + self._fill_s(handle)
            self._drafts[handle] = drafts.get(handle, ())

    def _foreseen(self, handle: int) -> tuple[list[int], list[bytes]]:
        """The drafts that the grammar allows, and the mask behind each."""
        matcher, taken, ahead = replace(self.matchers[handle]), list[int](), list[bytes]()
        for token in self._drafts.pop(handle, ()):
            if matcher.standing is not MatcherStanding.GOES_ON or not is_allowed(matcher.mask, token):
                break
            matcher.take(token)
            if matcher.standing is not MatcherStanding.GOES_ON:
                break
            taken.append(token)
            ahead.append(matcher.mask)
        return taken, ahead

    def close(self, handle: int) -> None:
        del self.matchers[handle]
        self._coming.pop(handle, None)

    def take_filled(self) -> list[Filled]:
        due = [handle for handle, at in self._coming.items() if at <= self._now()]
        filled = []
        for handle in due:
            del self._coming[handle]
            matcher = self.matchers[handle]
            filled.append(Filled(handle, matcher.mask, matcher.standing, FILL_S, *self._foreseen(handle)))
        return filled

    def wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)

    @property
    def next_at(self) -> float:
        """The time at which the next mask is there; infinite where none is coming."""
        return min(self._coming.values(), default=math.inf)


def random_delays(rng: random.Random) -> Callable[[int], float]:
    """Most masks are there at once; some take a few steps."""
    return lambda handle: rng.choice((0.0, 0.0, 0.0, 0.003, 0.03))
