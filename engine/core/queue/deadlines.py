"""First-token deadlines: the time by which the first token of a request is of use.

A gateway states how long it waits for a first token, and a token that comes later is work for nothing. Three
things follow, all from an estimate of how long the rest of a prompt takes (`prefill_s`):

1. **What is hopeless is refused at once**, when it is added, with the estimate. The estimate is the least
that is to be expected: the prompt's own work at the rate that prompts have now, and before it that of the
prompts that rank before it, of which at most `LOOKED_AT_MAX` are looked at. What comes later and what slots
and pages may lack is not counted, so nothing is refused that the engine would serve in time as things stand.
What would be in time even behind all of them, as nearly all is, is not ranked, which would take as long as a
short step.
2. **What would miss its deadline is hurried**: beside streams, one prompt in a step gets more time than
`engine.core.estimate.pace` gives to prompts, so that they have `HURRY_SHARE` of the step together. It is the
one with the first deadline of those that would miss theirs. Its rank stays as it is, and so do the chunks of
others.
3. **What has missed it ends**, since nobody waits for it any more.

Whoever states short deadlines harms the streams of others, so hurrying is paid for by the tenant. It may take
`HURRY_S` seconds of steps at once, and after that one part in `HURRY_PART` of the time. The streams beside it
see steps of at most 1 / (1 - `HURRY_SHARE`) = 4 times their decodes meanwhile.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from engine.core.estimate import pace
from engine.core.estimate.cost import StepCost

LOOKED_AT_MAX: Final = 256
"""Sequences of the queue that one estimate looks at."""
HURRY_SHARE: Final = 0.75
"""The share of a step's time that prompts have while one is hurried."""
HURRY_S: Final = 10.0
"""The time by which a tenant's prompts may lengthen steps at once, in seconds."""
HURRY_PART: Final = 16
"""One part in so many of the time is what a tenant's prompts may lengthen steps by in the long run."""
GAIN_COUNTED: Final = 0.75
"""The share of what hurrying may gain that an estimate counts on."""
FORGOTTEN_AT_ONCE: Final = 256
PARTS: Final = 16
"""Parts of a prompt for which an estimate takes one rate each."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The time of a step and what prompts have of it."""

    decodes_s: float
    """The time of a step without prompts, in seconds."""
    prompts_s: float
    """The time of prompts in it, in seconds."""
    streams: int
    """The number of decodes in it."""
    tokens_max: int
    """The tokens that prompts may have in it."""

    def beside(self, drafts_s: float) -> Rate:
        """The rate beside drafts that take so long, and are in the time of prompts."""
        prompts_s = self.prompts_s - drafts_s
        return Rate(self.decodes_s + drafts_s, prompts_s, self.streams, self.tokens_max)


def prefill_s(cost: StepCost, rate: Rate, position: int, length: int) -> float:
    """The time until `length` tokens from `position` on are computed at this rate, in seconds."""
    width, steps, own_s = length / PARTS, 0.0, 0.0
    for part in range(PARTS):
        middle = position + (part + 0.5) * width
        token_s = cost.token_s + cost.context_s + cost.pair_s * middle
        reading_s = cost.context_s * middle
        per_step = _tokens_per_step(cost, rate, middle, token_s, reading_s)
        steps += width / per_step
        own_s += width * token_s + width / per_step * reading_s
    return max(1.0, steps) * rate.decodes_s + own_s


def _tokens_per_step(cost: StepCost, rate: Rate, middle: float, token_s: float, reading_s: float) -> float:
    if token_s <= 0.0:
        return float(rate.tokens_max)
    tokens = (rate.prompts_s - reading_s) / token_s
    if rate.streams:
        tokens = max(tokens, min(1.0, rate.prompts_s / (reading_s + token_s)))  # one token, every few steps
    else:
        tokens = max(tokens, pace.chunk_len_min(cost, int(middle)))
    return min(max(tokens, 1e-3), float(rate.tokens_max))


