"""A quota store that other processes share may be slow, or gone; requests and leases must outlive that.

Rules

1. The store bounds its calls in time, and knows when it is down: it then answers at once.
2. While it cannot be asked, each tenant gets what its `fail` says. *closed*: no seat and no tokens, but a 503
   that asks for a retry. *local*: a memory store of this process decides, with this gateway's part of each
   limit. It knows what was used during outages alone.
3. A request may have its seat from one store and its tokens from the other. It is settled with both, and
   counted by the one that granted its tokens.
4. Nothing else that fails changes anything: a request has the end that it has, though it could not be
   settled. The store settles it later, or its lease lapses by itself.
5. Leases are renewed at intervals, and much more often while the store is down: each renewal is the probe
   that finds it well again. The first one comes as soon as a request meets the outage, unless the last one
   was a moment ago: what was a hiccup is over then.
6. What is counted here, of requests without limits and during outages, is posted to the store a moment later,
   exactly once: a post whose answer is lost is sent again under its number, before any other of its tenant.
   The rows of a tenant whose server is down wait, and no others behind them; its usage is not told meanwhile.
   A process that is killed loses what it has not posted.
7. Where billing lines are written, requests without limits are noted in the store as well, and nobody waits
   for that: what a killed gateway had open lapses there, is counted, and has its line from another. One that
   is noted is counted there, and no more here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import astuple
from functools import lru_cache
from itertools import islice
from typing import Final, Protocol

from msgspec import Struct

from gateway.admission.lapsed import Lapsed
from gateway.admission.memory_store import DAYS_KEPT, MemoryStore
from gateway.admission.quota import (
    Decision,
    QuotaStore,
    ReservationId,
    Settlement,
    StoreUnavailable,
    Subject,
    Windows,
)
from gateway.admission.store_failures import failed
from gateway.admission.usage import Payer, Sheet, UsageRow, Used
from gateway.config.quotas import QuotaLimits
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.metrics import Counter, Gauge
from shared.process.shield import Done
from shared.process.waits import first_of
from shared.wire.errors import QuotaUnavailable
from shared.wire.ids import TenantId

SHARES_MAX: Final = 16 * 1024
POSTED_MAX: Final = 100
"""Rows that one call posts."""
_SEATED: Final = Decision(None, None)

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

    @property
    def is_partly_well(self) -> bool:
        """True if it can be asked about some tenants: the servers of others may be down."""
        ...

    def reaches(self, tenant: TenantId) -> bool:
        """True if it can be asked about this tenant."""
        ...

    def settle(self, reservation: ReservationId, used: Used) -> Done[Settlement | None]:
        """It waits for nobody, and does not fail: what the store could not be told, it is told later."""
        ...

    def note(
        self, reservation: ReservationId, payer: Payer, tokens: int, noted: Callable[[ReservationId], None]
    ) -> None:
        """Note a request that no limit counts, as one that has reserved these tokens. Nobody waits for it,
        and it does not fail. `noted` is called while the request is in progress, or never: from then on
        the store counts it."""
        ...

    async def post(self, source: str, number: int, tenant: TenantId, day: int, sheet: Sheet) -> None:
        """Add the rows to those of a tenant's day. `source` numbers its posts upwards, from 1 on: one that is
        sent again changes nothing."""
        ...

    async def lapsed(self, tenants: Iterable[TenantId], written: Iterable[Lapsed]) -> list[Lapsed]:
        """The reservations of these tenants whose lease ran out and that have no billing line. Nobody else is
        given them for a minute. `written`: those that have one now, of the same tenants. What a server that
        is down has, it gives later, and it may give those once more that were written meanwhile."""
        ...


class _Rows(Struct, frozen=True):
    """Rows of a tenant's day that were taken out of the local store."""

    number: int
    """The number of their post. Numbers grow in the order in which rows are taken."""
    day: int
    sheet: Sheet


