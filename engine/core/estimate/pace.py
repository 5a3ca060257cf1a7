"""How much of a step prompts may take: the size of the chunks of chunked prefill, by one rule.

A step computes one token of every running sequence that decodes, and chunks of prompts beside them. The
decodes alone take `D` seconds. With chunks of `P` seconds beside them the streams see gaps of `D + P`. Let
`tau` be the longest gap that they are to see, `phi` the least share of the time that prompts have although
`tau` is not kept then, and `m` the error by which a step may take longer than its estimate. Then

    P = max( tau / (1 + m) - D ,  phi / (1 - phi) * D / (1 + m) )

**Where `tau` can be kept, prompts fill the step up to it.** A prompt of S seconds delays every stream by S in
all, however it is cut: the cut decides how long the largest gap is, and each chunk reads the whole context
before it. So the right chunk is the longest that keeps `tau`. Shorter ones gain the streams nothing that they
asked for, and cost the prompt its first token.

**Where it cannot be kept** (decodes alone come near it, as on a CPU), the second part holds: prompts have the
share `phi` of the time. With one half, a step takes at most twice as long as its decodes.

**`m` is learned**, and not set: it is the quantile `QUANTILE` of how much longer steps with prompts took than
their estimates (`engine.core.estimate.cost`). Good estimates earn longer chunks.

- `tau` is the least gap target of the classes that stream in this step; each class has one of its own. `P`
  grows with `tau`, so a larger target never makes a lone prompt's first token later.
- The number of prompts is no part of the rule: all of `P` is spent whenever there is work of prompts, and
  their rank says on which (`engine.core.queue.policy`). So a second prompt never makes the first one faster.
- Where nothing decodes no stream waits. But newcomers wait for the step to end, and a short step is mostly
  spent on reading the weights. So the same formula is used with the gap target of the default class, and with
  `ALONE_SHARE` as `phi`: what a step takes without any row is at most a fifth of it. There is no credit and
  no debt then.
- A chunk spends at most the share `REREAD_SHARE` of its time on reading the context before it. Where `P` is
  too short for that, it is kept as *credit*, and the chunk is computed once budget and credit suffice. It
  waits for no more than the longest step has left beside the reserve, or it would wait for ever. No
  step is made longer by credit than `tau`, or twice its decodes. Only a chunk of one token may, where reading
  its context alone takes longer than that, or than the reserve leaves of it; then it is computed as rarely as
  its share of the time says. (Else two prompts far into their contexts would wait for each other for ever.)
- What a step overspends, as for copies of pages and for the last admission, is debt: prompts pay it in the
  steps after it. (Admissions take the host's time: a flood of requests of one token is bounded by it.)

- Drafts that streams verify (`engine.core.step.drafting`) are no part of `D`: `P` is for them and for
prompts. Where prompts wait, drafts have nothing of the second part of the rule, and of what the first is
beyond that they leave prompts the share `phi` (`drafts_s`). So prompts have that share of the time in any
case.

Hence the law: **no step takes longer than max(tau, 2 D)**, or max(tau, D / (1 - phi)) where the operator sets
a `phi` above one half, but for an error of the estimate beyond `m` and for the two exceptions above.

One part in `RESERVED_PART` of a step's tokens and time is reserved for the prefill that has run for longest,
so that prompts that rank above it do not stop it. `engine.core.step.plan_builder` applies all of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from engine.core.estimate.cost import StepCost

ALONE_SHARE: Final = 0.8
"""The least share of a step that prompts have while nothing decodes."""
REREAD_SHARE: Final = 0.25
"""The largest share of a chunk's time that goes into reading the context before it."""
RESERVED_PART: Final = 16
"""One part in so many of a step's tokens and time is reserved for the prefill that has run for longest."""
STEP_S_MAX: Final = 1e6
"""The time for prompts where no gap target binds, in seconds."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
    """The time of one step for prompts, in seconds."""

    seconds: float
    """`P`."""
    longest_s: float
    """The longest time to which credit may extend it."""

    def beside(self, drafts_s: float) -> PrefillBudget:
        """The budget that is left beside drafts that take so long."""
        return PrefillBudget(self.seconds - drafts_s, self.longest_s - drafts_s)


@dataclass(frozen=True, slots=True)
class Credit:
    """The time that prompts did not use although they had work, in seconds."""

    seconds: float = 0.0
    """Below zero: debt."""
    wanted_s: float = 0.0
    """The time of the chunk of one token that waits for it; 0.0 when none does."""


def prompt_budget(gap_target_s: float, decodes_s: float, share: float, error: float) -> PrefillBudget:
    """The rule at the head of this module. `decodes_s` is D, `share` is phi and `error` is m."""
    assert 0.0 < share < 1.0
    by_target_s = gap_target_s / (1.0 + error) - decodes_s
    by_share_s = share / (1.0 - share) * decodes_s / (1.0 + error)
    seconds = min(max(by_target_s, by_share_s), STEP_S_MAX)
    return PrefillBudget(seconds, max(seconds, decodes_s / (1.0 + error)))


def drafts_s(gap_target_s: float, decodes_s: float, share: float, error: float) -> float:
    """The time of a step in which prompts wait that drafts may take."""
    least_s = prompt_budget(0.0, decodes_s, share, error).seconds
    return (1.0 - share) * (prompt_budget(gap_target_s, decodes_s, share, error).seconds - least_s)


def time_with_credit_s(budget: PrefillBudget, credit: Credit) -> float:
    """The time for prompts in a step, what is left from earlier ones included; below zero in debt."""
    return min(budget.seconds + credit.seconds, max(budget.longest_s, credit.wanted_s))


def chunk_len_min(cost: StepCost, position: int) -> int:
    """The length of the shortest chunk from `position` on of whose time at most `REREAD_SHARE` goes into
    reading the context before it."""
    reading_s = cost.context_s * position
    token_s = cost.token_s + cost.context_s + cost.pair_s * position
    if not reading_s or not token_s:
        return 1
    return max(1, math.ceil(reading_s * (1.0 - REREAD_SHARE) / (REREAD_SHARE * token_s)))


def reserve(tokens_left: int, time_left_s: float, least_s: float) -> tuple[int, float]:
    """The tokens and the seconds that are reserved for the prefill that has run for longest.

    `least_s` is the time of a single token of it, which is long far into a long context: the reserved time is
    at least that, but no more than half of what is left.
    """
    reserved_s = min(max(time_left_s / RESERVED_PART, least_s), time_left_s / 2)
    return -(-tokens_left // RESERVED_PART), max(0.0, reserved_s)
