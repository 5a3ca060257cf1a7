"""Who has been served how much: one virtual counter of tokens for each tenant.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (2024). Of
two tenants that both have work waiting, the one with the smaller counter has been served less. Only
differences matter, and only up to `SPAN_TOKENS`: when tenants compete, whoever lags further behind the
most served of them is lifted to that distance. So who has been away, or is new, gets a head start of
`SPAN_TOKENS` at most and starves nobody; and who used an idle engine owes no more than that for it.

The counters of `TENANTS_MAX` tenants are kept, those of the longest unheard of are forgotten first;
being forgotten is being new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
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
