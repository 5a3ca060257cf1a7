"""What a step costs: a model of the runner in four numbers, learned from its own steps.

    seconds = fixed + token * prompt tokens + row * decode rows + pair * (query, key) pairs

A runner pays `fixed` for reading its weights and launching its kernels, `token` for each prompt token's
matrix products, `row` for each sequence that decodes, and `pair` for attention: a token at position p
looks at p + 1 others. The scheduler asks the model two things: how long a prompt would take alone (its
*service*, which ranks the queue), and how long a chunk may be so that a step keeps to its target.

Learning is exponentially weighted least squares on *relative* errors, so that a decode of 2 ms counts
as much as a chunk of 200, with no coefficient below zero: after each step a few sweeps of coordinate
descent over the four normal equations (Franc, Hlavac and Navara, 2005). What recent steps say nothing
about keeps its last value, because the weights of the old ones fade together.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Final

FORGETTING: Final = 0.98
"""Weight of a step's news after one more step: the last fifty count."""
SWEEPS: Final = 3
OUTLIER: Final = 4.0
"""A step that took so many times its estimate is believed to have taken no longer than that."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the rows of one step compute together."""

    prompt_tokens: int = 0
    decode_rows: int = 0
    pairs: float = 0.0

    def with_row(self, position: int, length: int) -> Work:
        """One row more: it computes `length` tokens from `position` on."""
        pairs = self.pairs + length * (position + (length + 1) / 2)
        if length == 1:
            return Work(self.prompt_tokens, self.decode_rows + 1, pairs)
        return Work(self.prompt_tokens + length, self.decode_rows, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """All in seconds."""

    token_s: float = 1e-4
    row_s: float = 1e-4
    pair_s: float = 0.0
    fixed_s: float = 1e-3

    def __post_init__(self) -> None:
        assert min(self.token_s, self.row_s, self.pair_s, self.fixed_s) >= 0.0

    def seconds(self, work: Work) -> float:
        variable_s = self.token_s * work.prompt_tokens + self.row_s * work.decode_rows
        return self.fixed_s + variable_s + self.pair_s * work.pairs

    def service_s(self, prompt_len: int) -> float:
        """How long a prompt, or what the cache lacks of it, would take alone. Above zero."""
        return max(self.seconds(Work().with_row(0, max(2, prompt_len))), 1e-6)

    def tokens_within(self, room_s: float, position: int) -> int:
        """How many tokens from `position` on take no longer than `room_s` beside other rows."""
        if room_s <= 0.0:
            return 0
        linear, square = self.token_s + self.pair_s * (position + 0.5), self.pair_s / 2
        if linear + square <= 0.0:
            return 1 << 30
        root = math.sqrt(linear * linear + 4 * square * room_s)
        return min(1 << 30, int(2 * room_s / (linear + root)))


class CostLearner:
    def __init__(self, first_guess: StepCost | None = None) -> None:
        self.cost = first_guess or StepCost()
        self._has_learned = False
        self._matrix = [[0.0] * 4 for _ in range(4)]
        self._vector = [0.0] * 4

    def observe(self, work: Work, seconds: float) -> None:
        """A step of so much work took so long."""
        if seconds <= 0.0:
            return  # a clock too coarse to tell
        if self._has_learned:
            seconds = min(seconds, OUTLIER * self.cost.seconds(work))
        self._has_learned = True
        features = (float(work.prompt_tokens), float(work.decode_rows), work.pairs, 1.0)
        scaled = [feature / seconds for feature in features]
        for i, row in enumerate(self._matrix):
            self._vector[i] = FORGETTING * self._vector[i] + scaled[i]
            for j in range(4):
                row[j] = FORGETTING * row[j] + scaled[i] * scaled[j]
        self._descend()

    def _descend(self) -> None:
        weights = list(astuple(self.cost))
        for _ in range(SWEEPS):
            for i, row in enumerate(self._matrix):
                if row[i] < 1e-12:
                    continue  # never seen
                others = sum(row[j] * weights[j] for j in range(4)) - row[i] * weights[i]
                weights[i] = max(0.0, (self._vector[i] - others) / row[i])
        self.cost = StepCost(*weights)
