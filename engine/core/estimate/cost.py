"""The time that a step takes: a model of runner and host in eight numbers, seven of which are learned from
their own steps.

    seconds = fixed + token * prompt tokens + row * decode rows + pair * (query, key) pairs of prompts
            + context * tokens whose keys are read + page * pages copied to host memory or back
            + score * prompt tokens whose log-probabilities are asked for + seat * admitted sequences

A runner pays `fixed` for reading its weights and launching its kernels, `token` for each prompt token's
matrix products and `row` for each sequence that decodes. The host pays `seat` for each sequence that it
admits: its prefix is looked up, its pages are taken, its tokens and page table are handed over. Attention
costs twice: every row, whether a decode or a chunk, reads the keys and values of its `context` once, and a
chunk multiplies each of its tokens with all before it, a `pair` each. (A decode has one pair for each token
that it reads: its `context` stands for both. A draft that it verifies takes what another row does, but for
reading the context: a `row`, and a `pair` each.) Far into a long prompt a short chunk spends most of its time
on this reading; without a coefficient of its own, the time would be ascribed to the decodes beside it. The
scheduler asks the model three things: how long a prompt would take alone (its *service*, which ranks the
queue), how long a chunk may be so that a step keeps to its target, and whether to copy a sequence's pages or
to compute them again.

Learning is exponentially weighted least squares on *relative* errors, so that a decode of 2 ms counts
as much as a chunk of 200, with no coefficient below zero.

*What steps cannot tell apart.* A learned prediction can be right while every coefficient is wrong: the chunks
of a long prompt have all about the same length, and so the price of a token, that of a chunk and that of the
decodes beside it move together. The prediction then fails for the first step of another shape. So learning
begins with what the runner measured while it warmed up, steps of shapes chosen to tell the coefficients apart
(`TimedStep`), and these count for ever: each as much as `WARMUP_WEIGHT` of a step of today, beside some fifty
of these. What today's steps determine, they decide; in what they leave open, the measured shapes do. A
machine that others use as well is slower now than it was then, in every shape alike: so the measured times
are taken as many times as long as steps take now by comparison (`_slowdown`).

What a step cannot tell at all is not learned: copies are small beside the noise of the steps that they are
in, and `page` is what the runner measured as it warmed up. (`score` and `seat` stay learned: a warm-up knows
neither the lists that are asked for nor what the host does for an admission, and a flood of requests of one
token is bounded by the latter, `engine.core.estimate.pace`.)

*Its error.* The model keeps, of the last `ERRORS` steps with prompts, by how much each took longer than it
was estimated to, before it learned from it; steps that took less count as 0, since they break no promise.
`error` is the quantile `QUANTILE` of that, since a gap target is a promise about the 99th percentile. Few
steps cannot show such a quantile: it would be the largest error among them, and one step during which the
host did something else would halve the chunks of hundreds. So it is estimated from their mean, as for errors
with an exponential tail, whose quantile q is ln(1 / (1 - q)) times the mean.

The solver. Given normal equations `A w = b` (A is the sum of x x^T over the rows x, b that of x y), the
weights are those that minimise

    sum of (x w - y)^2  +  DAMPING * sum of A_ii (w_i - last_i)^2,    all w_i >= 0

which is a step of the proximal point method from the last solution (Rockafellar, 1976). What the
equations determine is found in a few steps; where they say little or nothing, the last solution stands.
Coordinate descent needs no elimination, but where features hardly vary apart from each other, as those
of a step's decodes do, it takes thousands of sweeps, and until then one weight stands for another.
A weight that comes out negative is set to zero and the others are found again without it. The next
solution begins with all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from operator import mul
from typing import Final

from engine.contract.messages import TimedStep

# -- the solver -----------------------------------------------------------------------------------


DAMPING: Final = 1e-3
NEGLIGIBLE: Final = 1e-6
"""The root of a feature's summed squares up to which it counts as never seen."""


