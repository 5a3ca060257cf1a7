"""Quotas in Redis: what all gateways together count.

`quota.lua` reads, decides and charges, all in one call; see there for the keys. Here the calls are put
together, and refusals and windows worked out from the usage that they return, by `quota.py`'s arithmetic.

Rules:

1. A reservation is settled by the store that made it: it keeps the reservation's subjects until Redis has
   answered its settlement. One that could not be sent goes out with the first renewal that succeeds.
2. A renewal is also the probe that brings a link up which is down, and a write: a server that only reads is
   none for quotas.
3. A request without limits is not counted, and nothing is asked for it.
4. A call whose keys another node has now is sent there, at once and once: within two calls' time, and that of
   connecting where the node was not known, which is bounded by a call's time as well.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from msgspec import Struct

from gateway.admission import quota
from gateway.admission.quota import (
    LEASE_TTL_MS,
    Decision,
    Holding,
    ReservationId,
    Settlement,
    StoreUnavailable,
    Subject,
    Usage,
    Windows,
)
from gateway.admission.redis_link import Moved, RedisLink, ScriptMissing, Word
from gateway.admission.redis_links import Links, tag_of
from gateway.config import QuotaLimits
from shared.clock import Clock
from shared.ids import TenantId

SCRIPT: Final = (Path(__file__).parent / "quota.lua").read_text()
SCRIPT_SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""Its name among the scripts that a server has cached."""
RENEWED_MAX: Final = 256
"""Leases that one call renews."""
ENCODED_MAX: Final = 16 * 1024
_SEATED: Final = Decision(None, None)
_NO_SEAT: Final = -2
_FOR_THE_CALLER: Final = ("enter", "reserve")
"""Operations that are not to be done once their caller no longer waits; the others are right however late."""


class _Held(Struct):
    subjects: tuple[Subject, ...]
    used: int | None = None
    """The tokens to settle with; None while the request is in progress."""


