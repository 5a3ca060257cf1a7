"""Billing lines for requests that nobody settled: those of gateways that were killed.

Redis keeps a reservation whose lease ran out until a gateway says that its line is written
(`gateway.admission.quota.lua`). The living gateways ask for them in turns.

Rules:

1. What a gateway is given, nobody else is given for a minute. It writes the line, and says so once the line
   is in the file, however many others are queued. Where it dies in between, another one is given the same: so
   a line comes at least once, and its id, the reservation's, tells.
2. In a Cluster each tenant's are on a node of their own: a turn asks for `TENANTS_MAX` tenants, the next one
   for the following ones, so that many tenants make no turn longer. A turn goes on until there are no more.
3. A server that is down is asked again in a later turn. What it could not be told is written it gives once
   more.
4. The gateway may live after all, and settle its requests. The store then knows what was used, and gives no
   longer what it has not given yet; else there are two lines, and that of the settlement, which has a
   `request_id`, counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, islice
from typing import Final

from gateway.admission.guarded_store import GuardedStore
from gateway.admission.lapsed import Lapsed
from gateway.admission.usage import Used
from gateway.billing.lines import Billing
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.ids import TenantId

TURN_S: Final = 5.0
"""The time between two turns, in seconds."""
TENANTS_MAX: Final = 64


class Unsettled:
    """The requests that other gateways left: `write` as a background task."""

    def __init__(
        self,
        store: GuardedStore,
        billing: Billing,
        tenants: Callable[[], Collection[TenantId]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store: Final = store
        self._billing: Final = billing
        self._tenants: Final = tenants
        self._clock: Final = clock
        self._turns = 0

    async def write(self) -> None:
        """Write lines as reservations lapse, until cancelled."""
        while True:
            await self._clock.sleep(TURN_S)
            await self.turn()

    async def turn(self) -> None:
        """Write the lines of those that lapsed."""
        tenants = self._next_tenants()
        found: list[Lapsed] = []
        while found := await self._store.lapsed(tenants, found):
            for one in found:
                used = Used(estimated=one.tokens)
                self._billing.note(one.reservation, None, one.payer, used, one.reserved_s)
            await self._billing.written()

    def _next_tenants(self) -> set[TenantId]:
        """The tenants of this turn, `TENANTS_MAX` at most; the next turn has those that follow (rule 2)."""
        tenants = sorted(self._tenants())
        start = self._turns * TENANTS_MAX % max(1, len(tenants))
        self._turns += 1
        return set(islice(chain(tenants[start:], tenants), TENANTS_MAX))
