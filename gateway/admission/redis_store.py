"""Quotas and accounting in Redis: what all gateways together count.

`quota.lua` reads, decides, charges and counts, all in one call; see there for the keys. Here the calls are
put together, and refusals and windows worked out from the usage that they return, by `quota.py`'s arithmetic.

Rules:

1. A reservation is settled by the store that made it: it keeps the reservation's subjects until Redis has
   answered its settlement. Nobody waits for that: what was reserved is known here. A settlement goes out
   before every later call for the same tenant, so this process sees it in all that it reads afterwards, and
   others a moment later. One that fails goes out again with the next renewal, and when the store is closed.
2. A renewal is also the probe that brings a link up which is down, and a write: a server that only reads is
   none for quotas.
3. A request without limits has no reservation here, and nothing is asked for it.
4. A request whose tokens were not granted by this store, as far as its caller knows, is not counted by it.
5. A call whose keys another node has now is sent there, at once and once: within two calls' time, and that of
   connecting where the node was not known, which is bounded by a call's time as well.
6. A settlement says what this store reserved. Where the lease had lapsed, or where the answer to a
   reservation was lost, Redis knows better, and counts by what it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from msgspec import Struct

from gateway.accounting_config import AccountingConfig
from gateway.admission import quota
from gateway.admission.quota import (
    LEASE_TTL_MS,
    Account,
    Decision,
    ReservationId,
    Scope,
    Settlement,
    StoreUnavailable,
    Subject,
    SubjectAccount,
    Windows,
)
from gateway.admission.redis_link import Moved, RedisLink, ScriptMissing, Word
from gateway.admission.redis_links import Links, tag_of
from gateway.admission.store_failures import failed
from gateway.admission.usage import OTHERS, Payer, Sheet, Totals, UsageRow, Used
from gateway.quota_config import QuotaLimits
from gateway.shield import Done
from shared.clock import Clock
from shared.ids import KeyId, TenantId

SCRIPT: Final = (Path(__file__).parent / "quota.lua").read_text()
SCRIPT_SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""Its name among the scripts that a server has cached."""
RENEWED_MAX: Final = 256
"""Leases that one call renews."""
DAYS_KEPT: Final = AccountingConfig().days
ENCODED_MAX: Final = 16 * 1024
_SEATED: Final = Decision(None, None)
_LIMITS: Final = struct.Struct(">6d")
_FOR_THE_CALLER: Final = ("enter", "reserve")
"""Operations that are not to be done once their caller no longer waits; the others are right however late."""


class _Held(Struct):
    subjects: tuple[Subject, ...]
    granted: int = 0
    """Tokens that were granted to it, as far as its caller knows."""
    used: Used | None = None
    """The tokens to settle with; None while the request is in progress."""
    is_settling: bool = False
    """True while Redis is asked to settle it."""
    is_counted: bool = False
    """Rule 4."""


