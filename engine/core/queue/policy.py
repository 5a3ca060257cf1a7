"""The rank of sequences: which is admitted first, and which prompt is computed first.

Pure functions, so that each can be replaced, simulated and compared alone. They read sequences and change
nothing. How much of a step prompts may take is in `engine.core.estimate.pace`, which sequence is preempted in
`engine.core.step.victims`.

The rank of a waiting sequence is its *weighted response ratio*; the highest goes first:

    weight(class) * share(tenant) * (1 + (HEAD_START_S + waited) / service)

- `service` is what the part of the prompt that the cache lacks would take alone, by the learned cost of a
  step (`engine.core.estimate.cost`). Short prompts climb fast and pass long ones, which climb as well.
- Every sequence counts as having waited `HEAD_START_S` on arrival. Waits much shorter than that hardly change
  the order, so of sequences that came just now the shortest goes first.
- `share` halves with every `SHARE_HALVED_BY` tokens, beyond the first `SHARE_FREE`, by which a tenant is
  ahead of the least served of those that compete (`engine.core.queue.tenants`). The head start makes the
  share weigh more than a wait, hence the free lead: tenants that take turns are never far apart.
- A tenant has one line, ordered by ratio, and the ratios of those before a sequence in it count against its
  own as resistances in series do: `1 / rank` is the sum of `1 / ratio` from the head of the line to the
  sequence. Of a hundred equal ones the tenth has a tenth of the first's rank. So a flood of requests pushes
  its own tail back, and no other tenant: what comes alone goes before all of a flood but the first few.
- In that sum a wait counts from the tenant's last admission on: before that, the sequence waited for others
  of its own tenant. Else the requests of a crowd would be old when their turns come, and pass every newcomer.
- A running prefill is ranked by what is left of it, so that a short prompt passes a long one that has begun,
  and a long one that is nearly done is finished before another.
- A preempted sequence stands level with the best newcomer of its class or a lower one, and
  before it. One that yielded its slot to another tenant stands so in its own tenant's line, with its pages or
  without.
- A sequence that resumes after a stall and still holds its pages goes first: it needs a slot, and no
  computation to get it.

*No sequence starves.* A ratio alone promises nothing: a share may be tiny, and others keep coming. So the
oldest waiting sequence, by arrival, has the next turn once `OLDEST_EVERY - 1` others in a row were admitted
before it. In its turn no sequence of any class passes it, and pages are kept for it until it fits. While
others of its tenant run, those make room for it and no other tenant waits for that: no sequence of its tenant
passes it from then on, and the turn goes to the oldest of the other tenants. The bound:

    of the sequences that came after one, at most OLDEST_EVERY - 1 = 15 are admitted before it, and 15 more
    for every admission of a sequence that came before it; those of other tenants are counted while none of
    its own tenant runs.

For one of any sixteen admissions in a row was the oldest's, and as long as a sequence waits, the oldest is
that sequence or came before it. Hence with k before it in the queue of a lone tenant, and none of them
preempted, it is admitted with the 16 * (k + 1)-th admission at the latest. Paused sequences are not counted,
nor those that resume with their pages, nor those that follow others which compute their prompt
(`engine.core.step.planner`, rule D). (`engine.core.queue.waiting` keeps the turn.)

`python -m tests.bench scheduler` measures the rule beside others in virtual time; `tests/bench/results` has
its figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.contract.messages import ServiceClass
from engine.core.estimate.cost import StepCost
from engine.core.sequence import Sequence, Status

WEIGHTS: Final = {ServiceClass.FLEX: 1.0, ServiceClass.DEFAULT: 4.0, ServiceClass.PRIORITY: 16.0}
HEAD_START_S: Final = 1.0
SHARE_FREE: Final = 2048
"""Tokens by which a tenant may be ahead before its share falls."""
SHARE_HALVED_BY: Final = 1024
"""Tokens of lead, beyond the free ones, that halve a tenant's share."""
OLDEST_EVERY: Final = 16
"""Admissions in a row of which at least one is the oldest waiting sequence's."""
_HALVINGS_MAX: Final = 512.0
"""Halvings of a share that count, so that 2 ** -halvings stays above zero."""
assert list(WEIGHTS) == sorted(ServiceClass)
assert list(WEIGHTS.values()) == sorted(WEIGHTS.values())


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The inputs of a rank beside the sequences themselves."""

    now: float
    """The core's clock, in seconds."""
    cost: StepCost
    leads: Mapping[str, int]
    """The tokens by which each tenant is ahead of the least served of those that compete."""
    admitted_at: Mapping[str, float] = field(default_factory=dict)
    """When a sequence of each tenant was last admitted, by the core's clock; tenants without any are left
    out."""


DISPLACED: Final = (Status.PREEMPTED, Status.YIELDED)
"""The statuses of sequences that ran, and lost their slots to others."""

Order = Callable[[Iterable[Sequence], Circumstances], list[Sequence]]
"""Sorts waiting sequences and running prefills; the first goes first."""


@dataclass(frozen=True, slots=True)
class Discipline:
    """A way to serve a queue."""

    order: Order
    oldest_every: int
    """Admissions in a row of which at least one is the oldest waiting sequence's."""

    def __post_init__(self) -> None:
        assert self.oldest_every >= 1