class RedisStore:
    """A `QuotaStore`. Its calls raise StoreUnavailable."""

    def __init__(
        self,
        links: Links,
        prefix: str,
        *,
        lease_ttl_ms: int = LEASE_TTL_MS,
        clock: Clock | None = None,
    ) -> None:
        """`prefix` begins every key. `clock` decides in place of the server's; tests alone give one."""
        self._links: Final = links
        self._prefix: Final = prefix
        self._lease_ttl_ms: Final = lease_ttl_ms
        self._clock: Final = clock
        self._encoded = lru_cache(ENCODED_MAX)(self._encode)
        self._held: dict[ReservationId, _Held] = {}
        self._knows_servers = False
        self._has_followed = False
        """True if a call was sent on to another node since the nodes were asked for their slots."""

    @property
    def is_well(self) -> bool:
        """True if all servers are known, and the last call of each came back."""
        return self._knows_servers and all(link.is_up for link in self._links.all())

    async def enter(
        self, reservation: ReservationId, subjects: Sequence[Subject], *, needs_tokens: bool
    ) -> Decision:
        if not subjects:
            return _SEATED
        self._links.of(subjects[0].tenant).require_up()
        held = self._hold(reservation, subjects)
        reply = await self._run("enter", reservation, held.subjects, int(needs_tokens))
        if reply[1] == 0:
            return _SEATED
        del self._held[reservation]
        return _refused(_holdings(subjects, reply), seats=1, tokens=int(needs_tokens))

    async def reserve(
        self, reservation: ReservationId, subjects: Sequence[Subject], least: int, most: int
    ) -> Decision:
        assert 0 <= least <= most
        if not subjects:
            return Decision(None, Windows(), most)
        self._links.of(subjects[0].tenant).require_up()
        held = self._hold(reservation, subjects)
        reply = await self._run("reserve", reservation, held.subjects, least, most)
        holdings = _holdings(subjects, reply)
        if (granted := reply[1]) >= 0:
            return Decision(None, quota.windows_of(holdings), granted)
        if granted == _NO_SEAT:
            del self._held[reservation]
        return _refused(holdings, seats=int(granted == _NO_SEAT), tokens=least)

    async def settle(self, reservation: ReservationId, tokens: int) -> Settlement | None:
        """Tried again with the next renewal when it fails."""
        assert tokens >= 0
        held = self._held.get(reservation)
        if held is None:
            return None
        held.used = tokens
        reply = await self._run("settle", reservation, held.subjects, tokens)
        self._held.pop(reservation, None)
        return Settlement(reply[1], tokens) if reply[1] >= 0 else None

    async def renew(self, reservations: Sequence[ReservationId]) -> None:
        """Rule 2."""
        if self._has_followed or not self.is_well:
            await self._links.refresh()
            self._knows_servers, self._has_followed = True, False
        probes = (link.probe(*self._probe(self._links.tag_of(link))) for link in self._links.all())
        probed = await asyncio.gather(*probes, return_exceptions=True)
        renewed = await asyncio.gather(*self._renewals(reservations), return_exceptions=True)
        for problem in (*probed, *renewed):
            if isinstance(problem, BaseException):
                raise problem

    def _renewals(self, reservations: Sequence[ReservationId]) -> Iterable[Awaitable[object]]:
        """Leases to extend, and settlements that could not be sent before."""
        by_tenant: defaultdict[TenantId, list[ReservationId]] = defaultdict(list)
        for reservation in reservations:
            if (held := self._held.get(reservation)) is not None and held.used is None:
                by_tenant[held.subjects[0].tenant].append(reservation)
        for tenant, renewed in by_tenant.items():
            for i in range(0, len(renewed), RENEWED_MAX):
                yield self._renew(tenant, renewed[i : i + RENEWED_MAX])
        for name, held in self._held.items():
            if held.used is not None:
                yield self.settle(name, held.used)

    async def windows(self, subjects: Sequence[Subject]) -> Windows:
        if not subjects:
            return Windows()
        reply = await self._run("windows", ReservationId(""), tuple(subjects))
        return quota.windows_of(_holdings(subjects, reply))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._links.aclose()

    # -- calls ------------------------------------------------------------------------------------

    def _hold(self, reservation: ReservationId, subjects: Sequence[Subject]) -> _Held:
        held = self._held.get(reservation)
        if held is None:
            held = self._held[reservation] = _Held(tuple(subjects))
        return held

    async def _run(
        self,
        operation: str,
        reservation: ReservationId,
        subjects: tuple[Subject, ...],
        a: int = 0,
        b: int = 0,
    ) -> list[int]:
        link = self._links.of(subjects[0].tenant)
        now_ms, not_after_ms = 0, 0  # by the server's clock, and at any time
        if self._clock is not None:
            now_ms = self._now_ms()
        elif operation in _FOR_THE_CALLER:
            not_after_ms = link.server_ms + link.timeout_ms
        keys, limits = self._encoded(subjects)
        numbers = now_ms, not_after_ms, self._lease_ttl_ms, a, b
        words: tuple[Word, ...] = len(keys), *keys, operation, reservation, *numbers, *limits
        return await self._eval(link, subjects[0].tenant, words)

    async def _renew(self, tenant: TenantId, reservations: Sequence[ReservationId]) -> None:
        numbers = self._now_ms(), 0, self._lease_ttl_ms, 0, 0
        words: tuple[Word, ...] = *self._tenant_keys(tenant), "renew", "", *numbers, *reservations
        await self._eval(self._links.of(tenant), tenant, (2, *words))

    async def _eval(self, link: RedisLink, tenant: TenantId, words: tuple[Word, ...]) -> list[int]:
        try:
            return await _eval_at(link, words)
        except Moved as moved:  # so nothing was done
            tag = tag_of(tenant)
            try:
                link = await self._links.follow(moved, tag, self._probe(tag))
                self._has_followed = True
                return await _eval_at(link, words)
            except StoreUnavailable:
                self._knows_servers = False
                raise

    def _probe(self, tag: str) -> tuple[Word, ...]:
        numbers = self._now_ms(), 0, self._lease_ttl_ms, 0, 0
        return "EVAL", SCRIPT, 1, f"{self._prefix}:{{{tag}}}:probe", "probe", "", *numbers

    def _now_ms(self) -> int:
        """0: by the server's clock."""
        return 0 if self._clock is None else int(self._clock.monotonic() * 1000)

    def _tenant_keys(self, tenant: TenantId) -> tuple[str, str]:
        of_tenant = f"{self._prefix}:{{{tag_of(tenant)}}}"
        return f"{of_tenant}:leases", f"{of_tenant}:reservations"

    def _encode(self, subjects: tuple[Subject, ...]) -> tuple[tuple[str, ...], tuple[Word, ...]]:
        """The keys of a call, and the limits, as the script wants them."""
        tenant = subjects[0].tenant
        assert all(subject.tenant == tenant for subject in subjects)
        keys = self._tenant_keys(tenant)
        of_tenant = keys[0].removesuffix("leases")
        accounts = (f"{of_tenant}{subject.scope}:{quote(subject.id, safe='')}" for subject in subjects)
        return (*keys, *accounts), tuple(word for subject in subjects for word in _words(subject.limits))


async def _eval_at(link: RedisLink, words: tuple[Word, ...]) -> list[int]:
    try:
        reply: list[int] = await link.call("EVALSHA", SCRIPT_SHA, *words)
    except ScriptMissing:  # so nothing was done
        reply = await link.call("EVAL", SCRIPT, *words)
    return reply


def _words(limits: QuotaLimits) -> Iterable[Word]:
    for limit in (limits.requests_per_min, limits.tokens_per_min, limits.concurrent, limits.token_budget):
        yield "" if limit is None else limit


def _holdings(subjects: Sequence[Subject], reply: Sequence[Any]) -> list[Holding]:
    """The usage of each subject, which a reply has after the time and the answer."""
    found: list[Holding] = []
    for i, subject in enumerate(subjects):
        requests, tokens, live, spent = reply[2 + 4 * i : 6 + 4 * i]
        found.append((subject, Usage(requests, tokens, reply[0], live, spent)))
    return found


def _refused(holdings: list[Holding], *, seats: int, tokens: int) -> Decision:
    refusal = quota.decide(holdings, seats=seats, tokens=tokens)
    if refusal is None:
        raise StoreUnavailable("the script refuses what the limits allow")
    return Decision(refusal, quota.windows_of(holdings))