def nonnegative(equations: Sequence[Sequence[float]], last: Sequence[float]) -> list[float]:
    """The weights; row i of `equations` is row i of A followed by b_i. A feature that was never seen keeps
    its last weight."""
    scales = [math.sqrt(row[i]) for i, row in enumerate(equations)]
    weights = list(last)
    free = [i for i, scale in enumerate(scales) if scale > NEGLIGIBLE]
    held = [i for i, scale in enumerate(scales) if scale <= NEGLIGIBLE]
    while free:
        system: list[list[float]] = []
        for i in free:  # scaled so that A has ones on its diagonal
            *row, right = equations[i]
            right -= sum([row[j] * weights[j] for j in held])
            left = [row[j] / (scales[i] * scales[j]) for j in free]
            left[len(system)] += DAMPING
            system.append([*left, right / scales[i] + DAMPING * scales[i] * last[i]])
        solution = eliminate(system)
        for i, scaled in zip(free, solution, strict=True):
            weights[i] = max(0.0, scaled / scales[i])
        if min(solution) >= 0.0:
            break
        free = [i for i in free if weights[i] > 0.0]
    return weights


def eliminate(system: list[list[float]]) -> list[float]:
    """The solution of a linear system: rows of a positive definite matrix, each followed by its right side.
    Destroys `system`."""
    for i, pivot in enumerate(system):
        for row in system[i + 1 :]:
            factor = row[i] / pivot[i]
            row[i:] = [value - factor * other for value, other in zip(row[i:], pivot[i:], strict=True)]
    solution: list[float] = []
    for i in reversed(range(len(system))):
        *row, right = system[i]
        solution.insert(0, (right - sum(map(mul, row[i + 1 :], solution))) / row[i])
    return solution


# -- the cost -------------------------------------------------------------------------------------


