"""The rank of sequences: which is admitted first, and which prompt is computed first.

Pure functions, so that each can be replaced, simulated and compared alone. They read sequences and change
nothing. How much of a step prompts may take is in `engine.core.pace`, which sequence is preempted in
`engine.core.victims`.

The rank of a waiting sequence is its *weighted response ratio*; the highest goes first:

    weight(class) * share(tenant) * (1 + (HEAD_START_S + waited) / service)

- `service` is what the part of the prompt that the cache lacks would take alone, by the learned cost of a
  step (`engine.core.cost`). Short prompts climb fast and pass long ones, which climb as well.
- Every sequence counts as having waited `HEAD_START_S` on arrival. Waits much shorter than that hardly change
  the order, so of sequences that came just now the shortest goes first.
- `share` halves with every `SHARE_HALVED_BY` tokens, beyond the first `SHARE_FREE`, by which a tenant is
  ahead of the least served of those that compete (`engine.core.tenants`). A tenant's second sequence in line
  stands as if its first had been served already, and so on: a flood of requests pushes its own tail back, and
  no other tenant. The head start makes the share weigh more than a wait, hence the free lead: tenants that
  take turns are never far apart.
- A running prefill is ranked by what is left of it, so that a short prompt passes a long one that has begun,
  and a long one that is nearly done is finished before another.
- A preempted sequence, swapped or not, stands level with the best newcomer of its class or a lower one, and
  before it; one that yielded its slot to another tenant, with the best newcomer of its own tenant.
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
nor those that resume with their pages, nor those that follow others (`engine.core.planner`, rule D).
(`engine.core.waiting` keeps the turn.)

`penstock bench scheduler` measures the rule beside others in virtual time; `tests/bench/results` has its
figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from engine.core.cost import StepCost
from engine.core.messages import ServiceClass
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
    preempted = by_status[Status.PREEMPTED] + by_status[Status.SWAPPED]
    ranks = _ranks_of_newcomers(by_status[Status.WAITING], circumstances)
    best = _best_ranks(by_status[Status.WAITING] if preempted else (), ranks)
    for sequence in (*preempted, *by_status[Status.RUNNING]):
        lead = circumstances.leads.get(sequence.tenant, 0)
        ranks[sequence.handle] = response_ratio(sequence, circumstances) * share(lead)
    for sequence in preempted:
        newcomers = best[sequence.tenant if sequence.yields else None][: sequence.service_class + 1]
        ranks[sequence.handle] = max(ranks[sequence.handle], *newcomers)

    def key(sequence: Sequence) -> tuple[float, bool, float, int]:
        is_new = sequence.status is Status.WAITING
        return (-ranks[sequence.handle], is_new, sequence.arrived_at, sequence.handle)

    stalled = by_status.pop(Status.STALLED, [])
    return by_age(stalled) + sorted((s for those in by_status.values() for s in those), key=key)


def _ranks_of_newcomers(newcomers: Iterable[Sequence], circumstances: Circumstances) -> dict[int, float]:
    """Ranks by handle; each counts those of its tenant before it as served already."""
    of_tenant: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
    for sequence in newcomers:
        ratio = response_ratio(sequence, circumstances)
        entry = (-ratio, sequence.arrived_at, sequence.handle, sequence.expected_len)
        of_tenant[sequence.tenant].append(entry)
    ranks = {}
    for tenant, entries in of_tenant.items():
        lead = circumstances.leads.get(tenant, 0)
        for negative, _, handle, expected_len in sorted(entries):
            ranks[handle] = -negative * share(lead)
            lead += expected_len
    return ranks


def _best_ranks(
    newcomers: Iterable[Sequence], ranks: Mapping[int, float]
) -> Mapping[str | None, list[float]]:
    """The highest rank of a newcomer for each class, by tenant and under None for all tenants together; 0.0
    where there is none."""
    best: dict[str | None, list[float]] = defaultdict(lambda: [0.0] * len(ServiceClass))
    for sequence in newcomers:
        for tenant in (sequence.tenant, None):
            those, its = best[tenant], sequence.service_class
            those[its] = max(those[its], ranks[sequence.handle])
    return best


def response_ratio(sequence: Sequence, circumstances: Circumstances) -> float:
    """The weight of its class, times one plus its wait (head start included) in units of its service time."""
    waited_s = HEAD_START_S + circumstances.now - sequence.arrived_at
    service_s = circumstances.cost.service_s(sequence.expected_len)
    return WEIGHTS[sequence.service_class] * (1.0 + waited_s / service_s)


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
