"""One sequence's drafts: what it could verify next, and what came of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from engine.core.drafts.ngrams import NGrams
from engine.core.drafts.price import FORCED, Acceptance, Sureness

PAUSE_MAX: Final = 16
"""The most tokens that pass from one look that finds nothing to the next."""


class Proposal(NamedTuple):
    """Tokens that are likely to follow, and the chance that each is right if those before it are."""

    tokens: list[int]
    chance: float
    kind: int
    is_probe: bool = False
    """True if one of them is to be tried, whatever the chance."""
    predicted: int = 0
    """The leading ones that the caller predicted, who is charged for those that are wrong."""
    why: Sequence[Sureness] = ()
    """Why each is drafted, where a grammar is followed. Empty: all were found likely."""


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

    @property
    def read_len(self) -> int:
        """The tokens that it has read in all: to read one takes time."""
        ...

    @property
    def has_read(self) -> bool:
        """True if it has read all that it was shown."""
        ...

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        """A proposal of what follows, `most` tokens at most, and none that ends the sequence. Reads what is
        new of the tokens, `read_max` at most."""
        ...

    def forced(self) -> Proposal:
        """The proposal as which tokens are offered that a grammar forces."""
        ...

    def take(self, draft: Proposal) -> None:
        """Note that some tokens of it are verified."""
        ...

    def pass_over(self) -> None:
        """Note that what was found is not worth its time."""
        ...

    def learn(self, drafts: int, right: int) -> int:
        """Learn how many of the drafts that were verified were right. Returns how many of them, the leading
        ones, the caller predicted."""
        ...


def before_end(tokens: list[int], stops: tuple[int, ...]) -> list[int]:
    """The tokens before the first that ends a sequence."""
    return next((tokens[:at] for at, token in enumerate(tokens) if token in stops), tokens)


class NGramDrafts:
    """Implements `Drafts` by what followed the newest tokens before."""

    __slots__ = ("_has_read", "_misses", "_ngrams", "_predicted", "_stops", "_verified", "_why", "acceptance")

    def __init__(self, len_max: int, stops: tuple[int, ...]) -> None:
        """`len_max`: the most tokens that the sequence may come to. `stops`: the tokens that end it."""
        self._ngrams: Final = NGrams(len_max)
        self.acceptance: Final = Acceptance()
        self._stops: Final = stops
        self._misses = 0
        self._has_read = True
        self._why: Sequence[Sureness] = ()
        self._verified = self._predicted = 0
        """The kind of the drafts that are being verified, and how many of them the caller predicted."""

    @property
    def size(self) -> int:
        return self._ngrams.size

    @property
    def read_len(self) -> int:
        return self._ngrams.known_len

    @property
    def has_read(self) -> bool:
        return self._has_read

    @property
    def pause(self) -> int:
        return min(1 << min(self._misses, PAUSE_MAX), PAUSE_MAX)

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        self._has_read = self._ngrams.extend(tokens, read_max) == len(tokens)
        if not self._has_read:
            return None
        found = self._ngrams.find(tokens, most)
        drafts = [] if found is None else before_end(found.tokens, self._stops)
        if found is None or not drafts:
            self._misses += 1
            return None
        kind = Acceptance.kind(found.matched)
        return Proposal(drafts, self.acceptance.chance(kind), kind, self.acceptance.is_probing)

    def forced(self) -> Proposal:
        return Proposal([], self.acceptance.chance(FORCED), FORCED)

    def take(self, draft: Proposal) -> None:
        self._verified, self._predicted, self._misses = draft.kind, draft.predicted, 0
        self._why = draft.why

    def pass_over(self) -> None:
        self._misses += 1
        self.acceptance.pass_over()

    def learn(self, drafts: int, right: int) -> int:
        if not self._why:
            self.acceptance.learn(self._verified, right, all_right=right == drafts)
        for kind, why in ((self._verified, Sureness.DRAFTED), (FORCED, Sureness.FORCED)) if self._why else ():
            own = self._why[:right].count(why)
            is_wrong = right < drafts and self._why[right] is why
            if own or is_wrong:  # what is sure says nothing
                self.acceptance.learn(kind, own, all_right=not is_wrong)
        return min(self._predicted, drafts)