def hurried(rate: Rate, error: float) -> Rate:
    """The rate while a prompt is hurried."""
    if not rate.streams:
        return rate
    most_s = HURRY_SHARE / (1.0 - HURRY_SHARE) * rate.decodes_s / (1.0 + error)
    return Rate(rate.decodes_s, max(rate.prompts_s, most_s), rate.streams, rate.tokens_max)


def first_token_s(
    cost: StepCost,
    rate: Rate,
    fast: Rate,
    before: Iterable[int],
    position: int,
    length: int,
    allowance_s: float,
) -> float:
    """The estimate of rule 1, by which what is hopeless is refused, in seconds. `fast` is the rate while the
    prompt is hurried, `before` has the pending tokens of the prompts before it, and `allowance_s` is what its
    tenant may lengthen steps by now."""
    queue_s = sum([cost.chunk_s(0, pending) for pending in before]) / _prompts_share(rate)
    own_s = prefill_s(cost, rate, position, length)
    if fast.prompts_s > rate.prompts_s:
        fast_s = prefill_s(cost, fast, position, length)
        longer_s = fast_s * (fast.prompts_s - rate.prompts_s) / (fast.prompts_s + fast.decodes_s)
        paid = min(1.0, (allowance_s + fast_s / HURRY_PART) / max(longer_s, 1e-9))
        own_s -= GAIN_COUNTED * paid * max(0.0, own_s - fast_s)
    return queue_s + own_s


def first_token_most_s(
    cost: StepCost, rate: Rate, rivals: Sequence[int], position: int, length: int
) -> float:
    """The most that the estimate can be, however the prompts with these pending tokens rank, in seconds: the
    longer one is, the more its tokens take each."""
    longest = max(rivals, default=0)
    queue_s = len(rivals) * cost.chunk_s(0, 1)
    if longest:
        queue_s += sum(rivals) * cost.chunk_s(0, longest) / longest
    return queue_s / _prompts_share(rate) + prefill_s(cost, rate, position, length)


def _prompts_share(rate: Rate) -> float:
    """The share of the time that prompts have at a rate; above zero."""
    if not rate.streams:
        return 1.0
    return max(rate.prompts_s / (rate.prompts_s + rate.decodes_s), 1e-6)


@dataclass(slots=True)
class HurryCredits:
    """The time by which the prompts of each tenant may still lengthen steps."""

    _spent: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The seconds that each tenant has spent and not got back, and when that was reckoned."""

    def left_s(self, tenant: str, now: float) -> float:
        """The seconds that a tenant may spend now."""
        return HURRY_S - self._owed_s(tenant, now)

    def spend(self, tenant: str, seconds: float, now: float) -> None:
        """Charge a tenant. Tenants that have got everything back are forgotten."""
        if seconds <= 0.0:
            return
        self._spent[tenant] = (self._owed_s(tenant, now) + seconds, now)
        for other in [each for each in self._spent if not self._owed_s(each, now)]:
            del self._spent[other]

    def _owed_s(self, tenant: str, now: float) -> float:
        spent_s, since = self._spent.get(tenant, (0.0, now))
        return max(0.0, spent_s - (now - since) / HURRY_PART)


@dataclass(slots=True)
class DeadlineQueue:
    """The deadlines of the sequences that have no first token yet, by handle, in the order of their times."""

    heap: list[tuple[float, int]] = field(default_factory=list)

    def add(self, first_token_by: float, handle: int) -> None:
        heappush(self.heap, (first_token_by, handle))

    def passed(self, now: float) -> list[int]:
        """The handles whose deadlines have passed since the last call, whatever became of them."""
        passed = []
        while self.heap and self.heap[0][0] <= now:
            passed.append(heappop(self.heap)[1])
        return passed

    def forget(self, living: Container[int], count: int) -> None:
        """Drop the handles that are not among the `count` living, once they are the most."""
        if len(self.heap) > 2 * count + FORGOTTEN_AT_ONCE:
            self.heap = [entry for entry in self.heap if entry[1] in living]
            heapify(self.heap)
