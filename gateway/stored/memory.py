"""Responses in this process's memory: for one gateway, until it ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from gateway.config.responses import ResponsesConfig
from gateway.stored.responses import (
    EVICTED,
    LINKS_MAX,
    PAGE_LEN,
    KeepingBounds,
    KeptResponse,
    KeptTurn,
    NoRoom,
    TurnsPage,
)
from shared.fairness.fair_share import FairShare
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.metrics import Gauge
from shared.wire.ids import TenantId

SWEEP_S: Final = 1.0
"""The time between two looks for what has expired, in seconds."""
SWEPT_AT_ONCE: Final = 256
"""Tenants that are looked at before others have their turn."""

HELD_BYTES: Final = Gauge(
    "penstock_gateway_responses_held_bytes", "Bytes of responses that are kept in memory."
)


class _Entry(Struct, frozen=True):
    kept: KeptResponse
    used_ms: float


class MemoryResponses:
    """A `ResponseStore`."""

    def __init__(self, config: ResponsesConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        self._bounds: Final = KeepingBounds.of(config)
        self._clock: Final = clock
        self._share: Final = FairShare(config.memory)
        self._tenants: Final[dict[TenantId, OrderedDict[str, _Entry]]] = {}
        """Each tenant's responses, those first that were used longest ago."""
        HELD_BYTES.set_function(lambda: self._share.held)

    async def put(self, tenant: TenantId, kept: KeptResponse) -> None:
        entries = self._of(tenant)
        if kept.id in entries:
            self._drop(tenant, entries, kept.id)
        for id_ in [one.id for one in self._line(entries, kept.previous)]:
            self._use(entries, id_)
        while not self._has_room(tenant, kept.size):
            if not entries:
                self._tenants.pop(tenant, None)
                raise NoRoom
            self._drop(tenant, entries, next(iter(entries)))
            EVICTED.inc()
        self._tenants[tenant] = entries
        entries[kept.id] = _Entry(kept, self._now_ms())

    async def get(self, tenant: TenantId, id_: str) -> KeptResponse | None:
        entry = self._of(tenant).get(id_)
        return None if entry is None else entry.kept

    async def turns(self, tenant: TenantId, id_: str) -> TurnsPage:
        entries, found, length = self._of(tenant), list[KeptTurn](), 0
        for kept in self._line(entries, id_):
            found.append(KeptTurn(kept.id, kept.items, kept.output))
            length += len(kept.items) + len(kept.output)
            id_ = kept.previous
            if length >= PAGE_LEN:
                break
        is_lost = bool(id_) and id_ not in entries
        return TurnsPage(found, "" if is_lost else id_, id_ if is_lost else "")

    async def delete(self, tenant: TenantId, id_: str) -> bool:
        entries = self._of(tenant)
        if id_ not in entries:
            return False
        self._drop(tenant, entries, id_)
        return True

    async def forget(self, tenant: TenantId) -> int:
        entries = self._of(tenant)
        self._share.release(tenant, self._share.held_by(tenant))
        self._tenants.pop(tenant, None)
        return len(entries)

    async def begin(self) -> None:
        """Nothing: it is there."""

    async def watch(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            for at, tenant in enumerate(list(self._tenants), 1):
                if not self._of(tenant):
                    self._tenants.pop(tenant, None)
                if at % SWEPT_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Nothing: it goes with the process."""

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000

    def _of(self, tenant: TenantId) -> OrderedDict[str, _Entry]:
        """The tenant's responses that have not expired."""
        entries = self._tenants.get(tenant)
        if entries is None:
            return OrderedDict()
        since_ms = self._now_ms() - self._bounds.ttl_ms
        while entries and (oldest := next(iter(entries.values()))).used_ms <= since_ms:
            self._drop(tenant, entries, oldest.kept.id)
        return entries

    def _line(self, entries: OrderedDict[str, _Entry], id_: str) -> Iterator[KeptResponse]:
        """A response and those that it goes on with, as far as they are kept."""
        for _ in range(LINKS_MAX):
            if (entry := entries.get(id_)) is None:
                return
            yield entry.kept
            id_ = entry.kept.previous

    def _use(self, entries: OrderedDict[str, _Entry], id_: str) -> None:
        entries[id_] = _Entry(entries[id_].kept, self._now_ms())
        entries.move_to_end(id_)

    def _has_room(self, tenant: TenantId, size: int) -> bool:
        """Take the bytes, if there is room for them."""
        is_within = self._share.held_by(tenant) + size <= self._bounds.tenant_len_max
        return is_within and self._share.acquire(tenant, size)

    def _drop(self, tenant: TenantId, entries: OrderedDict[str, _Entry], id_: str) -> None:
        self._share.release(tenant, entries.pop(id_).kept.size)
