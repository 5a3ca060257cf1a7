"""The choice of victims, for preemption: which sequences lose their slot and pages, and in which order.

Pure functions that read sequences and change nothing; `engine.core.step.allocator` says when a victim is
needed, and preempts it.

A sequence that waits with pages, because it stalled or yielded its slot, is chosen before one that runs.
Running ones are chosen by class, then by what their tenant holds, then by what restoring them costs
(`by_expendability`).

G. A sequence that does not fit takes slot and pages from running sequences of a lower class, if that is
   enough; otherwise from none. Protected ones (preempted as often as rule C allows) and those admitted by the
   same plan are spared.
J. Slots are shared by tenants. A sequence that does not fit, and with which its tenant would hold less than
   another tenant holds now, by their dominant shares (`engine.core.queue.tenants`), takes slot and pages from
   that other tenant, again if that is enough. Spared are the oldest running sequence of each tenant and those
   of a higher class. Protected ones are not spared: otherwise a tenant with only protected ones could keep
   every slot as long as it likes. What yields its slot keeps its pages until others lack them, as what stalls
   does: where slots alone are scarce, a yield costs nothing. Each second that restoring those will take whose
   pages were taken is paid for by a second without yields, so restoring takes at most half of the time,
   however often tenants come and go. `YIELDS_AHEAD_S` of it need not be paid for before, since newcomers come
   in bursts. Where a decode needs a page, the tenant that holds most gives one up first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Final

from engine.contract.messages import ServiceClass
from engine.core.queue.policy import age
from engine.core.queue.tenants import TenantHoldings
from engine.core.sequence import Sequence

YIELDS_AHEAD_S: Final = 1.0
"""The seconds of restoring that yields may cause before time without them has paid for it (rule J: one second
each)."""


def may_yield(running: Iterable[Sequence], sequence: Sequence) -> list[Sequence]:
    """The running sequences that rule J allows as victims for `sequence`, if their tenants hold more than its
    own will: those of other tenants and of no higher class, without the oldest of each tenant.

    So every tenant that runs keeps running, and its oldest sequence stays until it ends.
    """
    oldest: dict[str, Sequence] = {}
    for other in running:
        if other.tenant not in oldest or age(other) < age(oldest[other.tenant]):
            oldest[other.tenant] = other
    return [
        other
        for other in running
        if other.tenant != sequence.tenant
        and other.service_class <= sequence.service_class
        and other is not oldest[other.tenant]
    ]


def choose_waiting(with_pages: Iterable[Sequence], pages_freed: Callable[[Sequence], int]) -> Sequence:
    """The sequence without a slot that gives its pages back first: one that frees some at once; among those
    one that is paused; among those one of the lowest class; among those the one that has been paused for
    longest, or, where none is paused, the last that came.

    One is chosen even when none frees a page alone, because two that share a page do so one by one.
    """

    def cost(sequence: Sequence) -> tuple[bool, bool, int, float, int]:
        is_read = sequence.paused_at is None
        since = -sequence.arrived_at if sequence.paused_at is None else sequence.paused_at
        last = -sequence.handle if is_read else sequence.handle
        return (not pages_freed(sequence), is_read, sequence.service_class, since, last)

    return min(with_pages, key=cost)


def by_expendability(
    running: Iterable[Sequence],
    restore_s: Callable[[Sequence], float],
    holdings: TenantHoldings,
    above: float = -math.inf,
) -> list[Sequence]:
    """Running sequences in the order in which they are preempted: the lowest class first; in a class, one of
    the tenant that holds most, without what earlier ones in this list hold; of a tenant, the one that is
    restored at the least cost (`HostTier.restore_s`); among equals, the last that came.

    Only sequences of tenants whose dominant share is greater than `above` are in the list.
    """

    def key(sequence: Sequence) -> tuple[float, float, int]:
        return (restore_s(sequence), -sequence.arrived_at, -sequence.handle)

    of_class: dict[ServiceClass, dict[str, list[Sequence]]] = defaultdict(lambda: defaultdict(list))
    for sequence in running:
        of_class[sequence.service_class][sequence.tenant].append(sequence)
    ordered: list[Sequence] = []
    slots, pages = Counter[str](), Counter[str]()  # held by the sequences in the list
    for _, of_tenant in sorted(of_class.items()):
        in_order = set[str]()
        shares = [(-holdings.share(t, slots=-slots[t], pages=-pages[t]), t) for t in of_tenant]
        heapify(shares)
        while shares and -shares[0][0] > above:
            _, tenant = heappop(shares)
            if tenant not in in_order:
                in_order.add(tenant)
                of_tenant[tenant].sort(key=key, reverse=True)
            ordered.append(least := of_tenant[tenant].pop())
            slots[tenant] += 1
            pages[tenant] += len(least.pages)
            if of_tenant[tenant]:
                share = holdings.share(tenant, slots=-slots[tenant], pages=-pages[tenant])
                heappush(shares, (-share, tenant))
    return ordered


def choose_victims(
    running: Iterable[Sequence],
    pages_needed: int,
    pages_freed: Callable[[Sequence], int],
    restore_s: Callable[[Sequence], float],
    holdings: TenantHoldings,
) -> list[Sequence]:
    """The running sequences to preempt so that `pages_needed` become available, when no stalled sequence can
    help: in the order of expendability, as few as are enough, and none when all together are not enough.

    `pages_freed` gives the pages that preempting a sequence makes available at once; one that would free none
    is passed over.
    """
    victims, pages = [], 0
    for sequence in by_expendability(running, restore_s, holdings):
        if pages >= pages_needed:
            break
        if freed := pages_freed(sequence):
            victims.append(sequence)
            pages += freed
    return victims if pages >= pages_needed else []