def by_response_ratio(sequences: Iterable[Sequence], circumstances: Circumstances) -> list[Sequence]:
    """The order at the head of this module."""
    by_status: dict[Status, list[Sequence]] = defaultdict(list)
    for sequence in sequences:
        by_status[sequence.status].append(sequence)
    newcomers = by_status[Status.WAITING]
    preempted = [s for status in DISPLACED for s in by_status[status]]
    forced = [sequence for sequence in preempted if not sequence.yields]
    yielded = [sequence for sequence in preempted if sequence.yields]
    ranks = _ranks_in_line([*newcomers, *yielded, *by_status[Status.RUNNING]], circumstances)
    best = [0.0] * len(ServiceClass)
    for sequence in newcomers if forced else ():
        best[sequence.service_class] = max(best[sequence.service_class], ranks[sequence.handle])
    for sequence in forced:
        own = response_ratio(sequence, circumstances) * share(circumstances.leads.get(sequence.tenant, 0))
        ranks[sequence.handle] = max(own, *best[: sequence.service_class + 1])

    def key(sequence: Sequence) -> tuple[float, bool, float, int]:
        is_new = sequence.status is Status.WAITING
        return (-ranks[sequence.handle], is_new, sequence.arrived_at, sequence.handle)

    stalled = by_status.pop(Status.STALLED, [])
    return by_age(stalled) + sorted((s for those in by_status.values() for s in those), key=key)


def _ranks_in_line(sequences: Iterable[Sequence], circumstances: Circumstances) -> dict[int, float]:
    """Ranks by handle: in each tenant's line, the ratios in series."""
    lines: dict[str, list[Sequence]] = defaultdict(list)
    for sequence in sequences:
        lines[sequence.tenant].append(sequence)
    ranks = {}
    for tenant, line in lines.items():
        its_share, resistance = share(circumstances.leads.get(tenant, 0)), 0.0
        for _, _, _, handle, ratio in sorted(_places(tenant, line, circumstances)):
            resistance += 1.0 / ratio
            ranks[handle] = its_share / resistance
    return ranks


def _places(
    tenant: str, line: Iterable[Sequence], circumstances: Circumstances
) -> list[tuple[float, bool, float, int, float]]:
    """The sort keys of one tenant's line, which begin with minus the ratio and the handle of which is the
    last part; behind each the ratio that counts among tenants."""
    since = circumstances.admitted_at.get(tenant, -math.inf)
    best, places = [0.0] * len(ServiceClass), []
    for sequence in sorted(line, key=_has_yielded):
        ratio, among_tenants = _ratios(sequence, circumstances, since)
        its, stands_aside = sequence.service_class, _has_yielded(sequence)
        if stands_aside:
            ratio = max(ratio, *best[: its + 1])
        elif sequence.status is Status.WAITING:
            best[its] = max(best[its], ratio)
        places.append((-ratio, not stands_aside, sequence.arrived_at, sequence.handle, among_tenants))
    return places


def _has_yielded(sequence: Sequence) -> bool:
    """True if it waits because it yielded its slot to another tenant."""
    return bool(sequence.yields) and sequence.status is not Status.RUNNING


def response_ratio(sequence: Sequence, circumstances: Circumstances) -> float:
    """The weight of its class, times one plus its wait (head start included) in units of its service time."""
    return _ratios(sequence, circumstances)[0]


def _ratios(
    sequence: Sequence, circumstances: Circumstances, since: float = -math.inf
) -> tuple[float, float]:
    """The response ratio, and the same of what it waited from `since` on."""
    waited_s = HEAD_START_S + circumstances.now - sequence.arrived_at
    lately_s = min(waited_s, HEAD_START_S + circumstances.now - since)
    service_s, weight = circumstances.cost.service_s(sequence.expected_len), WEIGHTS[sequence.service_class]
    return weight * (1.0 + waited_s / service_s), weight * (1.0 + lately_s / service_s)


def share(lead: int) -> float:
    """The factor of a tenant that is `lead` tokens ahead: 1 up to `SHARE_FREE`, and never 0."""
    return math.exp2(-min(max(0, lead - SHARE_FREE) / SHARE_HALVED_BY, _HALVINGS_MAX))


def by_age(waiting: Iterable[Sequence]) -> list[Sequence]:
    """The oldest first. Arrivals within one clock reading keep the order of their handles."""
    return sorted(waiting, key=age)


def age(sequence: Sequence) -> tuple[float, int]:
    """A sort key: the oldest sequence has the smallest."""
    return (sequence.arrived_at, sequence.handle)


def by_arrival(sequences: Iterable[Sequence], _: Circumstances) -> list[Sequence]:
    """First come, first served, for every class, tenant and length; resumed sequences with pages before
    all."""
    return sorted(sequences, key=lambda sequence: (sequence.status is not Status.STALLED, age(sequence)))


RESPONSE_RATIO: Final = Discipline(by_response_ratio, OLDEST_EVERY)
FIFO: Final = Discipline(by_arrival, OLDEST_EVERY)
DISCIPLINES: Final[Mapping[str, Discipline]] = {"response-ratio": RESPONSE_RATIO, "fifo": FIFO}
"""The disciplines by the value of the `--discipline` setting."""