class GuardedStore:
    """A `QuotaStore` around one that may fail."""

    def __init__(
        self,
        store: SharedStore,
        gateways: int = 1,
        clock: Clock = SYSTEM_CLOCK,
        days_kept: int = DAYS_KEPT,
        *,
        notes_all: bool = False,
    ) -> None:
        """`gateways`: processes that share the store; each allows this part of a limit on its own.
        `notes_all`: requests without limits are noted in the store as well (rule 7)."""
        self._store: Final = store
        self._notes_all: Final = notes_all
        self._local: Final = MemoryStore(clock, days_kept)
        self._clock: Final = clock
        self._missed: Final = asyncio.Event()
        """Set once a request was without the store."""
        self._name: Final = secrets.token_hex(8)
        self._taken = 0
        """The number of the last rows that were taken out of the local store."""
        self._unposted: dict[TenantId, deque[_Rows]] = {}
        """The rows of each tenant that were taken and are not known to be in the shared store."""
        self._posting = asyncio.Lock()
        self._share = lru_cache(SHARES_MAX)(lambda subjects: tuple(_share(s, gateways) for s in subjects))
        STORE_UP.set_function(lambda: float(store.is_well))

    @property
    def is_well(self) -> bool:
        """True if the store can be asked."""
        return self._store.is_well

    @property
    def is_partly_well(self) -> bool:
        """True if the store can be asked about some tenants."""
        return self._store.is_partly_well

    async def enter(
        self, reservation: ReservationId, subjects: Sequence[Subject], *, needs_tokens: bool
    ) -> Decision:
        """Raises QuotaUnavailable."""
        if not subjects:
            return _SEATED
        try:
            return await self._store.enter(reservation, subjects, needs_tokens=needs_tokens)
        except StoreUnavailable as error:
            local = self._without_store("enter", error, subjects)
        return _of_share(await self._local.enter(reservation, local, needs_tokens=needs_tokens))

    async def reserve(
        self,
        reservation: ReservationId,
        subjects: Sequence[Subject],
        least: int,
        most: int,
        payer: Payer | None = None,
        *,
        wanted: int = 0,
    ) -> Decision:
        """Raises QuotaUnavailable."""
        if not subjects:
            decision = self._local.reserve(reservation, subjects, least, most, payer).result
            if self._notes_all and payer is not None:
                self._store.note(reservation, payer, decision.granted, self._local.release)
            return decision
        if not self._local.holds(reservation):
            try:
                return await self._store.reserve(reservation, subjects, least, most, payer, wanted=wanted)
            except StoreUnavailable as error:
                self._without_store("reserve", error, subjects)
        local = self._share(tuple(subjects))
        return _of_share(await self._local.reserve(reservation, local, least, most, payer, wanted=wanted))

    def settle(self, reservation: ReservationId, used: Used) -> Done[Settlement | None]:
        """Where the tokens were granted here, what that makes of them."""
        local, shared = self._local.settle(reservation, used), self._store.settle(reservation, used)
        return shared if local.result is None else local

    async def renew(self, reservations: Sequence[ReservationId]) -> None:
        """Extend the leases, and find out whether the store is well."""
        await self._local.renew(reservations)
        try:
            await self._store.renew(reservations)
        except StoreUnavailable as error:
            failed("renew", error)

    async def until_missed(self, seconds: float) -> None:
        """Return after so long, or as soon as a request is without the store."""
        self._missed.clear()
        if self.is_well:
            await first_of(self._clock.sleep(seconds), self._missed.wait())

    async def windows(self, subjects: Sequence[Subject]) -> Windows:
        """Empty when the store did not answer."""
        try:
            return await self._store.windows(subjects)
        except StoreUnavailable as error:
            failed("windows", error)
            return Windows()

    async def usage(self, tenant: TenantId, first: int, last: int) -> AsyncIterator[UsageRow]:
        """Raises StoreUnavailable, also where something that was counted here is not in the store."""
        async with self._posting:
            is_posted = await self._post(tenant)
        if not is_posted:
            raise StoreUnavailable("usage that was counted here cannot be posted")
        async for row in self._store.usage(tenant, first, last):
            yield row

    async def payers(self, first: int, last: int) -> set[TenantId]:
        """Raises StoreUnavailable."""
        await self.post()
        found = await self._store.payers(first, last)
        return found | self._unposted.keys() | self._local.rows.tenants(first, last)

    async def lapsed(self, tenants: Iterable[TenantId], written: Iterable[Lapsed]) -> list[Lapsed]:
        """See `SharedStore`."""
        return await self._store.lapsed(tenants, written)

    async def post(self) -> None:
        """Post what was counted here to the store, exactly once (rule 6). What cannot be posted now is
        kept."""
        async with self._posting:
            for tenant in self._unposted.keys() | self._local.rows.tenants():
                await self._post(tenant)

    async def _post(self, tenant: TenantId) -> bool:
        """Post what was counted of a tenant. Returns whether all is in the store that was counted before.

        Nothing more is taken while something waits: the local store adds up the requests of an outage, so
        that its rows are bounded."""
        if not await self._post_taken(tenant):
            return False
        for day, sheet in self._local.rows.take(tenant):
            rows = iter(sheet.items())
            while part := dict(islice(rows, POSTED_MAX)):
                self._taken += 1
                self._unposted.setdefault(tenant, deque()).append(_Rows(self._taken, day, part))
        return await self._post_taken(tenant)

    async def _post_taken(self, tenant: TenantId) -> bool:
        """Post what was taken of a tenant. Returns whether nothing is left of it, and more can be posted."""
        waiting = self._unposted.get(tenant, ())
        while waiting and self._store.reaches(tenant):
            rows = waiting[0]
            try:
                await self._store.post(self._name, rows.number, tenant, rows.day, rows.sheet)
            except StoreUnavailable as error:
                failed("post", error)
                return False
            del waiting[0]
        if not waiting:
            self._unposted.pop(tenant, None)
        return self._store.reaches(tenant)

    def _without_store(
        self, call: str, error: StoreUnavailable, subjects: Sequence[Subject]
    ) -> tuple[Subject, ...]:
        """The subjects with this gateway's part of the limits, during an outage (rule 2). Raises
        QuotaUnavailable, where the tenant's `fail` is closed."""
        failed(call, error)
        self._missed.set()
        fail = subjects[0].fail if subjects else "closed"
        WITHOUT_STORE.inc(fail)
        if fail == "closed":
            raise _unavailable(f"{call}: {error}") from None
        return self._share(tuple(subjects))


def _share(subject: Subject, gateways: int) -> Subject:
    """The subject with the part of its limits that one of so many gateways has."""
    parts = (None if limit is None else limit // gateways for limit in astuple(subject.limits))
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
