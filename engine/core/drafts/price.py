"""How many drafts each row verifies: as many as pay, by the learned cost of a step.

A step of N rows takes T seconds, and brings N tokens: so a token costs T / N today. A draft more makes the
step longer by what a row takes (`StepCost.draft_s`), and brings a token more if it is right and all drafts
before it are: with p for the chance that one is right, the j-th of a row brings p^j tokens. Hence

    the j-th draft of a row pays while   p^j * T / N  >  what it takes,

T and N having grown by the drafts that were taken before it. The drafts of all rows are taken in the order of
what they bring: as each row's bring less and less, the result has the most tokens per second of all choices.
It is never less than without drafts, as far as p and the cost are right: a large batch, in which a row costs
about what it brings, has few drafts, or none.

*Padding.* A step that a graph is captured for takes the time of the graph's tokens, which are those of the
step or more. So where there are such shapes, of all counts of drafts, in the same order, the one is chosen
that has the most tokens per second, each at the time of the shape that it is padded to: a shape is filled
before the next is begun, and the next is begun for what would fill it (`lengths_by_shape`).

*Chances.* What a grammar forces is doubted less, or not at all (`Sureness`). The chance of any other is
estimated from what came of a sequence's drafts before (`Acceptance`), apart for matches of different lengths,
since what follows a long one is right more often. An estimate begins as `PRIORS` say, with the weight of
`PRIOR_DRAFTS`, and forgets: the last fifty steps with drafts decide. One so low that no draft pays would
never be told better. So after `PROBE_AFTER` offers of which none was taken a single draft is tried, whatever
it costs, and if that is wrong the next one after `PROBE_MORE` times as many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

MATCHED: Final = (2, 4, 8)
"""The least lengths of matches that are told apart."""
PRIORS: Final = (0.35, 0.6, 0.85, 0.98, 0.5, 0.75, 0.9, 0.7)
FORCED: Final = 3
"""The kind of tokens that a grammar forces."""
PREDICTED: Final = 4
"""The first kind of tokens that the caller predicts: of the shortest match."""
GUESSED: Final = 7
"""The kind of tokens that the model's MTP layer guesses."""
PRIOR_DRAFTS: Final = 2.0
FORGETTING: Final = 0.98
"""The weight of a step's drafts beside that of the next one's."""
PROBE_AFTER: Final = 4
PROBE_MORE: Final = 8
CHANCE_MAX: Final = 0.98


class Sureness(IntEnum):
    """Why a token is drafted for a sequence that follows a grammar."""

    DRAFTED = 0
    """It was found likely, and the grammar allows it."""
    FORCED = 1
    """The grammar forces its text, which may be written by other tokens, too."""
    SURE = 2
    """The grammar allows no other token: it is right if those before it are."""


class Acceptance:
    """The numbers of one sequence's drafts that were right and wrong."""

    __slots__ = ("_passed", "_patience", "_right", "_wrong")

    def __init__(self) -> None:
        self._right = [chance * PRIOR_DRAFTS for chance in PRIORS]
        self._wrong = [(1.0 - chance) * PRIOR_DRAFTS for chance in PRIORS]
        self._passed = 0
        """Offers since the last one that was taken."""
        self._patience = PROBE_AFTER

    @staticmethod
    def kind(matched: int) -> int:
        """The kind of a draft whose match has so many tokens."""
        return sum(matched >= least for least in MATCHED[1:])

    @staticmethod
    def predicted_kind(matched: int) -> int:
        """The kind of what the caller predicts behind a match of so many tokens."""
        return PREDICTED + Acceptance.kind(matched)

    @property
    def is_probing(self) -> bool:
        """True if a single draft is to be tried, whatever its chance."""
        return self._passed >= self._patience

    def chance(self, kind: int) -> float:
        """The chance that a draft of this kind is right if those before it are."""
        right, wrong = self._right[kind], self._wrong[kind]
        return min(right / (right + wrong), CHANCE_MAX)

    def learn(self, kind: int, right: int, *, all_right: bool) -> None:
        """Learn from drafts of which the first `right` ones were right. What comes behind a wrong one says
        nothing."""
        self._right[kind] = FORGETTING * self._right[kind] + right
        self._wrong[kind] = FORGETTING * self._wrong[kind] + (not all_right)
        if right:
            self._patience = PROBE_AFTER
        elif self.is_probing:
            self._patience *= PROBE_MORE
        self._passed = 0

    def pass_over(self) -> None:
        """Note that drafts were offered, and none taken."""
        self._passed += 1