class RedisStore:
    """A `QuotaStore`. Its calls raise StoreUnavailable."""

    def __init__(
        self,
        links: Links,
        prefix: str,
        *,
        lease_ttl_ms: int = LEASE_TTL_MS,
        days_kept: int = DAYS_KEPT,
        clock: Clock | None = None,
    ) -> None:
        """`prefix` begins every key. `clock` decides in place of the server's; tests alone give one."""
        self._links: Final = links
        self._prefix: Final = prefix
        self._settings: Final = struct.pack(">2d", lease_ttl_ms, days_kept)
        self._clock: Final = clock
        self._encoded = lru_cache(ENCODED_MAX)(self._encode)
        self._row_of = lru_cache(ENCODED_MAX)(self._row)
        self._held: dict[ReservationId, _Held] = {}
        self._settling: set[asyncio.Future[list[Any]]] = set()
        """Calls that settle and are not over."""
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
        return _refused(_holdings(subjects, reply), seated=0, tokens=int(needs_tokens))

    async def reserve(
        self,
        reservation: ReservationId,
        subjects: Sequence[Subject],
        least: int,
        most: int,
        payer: Payer | None = None,
    ) -> Decision:
        assert 0 <= least <= most
        if not subjects:
            return Decision(None, Windows(), most)
        self._links.of(subjects[0].tenant).require_up()
        held = self._held[reservation] = _Held(tuple(subjects))  # it has them even if no answer comes
        row = ("-", "-") if payer is None else self._row_of(payer)
        reply = await self._run("reserve", reservation, held.subjects, least, most, *row)
        holdings = _holdings(subjects, reply)
        if (granted := reply[1]) >= 0:
            held.is_counted, held.granted = True, granted
            return Decision(None, quota.windows_of(holdings), granted)
        if (seated := -1 - granted) == 0:
            del self._held[reservation]
        return _refused(holdings, seated=seated, tokens=least)

    def settle(self, reservation: ReservationId, used: Used) -> Done[Settlement | None]:
        """Rule 1."""
        held = self._held.get(reservation)
        if held is None or held.used is not None:
            return Done(None)
        held.used = used
        self._send_settlement(reservation, held)
        return Done(Settlement(held.granted, used.tokens))

    async def settled(self) -> None:
        """Wait until no settlement is under way. Each is answered, or fails, within its time."""
        while self._settling:
            await asyncio.wait(tuple(self._settling))

    async def renew(self, reservations: Sequence[ReservationId]) -> None:
        """Rule 2."""
        if self._has_followed or not self.is_well:
            await self._links.refresh()
            self._knows_servers, self._has_followed = True, False
        probes = (link.probe(*self._probe(self._links.tag_of(link))) for link in self._links.all())
        probed = await asyncio.gather(*probes, return_exceptions=True)
        renewed = await asyncio.gather(*self._renewals(reservations), return_exceptions=True)
        self._settle_again()
        for problem in (*probed, *renewed):
            if isinstance(problem, BaseException):
                raise problem

    def _renewals(self, reservations: Sequence[ReservationId]) -> Iterable[Awaitable[object]]:
        """Calls that extend the leases."""
        together: defaultdict[tuple[str, str], list[ReservationId]] = defaultdict(list)
        tenants: dict[tuple[str, str], TenantId] = {}
        for reservation in reservations:
            if (held := self._held.get(reservation)) is not None and held.used is None:
                tenant = held.subjects[0].tenant
                keys = self._lease_keys(tenant)
                together[keys].append(reservation)
                tenants[keys] = tenant
        for keys, renewed in together.items():
            for i in range(0, len(renewed), RENEWED_MAX):
                words = *keys, *self._head("renew"), *renewed[i : i + RENEWED_MAX]
                yield self._eval(tenants[keys], (2, *words))

    async def windows(self, subjects: Sequence[Subject]) -> Windows:
        if not subjects:
            return Windows()
        reply = await self._run("windows", ReservationId(""), tuple(subjects))
        return quota.windows_of(_holdings(subjects, reply))

    async def post(self, source: str, number: int, tenant: TenantId, day: int, sheet: Sheet) -> None:
        """Add the rows to those of a tenant's day. `source` numbers its posts upwards, from 1 on: one that is
        sent again changes nothing."""
        usage = self._usage_key(tenant)
        words: list[Word] = [number, usage, day]
        for (key, model), totals in sheet.items():
            words += (_row_name(key, model), *totals.numbers)
        posted = f"{usage.removesuffix('usage:')}posted:{source}"
        await self._eval(tenant, (1, posted, *self._head("post"), *words))

    async def usage(self, tenant: TenantId, first: int, last: int) -> AsyncIterator[UsageRow]:
        """Each reply has a page of rows, so that no call takes long."""
        usage = self._usage_key(tenant)
        days = range(first, last + 1)
        keys = [f"{usage}{day}" for day in days]
        _, _, *exist = await self._eval(tenant, (len(keys), *keys, *self._head("days")))
        for day, key, is_there in zip(days, keys, exist, strict=True):
            sheet: Sheet = {}
            cursor = "0" if is_there else None
            while cursor is not None:
                words = 1, key, *self._head("rows"), cursor
                reply = await self._eval(tenant, words)
                sheet |= _sheet(reply[2:])
                cursor = None if (following := reply[1].decode()) == "0" else following
            for (key_id, model), totals in sheet.items():
                yield UsageRow(tenant, key_id, model, day, totals)

    async def aclose(self) -> None:
        """Close the connections, once the settlements that are under way are over, and those that failed were
        tried once more."""
        await self.settled()
        if any(held.used is not None for held in self._held.values()):
            with contextlib.suppress(StoreUnavailable):
                await self.renew([])
            await self.settled()
        await self._links.aclose()

    # -- calls ------------------------------------------------------------------------------------

    def _hold(self, reservation: ReservationId, subjects: Sequence[Subject]) -> _Held:
        held = self._held.get(reservation)
        if held is None:
            held = self._held[reservation] = _Held(tuple(subjects))
        return held

    def _send_settlement(self, reservation: ReservationId, held: _Held) -> None:
        """Ask Redis to settle a reservation: the words are on their way when this returns."""
        used = held.used
        assert used is not None
        words = used.tokens, used.prompt if held.is_counted else -1, used.cached, used.completion
        call = self._words("settle", reservation, held.subjects, *words)
        held.is_settling = True
        try:
            asked = self._links.of(held.subjects[0].tenant).call("EVALSHA", SCRIPT_SHA, *call)
        except StoreUnavailable as error:
            held.is_settling = False
            failed("settle", error)
            return
        answered = asyncio.ensure_future(asked)
        self._settling.add(answered)
        answered.add_done_callback(lambda over: self._settlement_over(over, reservation, held, call))

    def _settlement_over(
        self, over: asyncio.Future[list[Any]], reservation: ReservationId, held: _Held, call: tuple[Word, ...]
    ) -> None:
        self._settling.discard(over)
        if over.cancelled():  # with the loop
            return
        error = over.exception()
        if isinstance(error, ScriptMissing | Moved) and call:  # so nothing was done
            again = asyncio.ensure_future(self._eval(held.subjects[0].tenant, call))
            self._settling.add(again)
            again.add_done_callback(lambda over: self._settlement_over(over, reservation, held, ()))
            return
        held.is_settling = False
        if isinstance(error, StoreUnavailable):
            failed("settle", error)
        elif self._held.get(reservation) is held:
            del self._held[reservation]

    def _settle_again(self) -> None:
        """Send the settlements that have failed."""
        for name, held in tuple(self._held.items()):
            if held.used is not None and not held.is_settling:
                self._send_settlement(name, held)

    async def _run(
        self, operation: str, reservation: ReservationId, subjects: tuple[Subject, ...], *words: Word
    ) -> list[int]:
        return await self._eval(subjects[0].tenant, self._words(operation, reservation, subjects, *words))

    def _words(
        self, operation: str, reservation: ReservationId, subjects: tuple[Subject, ...], *words: Word
    ) -> tuple[Word, ...]:
        now_ms, not_after_ms = self._now_ms(), 0  # 0: at any time
        if not now_ms and operation in _FOR_THE_CALLER:
            link = self._links.of(subjects[0].tenant)
            not_after_ms = link.server_ms + link.timeout_ms
        keys, settings = self._encoded(subjects)
        return len(keys), *keys, operation, reservation, now_ms, not_after_ms, settings, *words

    async def _eval(self, tenant: TenantId, words: tuple[Word, ...]) -> list[Any]:
        try:
            return await _eval_at(self._links.of(tenant), words)
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
        return "EVAL", SCRIPT, 1, f"{self._prefix}:{{{tag}}}:probe", *self._head("probe")

    def _head(self, operation: str) -> tuple[Word, ...]:
        """The first words of a call that concerns no subject and no single reservation."""
        return operation, "", self._now_ms(), 0, self._settings

    def _now_ms(self) -> int:
        """0: by the server's clock."""
        return 0 if self._clock is None else round(self._clock.wall() * 1000)

    def _lease_keys(self, tenant: TenantId) -> tuple[str, str]:
        """In a Cluster, those of the tenant."""
        start = f"{self._prefix}:{{{tag_of(tenant)}}}" if self._links.is_cluster else self._prefix
        return f"{start}:leases", f"{start}:reservations"

    def _usage_key(self, tenant: TenantId) -> str:
        """The beginning of the keys of a tenant's rows."""
        return f"{self._prefix}:{{{tag_of(tenant)}}}:usage:"

    def _row(self, payer: Payer) -> tuple[str, str]:
        return self._usage_key(payer.tenant), _row_name(payer.key, payer.model)

    def _encode(self, subjects: tuple[Subject, ...]) -> tuple[tuple[str, ...], bytes]:
        """The keys of a call, and the settings with the limits, as the script wants them."""
        tenant = subjects[0].tenant
        assert all(subject.tenant == tenant for subject in subjects)
        accounts = (self._account(subject) for subject in subjects)
        settings = b"".join((self._settings, *(_packed(subject.limits) for subject in subjects)))
        return (*self._lease_keys(tenant), *accounts), settings

    def _account(self, subject: Subject) -> str:
        name = f"{subject.scope}:{quote(subject.id, safe='')}"
        if subject.scope is Scope.MODEL:
            assert not self._links.is_cluster, "the configuration refuses that"
            return f"{self._prefix}:{name}"
        return f"{self._prefix}:{{{tag_of(subject.tenant)}}}:{name}"


