"""Drafts by whoever knows the answer: a stated share of them is right."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.core.drafts.drafter import Proposal


@dataclass(slots=True)
class FakeDrafts:
    """Implements `engine.core.drafts.drafter.Drafts`."""

    answer: Sequence[int]
    """All tokens of the sequence, prompt and output."""
    stops: Collection[int]
    vocab_size: int
    right_share: float
    rng: random.Random
    size: int = 1
    pause: int = 1
    read_len: int = 0
    has_read: bool = True
    verified: int = 0
    right: int = 0
    left: int = 0
    """The tokens that its caller predicts and that may still be wrong; what it drafts meanwhile is the
    caller's."""
    predicted: int = 0
    """The tokens of the draft that are."""

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        self.read_len = len(tokens)
        assert self.answer[: len(tokens)] == tokens.tolist()
        most = min(most, self.left) if self.left else most
        drafts: list[int] = []
        for at in range(len(tokens), len(tokens) + self.rng.randint(0, most)):
            is_right = at < len(self.answer) and self.rng.random() < self.right_share
            token = self.answer[at] if is_right else self.rng.randrange(self.vocab_size)
            if token in self.stops:
                break
            drafts.append(token)
        predicted = len(drafts) if self.left else 0
        return Proposal(drafts, 0.98, 0, predicted=predicted) if drafts else None

    def forced(self) -> Proposal:
        return Proposal([], 0.98, 0)

    def take(self, draft: Proposal) -> None:
        self.predicted = draft.predicted

    def pass_over(self) -> None:
        """Nothing: they are offered again."""

    def learn(self, drafts: int, right: int) -> int:
        self.verified += drafts
        self.right += right
        predicted = min(self.predicted, drafts)
        self.left -= max(0, predicted - right)
        return predicted
