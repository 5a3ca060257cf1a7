"""Who has been served how much, and who holds how much: the past, which orders the queue, and the present,
which says who yields a seat.

`TenantCounters` is one virtual counter of tokens for each tenant, after the virtual token counter of Sheng et
al., "Fairness in Serving Large Language Models" (2024). Of two tenants that both have work waiting, the one
with the smaller counter has been served less. Only differences matter, and only up to `SPAN_TOKENS`: when
tenants compete, whoever lags further behind the most served of them is lifted to that distance. So who has
been away, or is new, gets a head start of `SPAN_TOKENS` at most and starves nobody; and who used an idle
engine owes no more than that for it.

The counters of `TENANTS_MAX` tenants are kept, those of the longest unheard of are forgotten first;
being forgotten is being new.

`Seats` is what the running sequences of each tenant hold. A tenant's *dominant share* is the larger of its
shares of the slots and of the pages, after Ghodsi et al., "Dominant Resource Fairness" (2011). A seat goes
from a tenant to another only where the one holds more than the other will, so every such move brings the two
nearer to each other, and none is undone by a move back. A page that several sequences share counts for each
of them, so a share may exceed 1.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

SPAN_TOKENS: Final = 16_384
TENANTS_MAX: Final = 4096


class TenantCounters:
    def __init__(self, tenants_max: int = TENANTS_MAX) -> None:
        assert tenants_max >= 1
        self._tenants_max = tenants_max
        self._served: OrderedDict[str, int] = OrderedDict()

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens were computed for it."""
        assert tokens >= 0
        self._set(tenant, self._served.get(tenant, 0) + tokens)

    def leads(self, competing: Iterable[str]) -> dict[str, int]:
        """By how many tokens each of these is ahead of the least served of them; 0 to `SPAN_TOKENS`.

        Lifts those that lag too far behind.
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
        self._served.move_to_end(tenant)
        if len(self._served) > self._tenants_max:
            self._served.popitem(last=False)


class Seats:
    """Slots and pages of those who run, by tenant."""

    def __init__(self, slots: int, pages: int) -> None:
        self._slots_total: Final = slots
        self._pages_total: Final = pages
        self._slots: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()

    @property
    def slots(self) -> Mapping[str, int]:
        """Of those tenants who have any."""
        return self._slots

    def add(self, tenant: str, *, slots: int, pages: int) -> None:
        """It holds so many more than before, or fewer."""
        self._slots[tenant] += slots
        self._pages[tenant] += pages
        assert self._slots[tenant] >= 0
        assert self._pages[tenant] >= 0
        if not self._slots[tenant]:
            assert not self._pages[tenant]
            del self._slots[tenant], self._pages[tenant]

    def share(self, tenant: str, *, slots: int = 0, pages: int = 0) -> float:
        """Its dominant share, with so many slots and pages more, or fewer."""
        slots_share = (self._slots[tenant] + slots) / self._slots_total
        return max(slots_share, (self._pages[tenant] + pages) / self._pages_total)

    def check(self, held: Iterable[tuple[str, int]]) -> None:
        """Assert that this is what those who run hold, given the tenant and the pages of each."""
        slots, pages = Counter[str](), Counter[str]()
        for tenant, count in held:
            slots[tenant] += 1
            pages[tenant] += count
        assert (self._slots, self._pages) == (slots, pages)
