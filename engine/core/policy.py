"""Who goes first, who goes last, how much at a time: pure functions, so that each can be replaced,
simulated and compared alone. They read sequences and change nothing.

The rank of those who wait is the *weighted response ratio*; the highest goes first:

    weight(class) * share(tenant) * (1 + (HEAD_START_S + waited) / service)

- `service` is what the part of the prompt that the cache lacks would cost alone, by the learned model
  of the runner (`engine.core.cost`). Short prompts climb fast and pass long ones, which climb as well.
- Everybody is taken to have waited `HEAD_START_S` on arrival: a wait that nobody minds counts for nothing,
  so that of those who came just now the shortest goes first.
- `share` halves with every `SHARE_HALVED_BY` tokens, beyond the first `SHARE_FREE`, by which a tenant is
  ahead of the least served of those who compete (`engine.core.tenants`). Its second in line stands as if
  its first had been served already, and so on: a flood of requests pushes its own tail back, and no other
  tenant.
- Who runs and still computes its prompt is ranked by what is left of it, so that a short prompt
  passes a long one that has begun, and a long one that is nearly done is finished before another.
- A preempted sequence, swapped or not, stands level with the best newcomer of its class or a lower one,
  and before it; one that yielded its seat to another tenant, with the best of its own tenant.
- Whoever holds pages already, back from a stall, goes first: seating it costs no computation.

*Nobody starves.* A ratio alone promises nothing: a share may be tiny, and others keep coming. So the
eldest of those who wait, by arrival, has the next turn once `ELDER_TURN - 1` others in a row were
admitted before it. In its turn nobody passes it, of whatever class, and pages are kept for it until it
fits. But while others of its tenant run, it is they who make room for it, and no other tenant waits for
that: nobody of its tenant passes it from then on, and the turn goes to the eldest of the others. The bound:

    of the sequences that came after one, at most ELDER_TURN - 1 = 15 are admitted before it, and 15
    more for every admission of a sequence that came before it; those of other tenants are counted
    while nobody of its own runs.

For of any sixteen admissions in a row one was the eldest's, and as long as somebody waits, the eldest
is that somebody or came before. Hence with k before it in the queue of a lone tenant, and none of them
preempted, it is admitted with the 16 * (k + 1)-th admission at the latest. Not counted are those who wait
for their readers, and those who come back from a stall with their pages. (`engine.core.waiting` keeps the
turn.)

Tried, by `penstock bench scheduler --only chat flood` with each rule in the place of this one; short and long
are p99 to first token over FIFO's on ten seeds, median and worst, and flood is the others' p99 over the calm
one's, on four seeds together:

    rule                                          short         long       flood
    shortest first, no bound                   0.16  0.34    1.21  1.27
    1 + waited / service                       0.17  0.28    1.20  1.25     1.14
    the same over service ** 0.5               0.11  0.19    1.21  1.26
    1 + (0.5 s + waited) / service             0.09  0.14    1.23  1.26     1.28
    1 + (1 s + waited) / service               0.07  0.11    1.23  1.28
    the same, 2,048 tokens of lead free        0.07  0.09    1.22  1.26     1.10
    half a share per 4,096 tokens, not 1,024                                5.5

(The record of a choice, measured before prompts were patient (`prompt_room_s`), the last but one on ten other
seeds; `tests/bench/results` has what the rule that stands reaches now. Shortest first does not let a short
prompt pass a long one that has begun.) The head start makes the share weigh more than a wait, hence the lead
that is free: tenants who take turns are never apart by much. Every eighth turn for the eldest instead of
every sixteenth cost other tenants a third of their p99 in a flood, and gained long prompts nothing.

Where lengths differ more and come in bursts, as in a public trace (`--only trace`), long prompts pay more:
their p99 is 2.1 times FIFO's, a fifth less than with shortest first, within the bound; that of short ones is
0.12 of FIFO's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from engine.core.cost import StepCost
from engine.core.messages import ServiceClass
from engine.core.sequence import Sequence, Status
from engine.core.tenants import Seats

WEIGHTS: Final = {ServiceClass.FLEX: 1.0, ServiceClass.DEFAULT: 4.0, ServiceClass.PRIORITY: 16.0}
HEAD_START_S: Final = 1.0
SHARE_FREE: Final = 2048
SHARE_HALVED_BY: Final = 1024
"""Both in tokens."""
ELDER_TURN: Final = 16
PROMPT_TOKENS_MIN: Final = 4
"""What a step computes of prompts at least, however long that takes."""
LONE: Final = 0.5
"""A lone prompt's time in a step, over the decodes'."""
EACH: Final = 0.8
"""That of each, where there are more."""
SWING: Final = 0.15
"""By which share of itself that is more in one step and less in the next."""
FIXED_MULTIPLE: Final = 4.0
"""What prompts may take with nobody streaming, over what a step takes before it computes anything."""
_HALVINGS_MAX: Final = 512.0
"""Beyond this a share counts as 2 ** -512, so that it stays a number above zero."""
assert list(WEIGHTS) == sorted(ServiceClass)
assert list(WEIGHTS.values()) == sorted(WEIGHTS.values())


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a rank depends on beside the sequences themselves."""

    now: float
    cost: StepCost
    leads: Mapping[str, int]
    """By tenant: how many tokens it is ahead of the least served."""


