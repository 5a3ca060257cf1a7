"""What a step costs: a model of the runner in five numbers, learned from its own steps.

    seconds = fixed + token * prompt tokens + row * decode rows + pair * (query, key) pairs
            + page * pages copied to host memory or back

A runner pays `fixed` for reading its weights and launching its kernels, `token` for each prompt token's
matrix products, `row` for each sequence that decodes, and `pair` for attention: a token at position p
looks at p + 1 others. The scheduler asks the model three things: how long a prompt would take alone (its
*service*, which ranks the queue), how long a chunk may be so that a step keeps to its target, and whether
to copy a sequence's pages or to compute them again.

Learning is exponentially weighted least squares on *relative* errors, so that a decode of 2 ms counts
as much as a chunk of 200, with no coefficient below zero: after each step a few sweeps of coordinate
descent over the five normal equations (Franc, Hlavac and Navara, 2005). What recent steps say nothing
about keeps its last value, because the weights of the old ones fade together. Copies are rare and small
beside the noise of the steps that they are in: so what the runner measured of them as it warmed up counts
for ever, `PRIOR` times as much as a step that did nothing else. Hence a bad reading of a few steps, after
which nobody would copy any more, fades.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import mul
from typing import Final

FORGETTING: Final = 0.98
"""Weight of a step's news after one more step: the last fifty count."""
SWEEPS: Final = 3
PRIOR: Final = 0.1
OUTLIER: Final = 4.0
"""A step that took so many times its estimate is believed to have taken no longer than that."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the rows of one step compute together."""

    prompt_tokens: int = 0
    decode_rows: int = 0
    pairs: float = 0.0
    copied_pages: int = 0
    """To host memory, and from there."""

    def with_row(self, position: int, length: int) -> Work:
        """One row more: it computes `length` tokens from `position` on."""
        pairs = self.pairs + length * (position + (length + 1) / 2)
        if length == 1:
            return Work(self.prompt_tokens, self.decode_rows + 1, pairs, self.copied_pages)
        return Work(self.prompt_tokens + length, self.decode_rows, pairs, self.copied_pages)


@dataclass(frozen=True, slots=True)
class StepCost:
    """All in seconds."""

    token_s: float = 1e-4
    row_s: float = 1e-4
    pair_s: float = 0.0
    fixed_s: float = 1e-3
    page_s: float = 1e-4

    def __post_init__(self) -> None:
        assert min(self.token_s, self.row_s, self.pair_s, self.fixed_s, self.page_s) >= 0.0

    def seconds(self, work: Work) -> float:
        variable_s = self.token_s * work.prompt_tokens + self.row_s * work.decode_rows
        return self.fixed_s + variable_s + self.pair_s * work.pairs + self.page_s * work.copied_pages

    def service_s(self, prompt_len: int) -> float:
        """How long a prompt, or what the cache lacks of it, would take alone. Above zero."""
        length = max(2, prompt_len)
        pairs = length * ((length + 1) / 2)
        return max(self.fixed_s + self.token_s * length + self.pair_s * pairs, 1e-6)

    def chunk_s(self, position: int, length: int) -> float:
        """How much longer a step takes that computes so many prompt tokens from `position` on as well."""
        return self.token_s * length + self.pair_s * length * (position + (length + 1) / 2)

    def tokens_within(self, room_s: float, position: int) -> int:
        """How many tokens from `position` on take no longer than `room_s` beside other rows."""
        if room_s <= 0.0:
            return 0
        linear, square = self.token_s + self.pair_s * (position + 0.5), self.pair_s / 2
        if linear + square <= 0.0:
            return 1 << 30
        root = math.sqrt(linear * linear + 4 * square * room_s)
        return min(1 << 30, int(2 * room_s / (linear + root)))


COEFFICIENTS: Final = len(fields(StepCost))
PAGE: Final = [field.name for field in fields(StepCost)].index("page_s")


class CostLearner:
    def __init__(self, page_s: float = 0.0) -> None:
        """`page_s` is how long it takes to copy one page, as measured before; 0 when it was not."""
        self.cost = StepCost(page_s=page_s) if page_s else StepCost()
        self._has_learned = False
        self._matrix = [[0.0] * COEFFICIENTS for _ in range(COEFFICIENTS)]
        self._vector = [0.0] * COEFFICIENTS
        self._prior = (PRIOR / page_s, PRIOR / page_s**2) if page_s else (0.0, 0.0)
        """What it adds to the vector and to the matrix."""

    def observe(self, work: Work, seconds: float) -> None:
        """A step of so much work took so long."""
        if seconds <= 0.0:
            return  # a clock too coarse to tell
        estimate_s = self.cost.seconds(work)
        if self._has_learned and estimate_s > 0.0:
            seconds = min(seconds, OUTLIER * estimate_s)
        self._has_learned = True
        features = (work.prompt_tokens, work.decode_rows, work.pairs, 1, work.copied_pages)
        scaled = [feature / seconds for feature in features]
        self._vector = [FORGETTING * old + new for old, new in zip(self._vector, scaled, strict=True)]
        self._matrix = [
            [FORGETTING * old + new * other for old, other in zip(row, scaled, strict=True)]
            for row, new in zip(self._matrix, scaled, strict=True)
        ]
        self._descend()

    def _descend(self) -> None:
        cost = self.cost
        weights = [cost.token_s, cost.row_s, cost.pair_s, cost.fixed_s, cost.page_s]
        for _ in range(SWEEPS):
            for i, row in enumerate(self._matrix):
                prior, prior_square = self._prior if i == PAGE else (0.0, 0.0)
                square = row[i] + prior_square
                if square < 1e-12:
                    continue  # never seen
                others = sum(map(mul, row, weights)) - row[i] * weights[i]
                weights[i] = max(0.0, (self._vector[i] + prior - others) / square)
        self.cost = StepCost(*weights)