async def _eval_at(link: RedisLink, words: tuple[Word, ...]) -> list[Any]:
    try:
        reply: list[Any] = await link.call("EVALSHA", SCRIPT_SHA, *words)
    except ScriptMissing:  # so nothing was done
        reply = await link.call("EVAL", SCRIPT, *words)
    return reply


def _row_name(key: KeyId, model: str) -> str:
    if key == OTHERS:
        return f"{OTHERS}/{OTHERS}"
    return f"{quote(key, safe='')}/{quote(model, safe='')}"


def _sheet(words: Sequence[Any]) -> Sheet:
    """The rows of a page: a name and six numbers each."""
    sheet: Sheet = {}
    for i in range(0, len(words), 7):
        key, _, model = words[i].decode().partition("/")
        sheet[KeyId(unquote(key)), unquote(model)] = Totals(*words[i + 1 : i + 7])
    return sheet


def _packed(limits: QuotaLimits) -> bytes:
    return _LIMITS.pack(*(-1 if limit is None else limit for limit in astuple(limits)))


def _holdings(subjects: Sequence[Subject], reply: Sequence[Any]) -> list[SubjectAccount]:
    """The usage of each subject, which a reply has after the time and the answer."""
    found: list[SubjectAccount] = []
    for i, subject in enumerate(subjects):
        requests, tokens, live, spent, day, month = reply[2 + 6 * i : 8 + 6 * i]
        found.append((subject, Account(requests, tokens, reply[0], live, spent, day, month)))
    return found


def _refused(holdings: list[SubjectAccount], *, seated: int, tokens: int) -> Decision:
    refusal = quota.decide(holdings, seated=seated, tokens=tokens)
    if refusal is None:
        raise StoreUnavailable("the script refuses what the limits allow")
    return Decision(refusal, quota.windows_of(holdings))
