"""The time that a step takes: a model of the runner in six numbers, learned from its own steps.

    seconds = fixed + token * prompt tokens + row * decode rows + pair * (query, key) pairs of prompts
            + context * tokens whose keys are read + page * pages copied to host memory or back

A runner pays `fixed` for reading its weights and launching its kernels, `token` for each prompt token's
matrix products and `row` for each sequence that decodes. Attention costs twice: every row, whether a
decode or a chunk, reads the keys and values of its `context` once, and a chunk multiplies each of its
tokens with all before it, a `pair` each. (A decode has one pair for each token that it reads: its
`context` stands for both.) Far into a long prompt a short chunk spends most of its time on this reading;
without a coefficient of its own, the time would be ascribed to the decodes beside it. The scheduler asks the
model three things: how long a prompt would take alone (its *service*, which ranks the queue), how long a
chunk may be so that a step keeps to its target, and whether to copy a sequence's pages or to compute them
again.

Learning is exponentially weighted least squares on *relative* errors, so that a decode of 2 ms counts
as much as a chunk of 200, with no coefficient below zero (`engine.core.least_squares`). What recent steps
say nothing about keeps its last value. Copies are rare and small beside the noise of the steps that they
are in: so the time of a copy that the runner measured as it warmed up counts for ever, `PRIOR` times as much
as a step that only copies. Without it, a few bad readings could put an end to swapping, and with that to
readings that correct them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

from engine.core.least_squares import nonnegative

FORGETTING: Final = 0.98
"""The weight of an observation after one more step: about the last fifty steps count."""
UNSOLVED_MAX: Final = 16
"""Observations after which the coefficients are solved for although they were not asked for."""
PRIOR: Final = 0.1
"""The weight of the measured copy time, in observations of a step that only copies."""
OUTLIER: Final = 4.0
"""The multiple of its estimate at which a step's time is cut before the model learns from it."""


def _pairs(position: int, length: int) -> float:
    """(query, key) pairs of a chunk of `length` tokens from `position` on, each with itself and all
    before."""
    return length * (position + (length + 1) / 2)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of all rows of one step together."""

    prompt_tokens: int = 0
    decode_rows: int = 0
    pairs: float = 0.0
    """(query, key) pairs of prompt tokens, each with itself and all before it."""
    context_tokens: int = 0
    """Tokens whose keys and values are read, counted once for each row that reads them."""
    copied_pages: int = 0
    """Pages copied to host memory and back."""

    @classmethod
    def of(cls, positions: Sequence[int], lengths: Sequence[int], copied_pages: int = 0) -> Work:
        """The work of rows of which row i computes `lengths[i]` tokens from `positions[i]` on; a row of one
        token counts as a decode."""
        chunks = [row for row in zip(positions, lengths, strict=True) if row[1] != 1]
        return cls(
            prompt_tokens=sum([length for _, length in chunks]),
            decode_rows=len(lengths) - len(chunks),
            pairs=sum([_pairs(position, length) for position, length in chunks]),
            context_tokens=sum(positions) + sum(lengths),
            copied_pages=copied_pages,
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """The model's six coefficients, in seconds."""

    token_s: float = 1e-4
    row_s: float = 1e-4
    pair_s: float = 0.0
    context_s: float = 0.0
    fixed_s: float = 1e-3
    page_s: float = 1e-4

    def __post_init__(self) -> None:
        rates = (self.token_s, self.row_s, self.pair_s, self.context_s, self.fixed_s, self.page_s)
        assert min(rates) >= 0.0

    def seconds(self, work: Work) -> float:
        rows_s = self.token_s * work.prompt_tokens + self.row_s * work.decode_rows
        attention_s = self.pair_s * work.pairs + self.context_s * work.context_tokens
        return self.fixed_s + rows_s + attention_s + self.page_s * work.copied_pages

    def service_s(self, prompt_len: int) -> float:
        """The time that `prompt_len` tokens of a prompt would take alone, in seconds; above zero."""
        return max(self.fixed_s + self.chunk_s(0, max(2, prompt_len)), 1e-6)

    def chunk_s(self, position: int, length: int) -> float:
        """The time that a chunk of `length` prompt tokens from `position` on adds to a step, in seconds."""
        attention_s = self.pair_s * _pairs(position, length) + self.context_s * (position + length)
        return self.token_s * length + attention_s

    def tokens_within(self, budget_s: float, position: int) -> int:
        """The length of the longest chunk from `position` on that adds at most `budget_s` to a step."""
        budget_s -= self.context_s * position
        if budget_s <= 0.0:
            return 0
        linear = self.token_s + self.context_s + self.pair_s * (position + 0.5)
        square = self.pair_s / 2
        if linear + square <= 0.0:
            return 1 << 30
        root = math.sqrt(linear * linear + 4 * square * budget_s)
        return min(1 << 30, int(2 * budget_s / (linear + root)))


COEFFICIENTS: Final = [field.name for field in fields(StepCost)]
PAGE: Final = COEFFICIENTS.index("page_s")


class CostLearner:
    """Learns the cost of a step from the steps that were made."""

    def __init__(self, page_s: float = 0.0) -> None:
        """`page_s` is the measured time to copy one page, in seconds; 0.0 when it was not measured."""
        self._cost = StepCost(page_s=page_s) if page_s else StepCost()
        self._equations = [[0.0] * (len(COEFFICIENTS) + 1) for _ in COEFFICIENTS]
        self._prior = (PRIOR / page_s**2, PRIOR / page_s) if page_s else (0.0, 0.0)
        """The terms that the measured copy time adds to both sides of the equation of `page_s`."""
        self._has_learned = False
        self._unsolved = 0

    @property
    def cost(self) -> StepCost:
        """The learned cost. It is solved for when it is asked for, which steps of decodes alone do not."""
        if self._unsolved:
            self._solve()
        return self._cost

    def forecast_s(self, work: Work) -> float:
        """The time that a step with this work takes by the cost that was solved for last, in seconds; 0.0
        before the first observation."""
        return self._cost.seconds(work) if self._has_learned else 0.0

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that did `work` in `seconds`."""
        if seconds <= 0.0:
            return  # a clock too coarse to tell
        if self._has_learned and seconds > OUTLIER * self._cost.seconds(work):
            seconds = min(seconds, OUTLIER * self.cost.seconds(work)) or seconds
        self._has_learned = True
        features = (
            work.prompt_tokens,
            work.decode_rows,
            work.pairs,
            work.context_tokens,
            1,
            work.copied_pages,
        )
        scaled = [feature / seconds for feature in features]
        sides = [*scaled, 1.0]
        self._equations = [
            [FORGETTING * old + new * side for old, side in zip(row, sides, strict=True)]
            for row, new in zip(self._equations, scaled, strict=True)
        ]
        self._unsolved += 1
        if self._unsolved == UNSOLVED_MAX:
            self._solve()

    def _solve(self) -> None:
        self._unsolved = 0
        cost, (left, right) = self._cost, self._prior
        last = [cost.token_s, cost.row_s, cost.pair_s, cost.context_s, cost.fixed_s, cost.page_s]
        equations = [row.copy() for row in self._equations]
        equations[PAGE][PAGE] += left
        equations[PAGE][-1] += right
        self._cost = StepCost(*nonnegative(equations, last))
