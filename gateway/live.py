"""The requests in progress: how many, whose, and how to end them.

A tenant's part of the places is bounded by what is left of them (`shared.fair_share`), so that a tenant whose
requests never get on, as those whose bodies do not arrive, leaves room for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.admission.quota import ReservationId
from gateway.exchange import Exchange
from shared.errors import ApiError, NotReady, Overloaded
from shared.fair_share import FairShare
from shared.ids import RequestId, TenantId


class LiveRequests:
    def __init__(self, live_max: int) -> None:
        self._share = FairShare(live_max)
        self._claims: dict[Exchange, TenantId] = {}
        self._exchanges: set[Exchange] = set()
        self._drained = asyncio.Event()
        """Set while nothing is left and nothing can come."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._exchanges)

    def enter(self, exchange: Exchange) -> None:
        """`leave` must follow. Raises NotReady while the gateway drains."""
        if self._stopping:
            raise NotReady("The gateway is shutting down.", retry_after_s=1.0)
        self._exchanges.add(exchange)

    def claim(self, exchange: Exchange, tenant: TenantId) -> None:
        """Take one of the places that requests may wait at. Raises Overloaded when the tenant has its
        share."""
        if not self._share.take(tenant, 1):
            raise Overloaded(
                "The gateway is serving as many requests as it may.",
                retry_after_s=1.0,
                detail=f"requests: {self._share.told(tenant, 1)}",
            )
        self._claims[exchange] = tenant

    def leave(self, exchange: Exchange) -> None:
        self._exchanges.remove(exchange)
        if (tenant := self._claims.pop(exchange, None)) is not None:
            self._share.give_back(tenant, 1)
        if self._stopping and not self._exchanges:
            self._drained.set()

    def end(self, tenant: TenantId, request_id: RequestId, reason: Callable[[], ApiError]) -> int:
        """End this tenant's requests of exactly this id. Several may carry it: the caller chose it."""
        found = [
            exchange
            for exchange in self._exchanges
            if exchange.request_id == request_id
            and exchange.principal is not None
            and exchange.principal.tenant == tenant
        ]
        for exchange in found:
            exchange.watch.end(reason())
        return len(found)

    def end_all(self, reason: Callable[[], ApiError]) -> None:
        for exchange in list(self._exchanges):
            exchange.watch.end(reason())

    def reservations(self) -> list[ReservationId]:
        """Those whose leases are to be renewed."""
        return [exchange.reservation for exchange in self._exchanges if exchange.is_seated]

    async def drain(self, within_s: float, reason: Callable[[], ApiError]) -> bool:
        """Refuse new requests, wait for the open ones, and end what is left after so long.

        Returns whether nothing had to be ended.
        """
        self._stopping = True
        if not self._exchanges:
            self._drained.set()
        try:
            async with asyncio.timeout(within_s):
                await self._drained.wait()
        except TimeoutError:
            self.end_all(reason)
            await self._drained.wait()
            return False
        return True