FORGETTING: Final = 0.98
"""The weight of an observation after one more step: about the last fifty steps count."""
UNSOLVED_MAX: Final = 16
"""Observations after which the coefficients are solved for although they were not asked for."""
OUTLIER: Final = 4.0
"""The multiple of its estimate at which a step's time is cut before the model learns from it."""
WARMUP_WEIGHT: Final = 0.3
"""The weight of each step that was timed while warming up, in steps of today."""
WARMUP_ROUNDS: Final = 64
"""Solutions in a row with which the coefficients begin: each is damped towards the one before it."""
SLOWDOWN_MAX: Final = 16.0
"""The largest factor by which steps count as slower, or as faster, than they were while warming up."""
QUANTILE: Final = 0.99
TAIL: Final = math.log(1.0 / (1.0 - QUANTILE))
"""The quantile of errors with an exponential tail, in multiples of their mean."""
ERRORS: Final = 200
"""The number of steps from which the error is taken."""
ERROR_MIN, ERROR_MAX = 0.02, 1.0
ERROR_AT_FIRST: Final = 0.1
"""The error before any step tells it; it counts as much as `ERRORS_AT_FIRST` steps."""
ERRORS_AT_FIRST: Final = 4


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
    scored_tokens: int = 0
    """Prompt tokens whose log-probabilities are asked for: each takes all that a sampled token does, and a
    list of the likeliest beside it."""
    seats: int = 0
    """Sequences that were admitted."""
    guess_s: float = 0.0
    """The time that guesses of drafts take, which is known."""
    drafts: int = 0
    """Tokens that decode rows verify beside their own. Their pairs are among `pairs`."""

    @classmethod
    def of(
        cls,
        positions: Sequence[int],
        lengths: Sequence[int],
        copied_pages: int = 0,
        scored_tokens: int = 0,
        seats: int = 0,
        guess_s: float = 0.0,
    ) -> Work:
        """The work of rows of which row i computes `lengths[i]` tokens from `positions[i]` on; a row of one
        token counts as a decode."""
        chunks = [row for row in zip(positions, lengths, strict=True) if row[1] != 1]
        return cls(
            prompt_tokens=sum([length for _, length in chunks]),
            decode_rows=len(lengths) - len(chunks),
            pairs=sum([_pairs(position, length) for position, length in chunks]),
            context_tokens=sum(positions) + sum(lengths),
            copied_pages=copied_pages,
            scored_tokens=scored_tokens,
            seats=seats,
            guess_s=guess_s,
        )

    def verifying(self, positions: Sequence[int], drafts: Sequence[Sequence[int]]) -> Work:
        """The work with a decode row from each of these positions that verifies drafts."""
        lengths = [*map(len, drafts)]
        return replace(
            self,
            decode_rows=self.decode_rows + len(lengths),
            pairs=self.pairs + sum(map(mul, positions, lengths)),
            context_tokens=self.context_tokens + sum(positions) + sum(lengths) + len(lengths),
            drafts=self.drafts + sum(lengths),
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """The model's eight coefficients, in seconds."""

    token_s: float = 1e-4
    row_s: float = 1e-4
    pair_s: float = 0.0
    context_s: float = 0.0
    fixed_s: float = 1e-3
    score_s: float = 0.0
    seat_s: float = 0.0
    page_s: float = 1e-4

    def __post_init__(self) -> None:
        rates = (self.token_s, self.row_s, self.pair_s, self.context_s, self.fixed_s, self.page_s)
        assert min(*rates, self.score_s, self.seat_s) >= 0.0

    @property
    def scoring(self) -> StepCost:
        """The cost of steps for a prompt all of whose tokens are scored. Until steps have told what that
        takes, it is what a decode does, which ends in the same way."""
        return replace(self, token_s=self.token_s + (self.score_s or self.row_s))

    def seconds(self, work: Work) -> float:
        rows_s = self.token_s * work.prompt_tokens + self.row_s * (work.decode_rows + work.drafts)
        attention_s = self.pair_s * work.pairs + self.context_s * work.context_tokens
        extra_s = self.page_s * work.copied_pages + self.score_s * work.scored_tokens
        return self.fixed_s + rows_s + attention_s + extra_s + self.seat_s * work.seats + work.guess_s

    def service_s(self, prompt_len: int) -> float:
        """The time that `prompt_len` tokens of a prompt would take alone, in seconds; above zero."""
        return max(self.fixed_s + self.chunk_s(0, max(2, prompt_len)), 1e-6)

    def chunk_s(self, position: int, length: int) -> float:
        """The time that a chunk of `length` prompt tokens from `position` on adds to a step, in seconds. A
        single token costs what a decode does."""
        if length == 1:
            return self.row_s + self.context_s * (position + 1)
        attention_s = self.pair_s * _pairs(position, length) + self.context_s * (position + length)
        return self.token_s * length + attention_s

    def draft_s(self, position: int) -> float:
        """The time that a draft adds to the row from `position` on that verifies it, in seconds."""
        return self.row_s + self.pair_s * position + self.context_s

    def tokens_within(self, budget_s: float, position: int) -> int:
        """The length of the longest chunk from `position` on that adds at most `budget_s` to a step."""
        left_s = budget_s - self.context_s * position
        if left_s <= 0.0:
            return 0
        linear = self.token_s + self.context_s + self.pair_s * (position + 0.5)
        square = self.pair_s / 2
        if linear + square <= 0.0:
            return 1 << 30
        root = math.sqrt(linear * linear + 4 * square * left_s)
        length = min(1 << 30, int(2 * left_s / (linear + root)))
        return length if length > 1 else int(self.chunk_s(position, 1) <= budget_s)


LEARNED: Final = len(fields(StepCost)) - 1
"""The coefficients that are learned: all but the last, in the order of `_add`'s features."""
Equations = list[list[float]]
"""Row i: the sums of the products of feature i with every feature, and with the time; all relative to the
time."""


def _none() -> Equations:
    return [[0.0] * (LEARNED + 1) for _ in range(LEARNED)]


def _add(equations: Equations, work: Work, seconds: float, weight: float, share: float = 1.0) -> None:
    """Add a step to the equations, `share` of whose time is what is learned. Most steps have few of the
    features, and touch no row of another."""
    rows = work.prompt_tokens, work.decode_rows + work.drafts
    features = (*rows, work.pairs, work.context_tokens, 1, work.scored_tokens, work.seats)
    sides = [weight * feature / seconds for feature in features]
    sides.append(weight * share)
    for row, feature in zip(equations, features, strict=True):
        if feature:
            row[:] = [value + feature / seconds * side for value, side in zip(row, sides, strict=True)]


class CostLearner:
    """Learns the cost of a step from the steps that were made."""

    def __init__(self, page_s: float = 0.0, timed: Iterable[TimedStep] = ()) -> None:
        """`page_s` is the measured time to copy one page, in seconds; 0.0 when it was not measured. `timed`
        has the steps that were timed while warming up."""
        self._cost = StepCost(page_s=page_s) if page_s else StepCost()
        self._equations = _none()
        self._weight = 1.0
        """The weight of the last observation. It grows from one to the next, instead of all before it
        shrinking."""
        self._warmup: Equations | None = None
        self._has_learned = False
        self._unsolved = 0
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._begin(timed)
        self._measured = self._cost
        self._slowdowns, self._slowdowns_weight = 0.0, 0.0

    def _begin(self, timed: Iterable[TimedStep]) -> None:
        """Begin with the steps that were timed while warming up."""
        for step in timed:
            if step.seconds > 0.0:
                self._warmup = self._warmup or _none()
                _add(self._warmup, Work.of(step.positions, step.lengths), step.seconds, WARMUP_WEIGHT)
        if self._warmup is not None:
            self._has_learned = True
            for _ in range(WARMUP_ROUNDS):
                self._solve(slowdown=1.0)

    @property
    def cost(self) -> StepCost:
        """The learned cost. It is solved for when it is asked for, which steps of decodes alone do not."""
        if self._unsolved:
            self._solve(self._slowdown)
        return self._cost

    def drafts_s(self, positions: Sequence[int], work: Work, step_s: float) -> list[float]:
        """The time that a draft adds to the row from each of these positions on, in a step of this work and
        time: no less than the part of a step that it took while warming up. A busy machine's steps do not
        tell."""
        cost, measured = self._cost, self._measured
        measured_s = 0.0 if self._warmup is None else measured.seconds(work)
        part = step_s / measured_s if measured_s else 0.0
        return [max(cost.draft_s(each), part * measured.draft_s(each)) for each in positions]

    @property
    def known(self) -> StepCost:
        """The cost that was solved for last, which steps of decodes may ask for."""
        return self._cost

    @property
    def error(self) -> float:
        """The share by which a step with prompts may take longer than its estimate (see above)."""
        errors = ERROR_AT_FIRST * ERRORS_AT_FIRST + TAIL * sum(self._errors)
        return min(max(ERROR_MIN, errors / (ERRORS_AT_FIRST + len(self._errors))), ERROR_MAX)

    @property
    def _slowdown(self) -> float:
        """How many times as long steps take as they did while warming up."""
        if not self._slowdowns_weight:
            return 1.0
        return min(max(self._slowdowns / self._slowdowns_weight, 1.0 / SLOWDOWN_MAX), SLOWDOWN_MAX)

    def observe(self, work: Work, seconds: float) -> float:
        """Learn from a step that did `work` in `seconds`. Returns the time that was expected for it, by the
        cost that was solved for last; 0.0 before the first observation."""
        forecast_s = expected_s = self._cost.seconds(work) if self._has_learned else 0.0
        if seconds <= 0.0:
            return forecast_s  # a clock too coarse to tell
        if self._has_learned:
            if seconds > OUTLIER * expected_s:
                expected_s = self.cost.seconds(work)
                seconds = min(seconds, OUTLIER * expected_s) or seconds
            if work.prompt_tokens and expected_s:
                self._errors.append(min(max(0.0, seconds / expected_s - 1.0), ERROR_MAX))
        self._has_learned = True
        # What an admission takes was not measured, and is not to count as slowness.
        if self._warmup is not None and not work.seats and (measured_s := self._measured.seconds(work)):
            self._slowdowns = FORGETTING * self._slowdowns + seconds / measured_s
            self._slowdowns_weight = FORGETTING * self._slowdowns_weight + 1.0
        self._weight /= FORGETTING
        known_s = self._cost.page_s * work.copied_pages + work.guess_s
        share = max(0.0, 1.0 - known_s / seconds)
        _add(self._equations, work, seconds, self._weight, share)
        self._unsolved += 1
        if self._unsolved == UNSOLVED_MAX:
            self._solve(self._slowdown)
        return forecast_s

    def _solve(self, slowdown: float) -> None:
        self._unsolved = 0
        *last, page_s = astuple(self._cost)
        self._equations = [[value / self._weight for value in row] for row in self._equations]
        self._weight = 1.0
        equations = [row.copy() for row in self._equations]
        if self._warmup is not None:
            for row, measured in zip(equations, self._warmup, strict=True):
                for i, value in enumerate(measured[:-1]):
                    row[i] += value / slowdown**2
                row[-1] += measured[-1] / slowdown
        self._cost = replace(StepCost(*nonnegative(equations, last)), page_s=page_s)
