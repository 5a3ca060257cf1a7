"""A quota store that other processes share may be slow, or gone; requests and leases must outlive that.

Rules

1. The store bounds its calls in time, and knows when it is down: it then answers at once.
2. While it cannot be asked, each tenant gets what its `fail` says. *closed*: no seat and no tokens, but a 503
   that asks for a retry. *local*: a memory store of this process decides, with this gateway's part of each
   limit. It knows what was used during outages alone.
3. A request may have its seat from one store and its tokens from the other. It is settled with both.
4. Nothing else that fails changes anything: a request has the end that it has, though it could not be
   settled. The store settles it later, or its lease lapses by itself.
5. Leases are renewed at intervals, and much more often while the store is down: each renewal is the probe
   that finds it well again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import (
    Decision,
    QuotaStore,
    ReservationId,
    Settlement,
    StoreUnavailable,
    Subject,
    Windows,
)
from gateway.config import QuotaLimits
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import QuotaUnavailable
from shared.metrics import Counter, Gauge

SHARES_MAX: Final = 16 * 1024

log = logs.get(__name__)

FAILURES: Final = Counter(
    "penstock_gateway_quota_store_failures", "Calls that the quota store did not answer.", ["call"]
)
WITHOUT_STORE: Final = Counter(
    "penstock_gateway_quota_without_store",
    "Seats and reservations that were asked for while the quota store could not be asked.",
    ["fail"],
)
STORE_UP: Final = Gauge("penstock_gateway_quota_store_up", "1 while the quota store can be asked.")


class SharedStore(QuotaStore, Protocol):
    """A store that other processes share."""

    @property
    def is_well(self) -> bool:
        """True if it can be asked."""
        ...


class GuardedStore:
    """A `QuotaStore` around one that may fail."""

    def __init__(self, store: SharedStore, gateways: int = 1, clock: Clock = SYSTEM_CLOCK) -> None:
        """`gateways`: processes that share the store; each allows this part of a limit on its own."""
        self._store: Final = store
        self._local: Final = MemoryStore(clock)
        self._share = lru_cache(SHARES_MAX)(lambda subjects: tuple(_share(s, gateways) for s in subjects))
        STORE_UP.set_function(lambda: float(store.is_well))

    @property
    def is_well(self) -> bool:
        """True if the store can be asked."""
        return self._store.is_well

    async def enter(
        self, reservation: ReservationId, subjects: Sequence[Subject], *, needs_tokens: bool
    ) -> Decision:
        """Raises QuotaUnavailable."""
        try:
            return await self._store.enter(reservation, subjects, needs_tokens=needs_tokens)
        except StoreUnavailable as error:
            local = self._without_store("enter", error, subjects)
        return _of_share(await self._local.enter(reservation, local, needs_tokens=needs_tokens))

    async def reserve(
        self, reservation: ReservationId, subjects: Sequence[Subject], least: int, most: int
    ) -> Decision:
        """Raises QuotaUnavailable."""
        if not self._local.holds(reservation):
            try:
                return await self._store.reserve(reservation, subjects, least, most)
            except StoreUnavailable as error:
                self._without_store("reserve", error, subjects)
        local = self._share(tuple(subjects))
        return _of_share(await self._local.reserve(reservation, local, least, most))

    async def settle(self, reservation: ReservationId, tokens: int) -> Settlement | None:
        """None, too, when the store did not answer: it settles later, or the reserved tokens stay charged."""
        local = await self._local.settle(reservation, tokens)
        try:
            return await self._store.settle(reservation, tokens) or local
        except StoreUnavailable as error:
            self._failed("settle", error)
            return local

    async def renew(self, reservations: Sequence[ReservationId]) -> None:
        """Extend the leases, and find out whether the store is well."""
        await self._local.renew(reservations)
        try:
            await self._store.renew(reservations)
        except StoreUnavailable as error:
            self._failed("renew", error)

    async def windows(self, subjects: Sequence[Subject]) -> Windows:
        """Empty when the store did not answer."""
        try:
            return await self._store.windows(subjects)
        except StoreUnavailable as error:
            self._failed("windows", error)
            return Windows()

    def _without_store(
        self, call: str, error: StoreUnavailable, subjects: Sequence[Subject]
    ) -> tuple[Subject, ...]:
        """Rule 2: the subjects with their part of the limits. Raises QuotaUnavailable."""
        self._failed(call, error)
        fail = subjects[0].fail if subjects else "closed"
        WITHOUT_STORE.inc(fail)
        if fail == "closed":
            raise _unavailable(f"{call}: {error}") from None
        return self._share(tuple(subjects))

    def _failed(self, call: str, error: StoreUnavailable) -> None:
        FAILURES.inc(call)
        log.debug("quota.store_failed", call=call, error=str(error)[:200])


def _share(subject: Subject, gateways: int) -> Subject:
    """The subject with the part of its limits that one of so many gateways has."""
    limits = subject.limits
    parts = (
        None if limit is None else limit // gateways
        for limit in (limits.requests_per_min, limits.tokens_per_min, limits.concurrent, limits.token_budget)
    )
    return Subject(subject.scope, subject.id, QuotaLimits(*parts), subject.tenant, subject.fail)


def _of_share(decision: Decision) -> Decision:
    """The decision about this gateway's part of a limit. Where waiting would not end its refusal, the
    whole limit may have room, and can be asked later. Raises QuotaUnavailable."""
    if decision.refusal is not None and decision.refusal.retry_after_ms is None:
        raise _unavailable(f"more {decision.refusal.meter} than this gateway's part of the limit")
    return decision


def _unavailable(detail: str) -> QuotaUnavailable:
    message = "Quotas cannot be asked for at the moment. Please try again."
    return QuotaUnavailable(message, retry_after_s=1.0, detail=detail)
