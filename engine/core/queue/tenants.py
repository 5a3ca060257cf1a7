"""Fairness between tenants: how much each has been served, which orders the queue, and how much each holds
now, which decides whose sequences yield their slots.

`TenantCounters` has one virtual counter of tokens for each tenant, after the virtual token counter of Sheng
et al., "Fairness in Serving Large Language Models" (2024). Of two tenants that both have work waiting, the
one with the smaller counter has been served less. Only differences matter, and only up to `SPAN_TOKENS`: when
tenants compete, one that lags further behind the most served of them is lifted to that distance. A tenant
that is new or was away begins near the least served of those that are here, as by start-time fair queueing
(Goyal, Vin and Cheng, 1996): what others used meanwhile is no credit of its own. It begins `ARRIVAL_TOKENS`
behind, by which the share of those that are here is halved: of equal requests the newcomer's goes before a
flood's. Where none is here, all begin level: who used an idle engine owes nothing for it.

The counters of `TENANTS_MAX` tenants are kept. Beyond that the tenant whose counter has not changed for
longest is forgotten, and counts as new when it comes back.

`TenantHoldings` has what the running sequences of each tenant hold. A tenant's *dominant share* is the larger
of its shares of the slots and of the pages, after Ghodsi et al., "Dominant Resource Fairness" (2011). A slot
goes from one tenant to another only where the one holds more than the other will, so every such move brings
the two nearer to each other, and none is undone by a move back. A page that several sequences share counts
for each of them, so a share may exceed 1.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from engine.core.queue.policy import SHARE_FREE, SHARE_HALVED_BY

SPAN_TOKENS: Final = 16_384
"""The largest difference between the counters of competing tenants, in tokens."""
ARRIVAL_TOKENS: Final = SHARE_FREE + SHARE_HALVED_BY
"""The tokens by which a tenant that comes begins behind the least served."""
TENANTS_MAX: Final = 4096
"""Tenants whose counters are kept."""


class TenantCounters:
    """The tokens that were computed for each tenant."""

    def __init__(self, tenants_max: int = TENANTS_MAX) -> None:
        assert tenants_max >= 1
        self._tenants_max = tenants_max
        self._served: OrderedDict[str, int] = OrderedDict()
        self._most = 0
        """The largest counter that there was."""
        self._here: Counter[str] = Counter()
        """The number of sequences of each tenant that has any."""
        self.admitted_at: Final[dict[str, float]] = {}
        """When a sequence of each tenant that has any was last admitted."""

    def enter(self, tenant: str) -> None:
        """Count one more sequence of this tenant. One that has none is lifted to a little behind the least
        served of those that have any, or to the most served of all where none has."""
        if tenant not in self._here:
            here = [self._served.get(each, 0) for each in self._here]
            floor = min(here) - ARRIVAL_TOKENS if here else self._most
            self._set(tenant, max(self._served.get(tenant, 0), floor))
        self._here[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count one sequence of this tenant less."""
        self._here[tenant] -= 1
        assert self._here[tenant] >= 0
        if not self._here[tenant]:
            del self._here[tenant]
            self.admitted_at.pop(tenant, None)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count `tokens` as computed for this tenant."""
        assert tokens >= 0
        self._set(tenant, self._served.get(tenant, 0) + tokens)

    def leads(self, competing: Iterable[str]) -> dict[str, int]:
        """The tokens by which each tenant is ahead of the least served of `competing`, 0 to `SPAN_TOKENS`.

        Lifts the counters of those that lag further behind.
        """
        tenants = set(competing)
        floor = max((self._served.get(tenant, 0) for tenant in tenants), default=0) - SPAN_TOKENS
        for tenant in tenants:
            if self._served.get(tenant, 0) < floor:
                self._set(tenant, floor)
        least = min((self._served.get(tenant, 0) for tenant in tenants), default=0)
        return {tenant: self._served.get(tenant, 0) - least for tenant in tenants}

    def _set(self, tenant: str, served: int) -> None:
        self._served[tenant] = served
        self._most = max(self._most, served)
        self._served.move_to_end(tenant)
        if len(self._served) > self._tenants_max:
            self._served.popitem(last=False)


class TenantHoldings:
    """The slots and pages that the running sequences of each tenant hold."""

    def __init__(self, slots: int, pages: int) -> None:
        """`slots` and `pages` are all that the runner has."""
        self._slots_total: Final = slots
        self._pages_total: Final = pages
        self._slots: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()

    @property
    def slots(self) -> Mapping[str, int]:
        """Slots by tenant; tenants without any are left out."""
        return self._slots

    @property
    def most(self) -> float:
        """The largest dominant share of a tenant that holds several slots, and so may yield one; 0.0 where
        none does."""
        return max((self.share(tenant) for tenant, slots in self._slots.items() if slots > 1), default=0.0)

    def add(self, tenant: str, *, slots: int, pages: int) -> None:
        """Count so many slots and pages more for this tenant; negative numbers are fewer."""
        self._slots[tenant] += slots
        self._pages[tenant] += pages
        assert self._slots[tenant] >= 0
        assert self._pages[tenant] >= 0
        if not self._slots[tenant]:
            assert not self._pages[tenant]
            del self._slots[tenant], self._pages[tenant]

    def share(self, tenant: str, *, slots: int = 0, pages: int = 0) -> float:
        """The tenant's dominant share if it held so many slots and pages more; negative numbers are fewer."""
        slots_share = (self._slots[tenant] + slots) / self._slots_total
        return max(slots_share, (self._pages[tenant] + pages) / self._pages_total)