class Offer(NamedTuple):
    """The drafts that a row could verify."""

    chance: float
    most: int
    """Their number."""
    draft_s: float
    """The time that each of them adds to the step."""
    is_probe: bool = False
    """True if the first is to be taken whatever it costs."""
    chances: Sequence[float] = ()
    """The chance of each, where they differ."""

    def chance_of(self, at: int) -> float:
        """The chance that the draft in this place is right if those before it are; 0.0: there is none."""
        if at >= self.most:
            return 0.0
        return self.chances[at] if self.chances else self.chance


def tokens_of(chance: float, length: int) -> float:
    """The tokens that so many drafts of a row bring."""
    return chance * (1.0 - chance**length) / (1.0 - chance)


def lengths_that_pay(
    offers: Sequence[Offer], rows: int, step_s: float, spare_s: float, spare: int
) -> list[int]:
    """The number of drafts that each row verifies, in a step of `rows` tokens and `step_s` seconds without
    them, which may become longer by `spare_s` and by `spare` tokens."""
    taken = [0] * len(offers)
    tokens, until_s = float(rows), step_s + spare_s
    # The next draft of each row, by what it brings for its time, and the product of the chances up to it.
    first = [(at, each, each.chance_of(0)) for at, each in enumerate(offers) if each.most > 0]
    heap = [(-chance / each.draft_s, at, chance) for at, each, chance in first]
    heapify(heap)
    while heap and spare:
        _, at, brings = heap[0]
        offer = offers[at]
        if brings * step_s <= offer.draft_s * tokens or step_s + offer.draft_s > until_s:
            break
        taken[at] += 1
        spare -= 1
        tokens, step_s = tokens + brings, step_s + offer.draft_s
        brings *= offer.chance_of(taken[at])
        heapreplace(heap, (-brings / offer.draft_s, at, brings))
    _probe(offers, taken, spare, until_s - step_s)
    return taken


def lengths_by_shape(
    offers: Sequence[Offer], rows: int, step_s: float, spare_s: float, spare: int, shapes: Sequence[int]
) -> list[int]:
    """`lengths_that_pay` where a step is padded to one of these numbers of tokens, ascending; beyond the last
    it is not padded."""
    taken, best = [0] * len(offers), [0] * len(offers)
    heap = [(-each.chance_of(0), at) for at, each in enumerate(offers) if each.most > 0]
    heapify(heap)
    padding_s = min((each.draft_s for each in offers), default=0.0)
    tokens, seconds, count, spent_s = float(rows), step_s, 0, 0.0
    rate = rows / step_s if step_s else 0.0
    while heap and count < spare:
        brings, at = heap[0]
        offer = offers[at]
        taken[at] += 1
        count, tokens, seconds = count + 1, tokens - brings, seconds + offer.draft_s
        place = bisect_left(shapes, rows + count)
        padding = shapes[place] - rows - count if place < len(shapes) else 0
        padded_s = seconds + padding * padding_s
        if padded_s <= step_s + spare_s and tokens > rate * padded_s:
            rate, best, spent_s = tokens / padded_s, taken.copy(), padded_s - step_s
        if taken[at] < offer.most:
            heapreplace(heap, (brings * offer.chance_of(taken[at]), at))
        else:
            heappop(heap)
    _probe(offers, best, spare - sum(best), spare_s - spent_s)
    return best


def _probe(offers: Sequence[Offer], taken: list[int], spare: int, spare_s: float) -> None:
    """Take a single draft of those that are to be tried, as far as there is room and time."""
    for at, offer in enumerate(offers):
        if offer.is_probe and not taken[at] and spare and offer.draft_s <= spare_s:
            taken[at], spare, spare_s = 1, spare - 1, spare_s - offer.draft_s