Order = Callable[[Iterable[Sequence], Circumstances], list[Sequence]]
"""Sorts those who wait, and those who run and still compute their prompts; the first goes first."""


@dataclass(frozen=True, slots=True)
class Discipline:
    """How a queue is served."""

    order: Order
    elder_turn: int
    """Of so many admissions in a row, one at least is the eldest's."""

    def __post_init__(self) -> None:
        assert self.elder_turn >= 1


def by_response_ratio(sequences: Iterable[Sequence], circumstances: Circumstances) -> list[Sequence]:
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
    """By handle. A tenant's next stands as if those of its own before it had been served."""
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
    """By tenant, and for None of all tenants together: for each class, the highest rank of a newcomer of that
    class, or 0.0 where there is none."""
    best: dict[str | None, list[float]] = defaultdict(lambda: [0.0] * len(ServiceClass))
    for sequence in newcomers:
        for tenant in (sequence.tenant, None):
            those, its = best[tenant], sequence.service_class
            those[its] = max(those[its], ranks[sequence.handle])
    return best


def response_ratio(sequence: Sequence, circumstances: Circumstances) -> float:
    """The class's weight, times one more for every time its service that a sequence has waited, its head
    start included."""
    waited_s = HEAD_START_S + circumstances.now - sequence.arrived_at
    service_s = circumstances.cost.service_s(sequence.expected_len)
    return WEIGHTS[sequence.service_class] * (1.0 + waited_s / service_s)


def may_yield(running: Iterable[Sequence], sequence: Sequence) -> list[Sequence]:
    """Who might give its seat to `sequence`, if its tenant holds more (rule J): those of other tenants, of no
    higher class, but of each tenant the eldest that runs. So no tenant is left with nobody, and whoever is
    its tenant's eldest stays until it ends."""
    eldest: dict[str, Sequence] = {}
    for other in running:
        if other.tenant not in eldest or age(other) < age(eldest[other.tenant]):
            eldest[other.tenant] = other
    return [
        other
        for other in running
        if other.tenant != sequence.tenant
        and other.service_class <= sequence.service_class
        and other is not eldest[other.tenant]
    ]


def share(lead: int) -> float:
    return math.exp2(-min(max(0, lead - SHARE_FREE) / SHARE_HALVED_BY, _HALVINGS_MAX))


def by_age(waiting: Iterable[Sequence]) -> list[Sequence]:
    """The eldest first. Arrivals within one clock reading keep the order of their handles."""
    return sorted(waiting, key=age)


def age(sequence: Sequence) -> tuple[float, int]:
    return (sequence.arrived_at, sequence.handle)


def by_arrival(sequences: Iterable[Sequence], _: Circumstances) -> list[Sequence]:
    """First come, first served, whatever the class, the tenant or the length."""
    return sorted(sequences, key=lambda sequence: (sequence.status is not Status.STALLED, age(sequence)))


RESPONSE_RATIO: Final = Discipline(by_response_ratio, ELDER_TURN)
FIFO: Final = Discipline(by_arrival, ELDER_TURN)
DISCIPLINES: Final[Mapping[str, Discipline]] = {"response-ratio": RESPONSE_RATIO, "fifo": FIFO}
"""By the names that an operator knows."""


def chunk_len(pending_len: int, budget_left: int) -> int:
    """Tokens of one sequence to compute in this step: at least one, while any budget is left."""
    return min(pending_len, budget_left)


def prompt_room_s(target_s: float, decodes_s: float, prompts: Iterable[float], *, is_odd: bool) -> float:
    """Of a step's time, what prompts may take beside decodes that take `decodes_s`.

    `prompts`: how late each is, by `lateness`. One that is the only one takes half of the decodes' time
    (`LONE`): the gap that streams see does not double, though estimates err and their contexts grow
    meanwhile. When there are more, each takes `EACH` of it, or `late ** 2` times that: so where they come
    faster than they are computed, they soon get up to the target. A fixed share would cap their rate
    instead, and queues that could be served would grow.

    Decodes alone may take the target or more. What one prompt may take, or two together, is left to them
    even then, else they would hardly get on: far into a long prompt, the least of chunks takes longer than
    what is left.

    The room of a lone one is larger by `SWING` in odd steps, and smaller in even ones. Hundreds of its chunks
    would be of one length otherwise, and nothing would tell what a token takes from what a chunk does.

    Short gaps cost long prompts time, as every step pays for the weights anew. Their p99 over FIFO's is 1.30
    on ten seeds (`penstock bench scheduler --only chat --first-seed 301 --seeds 10`).
    """
    if target_s == math.inf:
        return target_s
    each_s = EACH * decodes_s
    room_s = max(2 * each_s, target_s - decodes_s)
    count, wanted_s = 0, 0.0
    for late in prompts:
        count += 1
        wanted_s += max(1.0, late * late) * each_s
        if count > 1 and wanted_s >= room_s:
            break  # a long queue is not looked through in every step
    if count == 1:
        return LONE * decodes_s * (1.0 + SWING if is_odd else 1.0 - SWING)
    return min(room_s, wanted_s)


