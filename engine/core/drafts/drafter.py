"""One sequence's drafts: what it could verify next, and what came of it."""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple, Protocol

from engine.core.drafts.ngrams import NGrams
from engine.core.drafts.price import FORCED, Acceptance

PAUSE_MAX: Final = 16
"""The most tokens that pass from one look that finds nothing to the next."""


class Proposal(NamedTuple):
    """Tokens that are likely to follow, and the chance that each is right if those before it are."""

    tokens: list[int]
    chance: float
    kind: int
    is_probe: bool = False
    """True if one of them is to be tried, whatever the chance."""


class Drafts(Protocol):
    """Finds the drafts of one sequence."""

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        ...

    @property
    def pause(self) -> int:
        """The tokens that pass until the next look, behind one that found nothing, or nothing that pays."""
        ...

    read_len: int
    """The tokens that it has read."""

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        """What may follow, `most` tokens at most, and none that ends the sequence. Reads what is new of the
        tokens, `read_max` at most."""
        ...

    def forced(self) -> Proposal:
        """What to offer tokens as that a grammar forces."""
        ...

    def take(self, draft: Proposal) -> None:
        """Note that some tokens of it are verified."""
        ...

    def pass_over(self) -> None:
        """Note that what was found is not worth its time."""
        ...

    def learn(self, drafts: int, right: int) -> None:
        """Learn how many of the drafts that were verified were right."""
        ...


class NGramDrafts:
    """Implements `Drafts` by what followed the newest tokens before."""

    __slots__ = ("_acceptance", "_misses", "_ngrams", "_stops", "_verified", "read_len")

    def __init__(self, len_max: int, stops: tuple[int, ...]) -> None:
        """`len_max`: the most tokens that the sequence may come to. `stops`: the tokens that end it."""
        self._ngrams: Final = NGrams(len_max)
        self._acceptance: Final = Acceptance()
        self._stops: Final = stops
        self._misses = 0
        self.read_len = 0
        self._verified = 0
        """The kind of the drafts that are being verified."""

    @property
    def size(self) -> int:
        return self._ngrams.size

    @property
    def pause(self) -> int:
        return min(1 << min(self._misses, PAUSE_MAX), PAUSE_MAX)

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        self.read_len = self._ngrams.extend(tokens, read_max)
        if self.read_len < len(tokens):
            return None
        found = self._ngrams.find(tokens, most)
        drafts = [] if found is None else found.tokens
        for at, token in enumerate(drafts):
            if token in self._stops:
                del drafts[at:]
                break
        if found is None or not drafts:
            self._misses += 1
            return None
        kind = Acceptance.kind(found.matched)
        return Proposal(drafts, self._acceptance.chance(kind), kind, self._acceptance.is_probing)

    def forced(self) -> Proposal:
        return Proposal([], self._acceptance.chance(FORCED), FORCED)

    def take(self, draft: Proposal) -> None:
        self._verified, self._misses = draft.kind, 0

    def pass_over(self) -> None:
        self._misses += 1
        self._acceptance.pass_over()

    def learn(self, drafts: int, right: int) -> None:
        self._acceptance.learn(self._verified, right, all_right=right == drafts)
