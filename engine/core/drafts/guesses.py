"""Drafts by the model's own MTP layer, which the runner computes (`engine.runtime.host.mtp`): whether a
sequence asks for them, and what came of them.

A plan asks for guesses behind the token that its step samples, as many as will pay: a guess takes time in
that step, and as a draft in the next (`engine.core.step.drafting`). They come with the step's result, and are
offered at the next plan as any draft is, unless the sequence's own tokens tell something likelier. While they
do, nothing is asked for. Where steps overlap, a token more may be known by then: if it is the first guess,
the others are offered.
"""

from __future__ import annotations

from array import array
from typing import Final

from engine.core.drafts.drafter import Drafts, Proposal, before_end
from engine.core.drafts.price import GUESSED, Acceptance


class GuessDrafts:
    """Implements `Drafts` by guesses, where another drafter finds nothing likelier."""

    __slots__ = (
        "_found_chance",
        "_guesses",
        "_known_len",
        "_looks_from",
        "_offers",
        "_other",
        "_stops",
        "_takes",
        "acceptance",
    )

    def __init__(self, other: Drafts, stops: tuple[int, ...]) -> None:
        """`stops`: the tokens that end the sequence."""
        self._other: Final = other
        self._stops: Final = stops
        self.acceptance: Final = Acceptance()
        self._guesses: list[int] = []
        self._known_len = -1
        """The tokens behind which they stand."""
        self._looks_from = 0
        """The tokens from which on the other drafter is to look."""
        self._found_chance = 0.0
        """The chance of what it found last; 0.0: nothing."""
        self._offers = self._takes = False
        """True if guesses were offered last; and if some are being verified."""

    @property
    def size(self) -> int:
        return self._other.size

    @property
    def read_len(self) -> int:
        return self._other.read_len

    @property
    def has_read(self) -> bool:
        return self._other.has_read

    @property
    def pause(self) -> int:
        return self._other.pause

    @property
    def chance(self) -> float:
        """The chance that a guess is right if those before it are."""
        return self.acceptance.chance(GUESSED)

    @property
    def asks(self) -> bool:
        """True if guesses are likelier than what the sequence's own tokens told last."""
        return self._found_chance < self.chance

    def hear(self, guesses: list[int], known_len: int) -> None:
        """Take guesses behind so many known tokens."""
        self._guesses, self._known_len = before_end(guesses, self._stops), known_len

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        found = None
        if self._looks_from <= len(tokens):
            found = self._other.look(tokens, most, read_max)
            self._found_chance = 0.0 if found is None else found.chance
            if found is None and self._other.has_read:
                self._looks_from = len(tokens) + self._other.pause
        passed = len(tokens) - self._known_len
        is_right = 0 <= passed < len(self._guesses) and [*tokens[self._known_len :]] == self._guesses[:passed]
        guesses = self._guesses[passed : passed + most] if is_right else []
        self._offers = bool(guesses) and self.asks
        if self._offers:
            return Proposal(guesses, self.chance, GUESSED)
        return found

    def forced(self) -> Proposal:
        return self._other.forced()

    def take(self, draft: Proposal) -> None:
        self._takes = draft.kind == GUESSED
        if not self._takes:
            self._other.take(draft)

    def pass_over(self) -> None:
        if self._offers:
            self.acceptance.pass_over()
        else:
            self._other.pass_over()

    def learn(self, drafts: int, right: int) -> int:
        if not self._takes:
            return self._other.learn(drafts, right)
        self.acceptance.learn(GUESSED, right, all_right=right == drafts)
        return 0