def lateness(sequence: Sequence, circumstances: Circumstances) -> float:
    """How long a prompt has been here, over what it takes alone."""
    alone_s = circumstances.cost.service_s(len(sequence.tokens))
    return (circumstances.now - sequence.arrived_at) / alone_s


def room_alone_s(target_s: float, fixed_s: float) -> float:
    """Of a step's time, what prompts may take when nobody streams: no gap is to be kept short, but newcomers
    wait for a step to end. `fixed_s` is what a step takes before it computes anything: where that alone is
    near the target, short steps would take most of their time for it."""
    return max(target_s - fixed_s, FIXED_MULTIPLE * fixed_s)


def kept_for_eldest(budget_left: int, room_s: float, least_s: float) -> tuple[int, float]:
    """Of the tokens and the time that decodes leave, what is kept for the prompt that has been computed for
    longest, whoever ranks above it: an `ELDER_TURN`-th of both, so that those above it do not stop it.
    `least_s` is what one token of it takes, which is much where it reads a long context: as much is kept
    then, up to half."""
    return -(-budget_left // ELDER_TURN), min(max(room_s / ELDER_TURN, least_s), room_s / 2)


def choose_stalled(stalled: Iterable[Sequence], pages_freed: Callable[[Sequence], int]) -> Sequence:
    """Which stalled sequence gives its pages back first: one that frees some at once; of those one of
    the lowest class, and of those the one whose reader has been away longest. Who is resumed already
    comes last.

    Somebody is chosen even when none frees a page alone, because two who share it do so one by one.
    """

    def cost(sequence: Sequence) -> tuple[bool, bool, int, float, int]:
        since = math.inf if sequence.paused_at is None else sequence.paused_at
        is_read = sequence.paused_at is None
        return (not pages_freed(sequence), is_read, sequence.service_class, since, sequence.handle)

    return min(stalled, key=cost)


def by_expendability(
    running: Iterable[Sequence],
    restore_s: Callable[[Sequence], float],
    seats: Seats,
    above: float = -math.inf,
) -> list[Sequence]:
    """Whom to preempt first: the lowest class; of that, the tenant that holds most, less what those before it
    in this list hold; of its own, who is restored at the least cost, by whichever way is cheaper
    (`engine.core.swap`); of those, who came last. Only of tenants that hold more than `above`, a dominant
    share."""

    def key(sequence: Sequence) -> tuple[float, float, int]:
        return (restore_s(sequence), -sequence.arrived_at, -sequence.handle)

    of_class: dict[ServiceClass, dict[str, list[Sequence]]] = defaultdict(lambda: defaultdict(list))
    for sequence in running:
        of_class[sequence.service_class][sequence.tenant].append(sequence)
    ordered: list[Sequence] = []
    slots, pages = Counter[str](), Counter[str]()  # of those in the list
    for _, of_tenant in sorted(of_class.items()):
        for those in of_tenant.values():
            those.sort(key=key, reverse=True)
        shares = [(-seats.share(t, slots=-slots[t], pages=-pages[t]), t) for t in of_tenant]
        heapify(shares)
        while shares and -shares[0][0] > above:
            _, tenant = heappop(shares)
            ordered.append(least := of_tenant[tenant].pop())
            slots[tenant] += 1
            pages[tenant] += len(least.pages)
            if of_tenant[tenant]:
                share = seats.share(tenant, slots=-slots[tenant], pages=-pages[tenant])
                heappush(shares, (-share, tenant))
    return ordered


def choose_victims(
    running: Iterable[Sequence],
    pages_needed: int,
    pages_freed: Callable[[Sequence], int],
    restore_s: Callable[[Sequence], float],
    seats: Seats,
) -> list[Sequence]:
    """Whom to preempt so that `pages_needed` become available, when no stalled sequence can help: in
    the order of expendability, as few as do.

    `pages_freed` says what preempting a sequence would bring at once; whoever would bring nothing is
    passed over, since hurting it helps nobody. Feasibility first: when all together would not bring
    enough, nobody is chosen.
    """
    victims, pages = [], 0
    for sequence in by_expendability(running, restore_s, seats):
        if pages >= pages_needed:
            break
        if freed := pages_freed(sequence):
            victims.append(sequence)
            pages += freed
    return victims if pages >= pages_needed else []
