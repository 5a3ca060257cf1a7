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
3. For a request without limits nothing is asked here. `note` has it recorded, and nobody waits for that, so
   that it is counted, and has a billing line, though its gateway is killed. Whether Redis has the record is
   known once it answers. Until then, and where it does not, its gateway counts the request by itself, and
   what may be there all the same is taken away uncounted when the request ends (rule 4: this store granted it
   no tokens). A note whose keys another node has now is not sent there (rule 5), as its settlement might come
   there first.
4. A request whose tokens were not granted by this store, as far as its caller knows, is not counted by it.
5. A call whose keys another node has now is sent there, at once and once: within two calls' time, and that of
   connecting where the node was not known, which is bounded by a call's time as well.
6. A settlement says what this store reserved. Where the answer to a reservation was lost, Redis knows
   better, and counts by what it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote, unquote

from msgspec import Struct

from gateway.admission import quota
from gateway.admission.lapsed import Lapsed, lapsed_of
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
from gateway.admission.redis_calls import SCRIPT, Calls, call, in_full, part, times
from gateway.admission.store_failures import failed
from gateway.admission.usage import OTHERS, Payer, Sheet, Totals, UsageRow, Used
from gateway.config.accounting import AccountingConfig
from gateway.config.quotas import QuotaLimits
from gateway.config.redis import RedisConfig
from gateway.redis.link import RedisLink, RedisUnavailable, ScriptMissing, SlotMoved, Word
from gateway.redis.links import Links, links_of, tag_of
from shared.process.clock import Clock
from shared.process.shield import Done
from shared.wire.ids import KeyId, TenantId

RENEWED_MAX: Final = 256
"""Leases that one call renews."""
DAYS_KEPT: Final = AccountingConfig().days
ONE_TAG: Final = "all"
"""The hash tag of all keys where one node of a Cluster counts for all tenants."""
ENCODED_MAX: Final = 16 * 1024
_SEATED: Final = Decision(None, None)
_LIMITS: Final = struct.Struct(">6d")
_NO_ROW: Final = part("-", "-")


class Held(Struct):
    """A reservation of this process's."""

    tenant: TenantId
    subjects: tuple[Subject, ...] = ()
    """The subjects whose limits count it. None where it was only noted."""
    granted: int = 0
    """Tokens that were granted to it, as far as its caller knows."""
    used: Used | None = None
    """The tokens to settle with; None while the request is in progress."""
    is_settling: bool = False
    """True while Redis is asked to settle it."""
    is_counted: bool = False
    """True if its tokens were granted by Redis, or it was noted there, as far as its caller knows."""


class Settling(Struct, eq=False):
    """The receiver of the answer to a settlement."""

    store: RedisStore
    reservation: ReservationId
    held: Held
    command: bytes

    def done(self) -> bool:
        return False

    def set_result(self, reply: object, /) -> None:
        self.store.settlement_over(self.reservation, self.held, None)

    def set_exception(self, error: RedisUnavailable, /) -> None:
        if isinstance(error, ScriptMissing | SlotMoved):  # so nothing was done
            self.store.send_again(self)
        else:
            self.store.settlement_over(self.reservation, self.held, error)


class Noting(Struct, eq=False):
    """The receiver of the answer to the note of a request without limits."""

    store: RedisStore
    reservation: ReservationId
    held: Held
    command: bytes
    noted: Callable[[ReservationId], None]
    is_again: bool = False

    def done(self) -> bool:
        return False

    def set_result(self, reply: list[int], /) -> None:
        if self.held.used is None:  # else it was settled as one that is not counted there
            self.held.granted, self.held.is_counted = reply[1], True
            self.noted(self.reservation)

    def set_exception(self, error: RedisUnavailable, /) -> None:
        if isinstance(error, ScriptMissing) and not self.is_again and self.held.used is None:
            self.store.note_in_full(self)
        else:
            failed("note", error)


def open_store(
    config: RedisConfig,
    env: Mapping[str, str],
    *,
    one_node: bool = False,
    lease_ttl_ms: int = LEASE_TTL_MS,
    days_kept: int = DAYS_KEPT,
    clock: Clock | None = None,
) -> RedisStore:
    """The store on the server of `[redis]`, not yet connected. With `one_node` the hash tag of all keys is in
    their prefix: the first one of a key is what counts. Raises ConfigError."""
    tag, prefix = None, config.key_prefix
    if one_node:
        tag, prefix = ONE_TAG, f"{prefix}:{{{ONE_TAG}}}"
    links = links_of(config, env, tag)
    return RedisStore(links, prefix, lease_ttl_ms=lease_ttl_ms, days_kept=days_kept, clock=clock)


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
        self._calls_of = lru_cache(ENCODED_MAX)(self._calls)
        self._notes_of = lru_cache(ENCODED_MAX)(self._notes)
        self._row_of = lru_cache(ENCODED_MAX)(self._row)
        self._held: dict[ReservationId, Held] = {}
        self._settling = 0
        """Settlements that Redis has not answered."""
        self._none_settles = asyncio.Event()
        self._none_settles.set()
        self._sent_again: set[asyncio.Task[None]] = set()
        self._knows_servers = False
        self._has_followed = False
        """True if a call was sent on to another node since the nodes were asked for their slots."""

    @property
    def is_well(self) -> bool:
        """True if all servers are known, and the last call of each came back."""
        return self._knows_servers and all(link.is_up for link in self._links.all())

    @property
    def is_partly_well(self) -> bool:
        """True if the last call of some server came back."""
        return any(link.is_up for link in self._links.all())

    def reaches(self, tenant: TenantId) -> bool:
        """True if the last call of this tenant's server came back."""
        try:
            return self._links.of(tenant).is_up
        except RedisUnavailable:
            return False

    async def enter(
        self, reservation: ReservationId, subjects: Sequence[Subject], *, needs_tokens: bool
    ) -> Decision:
        if not subjects:
            return _SEATED
        tenant = subjects[0].tenant
        times_ms = self._times_ms(tenant)
        held = self._hold(reservation, subjects)
        command = self._calls_of(held.subjects).enter(reservation, *times_ms, int(needs_tokens))
        reply = await self._ask(tenant, command)
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
        *,
        wanted: int = 0,
    ) -> Decision:
        assert 0 <= least <= most
        if not subjects:
            return Decision(None, Windows(), most)
        tenant = subjects[0].tenant
        times_ms = self._times_ms(tenant)
        before = self._held.get(reservation)
        held = self._held[reservation] = Held(tenant, tuple(subjects))  # it has them even if no answer comes
        row = _NO_ROW if payer is None else self._row_of(payer)
        command = self._calls_of(held.subjects).reserve(reservation, *times_ms, least, most, wanted, row)
        reply = await self._ask(tenant, command)
        holdings = _holdings(subjects, reply)
        if (granted := reply[1]) >= 0:
            held.is_counted, held.granted = True, granted
            return Decision(None, quota.windows_of(holdings), granted)
        if (seated := -1 - granted) == 0:
            del self._held[reservation]
            if before is not None and before.is_counted:  # its lease ran out: it is still to be settled
                self._held[reservation] = before
        return _refused(holdings, seated=seated, tokens=least)

    def note(
        self, reservation: ReservationId, payer: Payer, tokens: int, noted: Callable[[ReservationId], None]
    ) -> None:
        """Have a request without limits recorded, which nobody waits for (rule 3). `noted` is called if Redis
        has it before the request ends: then it is counted here."""
        held = Held(payer.tenant)
        try:
            times_ms = self._times_ms(payer.tenant)
            row = self._row_of(payer)
            command = self._notes_of(payer.tenant).reserve(reservation, *times_ms, tokens, tokens, 0, row)
            self._links.of(payer.tenant).send(command, Noting(self, reservation, held, command, noted))
        except (StoreUnavailable, RedisUnavailable) as error:
            failed("note", error)
        else:
            self._held[reservation] = held

    def note_in_full(self, noting: Noting) -> None:
        """Send one again to a server that does not know the script, ahead of its settlement."""
        noting.is_again = True
        try:
            self._links.of(noting.held.tenant).send(in_full(noting.command), noting)
        except RedisUnavailable as error:
            failed("note", error)

    def settle(self, reservation: ReservationId, used: Used) -> Done[Settlement | None]:
        """Settle without waiting: what was reserved is known here, and the settlement goes out before every
        later call for the tenant (rule 1)."""
        held = self._held.get(reservation)
        if held is None or held.used is not None:
            return Done(None)
        held.used = used
        self._send_settlement(reservation, held)
        return Done(Settlement(held.granted, used.tokens))

    async def settled(self) -> None:
        """Wait until no settlement is under way. Each is answered, or fails, within its time."""
        await self._none_settles.wait()

    async def renew(self, reservations: Sequence[ReservationId]) -> None:
        """Renew leases, which also brings up a link that is down, and finds out one that only reads (rule
        2)."""
        try:
            await self._renew(reservations)
        except RedisUnavailable as error:
            raise StoreUnavailable(str(error)) from None

    async def _renew(self, reservations: Sequence[ReservationId]) -> None:
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
                keys = self._lease_keys(held.tenant)
                together[keys].append(reservation)
                tenants[keys] = held.tenant
        for keys, renewed in together.items():
            for i in range(0, len(renewed), RENEWED_MAX):
                yield self._run(tenants[keys], keys, "renew", *renewed[i : i + RENEWED_MAX])

    async def lapsed(self, tenants: Iterable[TenantId], written: Iterable[Lapsed]) -> list[Lapsed]:
        """The reservations of these tenants whose lease ran out and that have no billing line; outside a
        Cluster those of all tenants. Nobody else is given them for a minute. `written`: those that have one
        now, of the same tenants. A server that is down says nothing, and learns nothing."""
        asked = {self._lease_keys(tenant): tenant for tenant in tenants}
        words: defaultdict[tuple[str, str], list[Word]] = defaultdict(list)
        for one in written:
            words[self._lease_keys(one.payer.tenant)].append(one.record)
        calls = (self._lapsed(tenant, keys, words[keys]) for keys, tenant in asked.items())
        found: list[Lapsed] = []
        for reply in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(reply, StoreUnavailable):
                failed("lapsed", reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                found += lapsed_of(reply[2:])
        return found

    async def _lapsed(self, tenant: TenantId, keys: tuple[str, str], written: list[Word]) -> list[Any]:
        """It is not done once nobody waits for it: what it gave would be nobody's for a minute."""
        now_ms, not_after_ms = self._times_ms(tenant)
        command = call(keys, "lapsed", self._settings, now_ms, *written, not_after_ms=not_after_ms)
        return await self._ask(tenant, command)

    async def windows(self, subjects: Sequence[Subject]) -> Windows:
        if not subjects:
            return Windows()
        keys, settings = self._encoded(subjects)
        command = call(keys, "windows", settings, self._now_ms())
        return quota.windows_of(_holdings(subjects, await self._ask(subjects[0].tenant, command)))

    async def post(self, source: str, number: int, tenant: TenantId, day: int, sheet: Sheet) -> None:
        """Add the rows to those of a tenant's day. `source` numbers its posts upwards, from 1 on: one that is
        sent again changes nothing."""
        usage = self._usage_key(tenant)
        words: list[Word] = [number, usage, day]
        for (key, model), totals in sheet.items():
            words += (_row_name(key, model), *totals.numbers)
        posted = f"{usage.removesuffix('usage:')}posted:{source}"
        await self._run(tenant, (posted,), "post", *words)

    async def usage(self, tenant: TenantId, first: int, last: int) -> AsyncIterator[UsageRow]:
        """Each reply has a page of rows, so that no call takes long."""
        usage = self._usage_key(tenant)
        days = range(first, last + 1)
        keys = [f"{usage}{day}" for day in days]
        _, _, *exist = await self._run(tenant, keys, "days")
        for day, key, is_there in zip(days, keys, exist, strict=True):
            sheet: Sheet = {}
            cursor = "0" if is_there else None
            while cursor is not None:
                reply = await self._run(tenant, (key,), "rows", cursor)
                sheet |= _sheet(reply[2:])
                cursor = None if (following := reply[1].decode()) == "0" else following
            for (key_id, model), totals in sheet.items():
                yield UsageRow(tenant, key_id, model, day, totals)

    async def payers(self, first: int, last: int) -> set[TenantId]:
        """Every server is asked for the names of its keys, a page in each reply."""
        found: set[TenantId] = set()
        for link in tuple(self._links.all()):
            key = self._probe_key(self._links.tag_of(link))
            cursor: str | None = "0"
            while cursor is not None:
                words: tuple[Word, ...] = cursor, self._prefix, first, last
                command = call((key,), "payers", self._settings, self._now_ms(), *words)
                try:
                    reply = await _asked(link, command)
                except RedisUnavailable as error:
                    raise StoreUnavailable(str(error)) from None
                found.update(TenantId(unquote(tag.decode())) for tag in reply[2:])
                cursor = None if (following := reply[1].decode()) == "0" else following
        return found

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

    def _hold(self, reservation: ReservationId, subjects: Sequence[Subject]) -> Held:
        held = self._held.get(reservation)
        if held is None:
            held = self._held[reservation] = Held(subjects[0].tenant, tuple(subjects))
        return held

    def _send_settlement(self, reservation: ReservationId, held: Held) -> None:
        """Ask Redis to settle a reservation: the words are on their way when this returns."""
        used = held.used
        assert used is not None
        calls = self._calls_of(held.subjects) if held.subjects else self._notes_of(held.tenant)
        command = calls.settle(reservation, self._now_ms(), used, is_counted=held.is_counted)
        try:
            link = self._links.of(held.tenant)
            link.send(command, Settling(self, reservation, held, command))
        except RedisUnavailable as error:
            failed("settle", error)
            return
        held.is_settling = True
        if not self._settling:
            self._none_settles.clear()
        self._settling += 1

    def settlement_over(self, reservation: ReservationId, held: Held, error: Exception | None) -> None:
        """Note the end of one that was sent."""
        self._settling -= 1
        if not self._settling:
            self._none_settles.set()
        held.is_settling = False
        if error is not None:
            failed("settle", error)
        elif self._held.get(reservation) is held:
            del self._held[reservation]

    def send_again(self, settling: Settling) -> None:
        """Send one that the server has refused to do."""

        async def again() -> None:
            error: Exception | None = None
            try:
                await self._ask(settling.held.tenant, settling.command)
            except StoreUnavailable as problem:
                error = problem
            self.settlement_over(settling.reservation, settling.held, error)

        task = asyncio.ensure_future(again())
        self._sent_again.add(task)
        task.add_done_callback(self._sent_again.discard)

    def _settle_again(self) -> None:
        """Send the settlements that have failed."""
        for name, held in tuple(self._held.items()):
            if held.used is not None and not held.is_settling:
                self._send_settlement(name, held)

    async def _run(self, tenant: TenantId, keys: Sequence[str], operation: str, *words: Word) -> list[Any]:
        """A call that concerns no subject and no single reservation."""
        return await self._ask(tenant, call(keys, operation, self._settings, self._now_ms(), *words))

    async def _ask(self, tenant: TenantId, command: bytes) -> list[Any]:
        """Raises StoreUnavailable."""
        try:
            try:
                reply: list[Any] = await self._links.of(tenant).call(command)
            except (ScriptMissing, SlotMoved) as refusal:  # so nothing was done
                reply = await self._ask_again(tenant, command, refusal)
        except RedisUnavailable as error:
            raise StoreUnavailable(str(error)) from None
        return reply

    async def _ask_again(
        self, tenant: TenantId, command: bytes, refusal: ScriptMissing | SlotMoved
    ) -> list[Any]:
        """Ask what a server could not do, as it did not know the script or has not got the keys. Raises
        RedisUnavailable."""
        try:
            if isinstance(refusal, SlotMoved):
                raise refusal
            in_place: list[Any] = await self._links.of(tenant).call(in_full(command))
            return in_place
        except SlotMoved as moved:
            tag = tag_of(tenant)
            try:
                link = await self._links.follow(moved, tag, self._probe(tag))
                self._has_followed = True
                return await _asked(link, command)
            except RedisUnavailable:
                self._knows_servers = False
                raise

    def _probe(self, tag: str) -> tuple[Word, ...]:
        return "EVAL", SCRIPT, 1, self._probe_key(tag), "probe", self._settings, "", times(self._now_ms())

    def _probe_key(self, tag: str) -> str:
        return f"{self._prefix}:{{{tag}}}:probe"

    def _times_ms(self, tenant: TenantId) -> tuple[float, float]:
        """now_ms and not_after_ms of a call that is not to be done once its caller no longer waits. Raises
        StoreUnavailable when the tenant's server is down."""
        try:
            link = self._links.of(tenant)
            link.require_up()
        except RedisUnavailable as error:
            raise StoreUnavailable(str(error)) from None
        return (0, link.deadline_ms) if self._clock is None else (self._now_ms(), 0)

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

    def _row(self, payer: Payer) -> bytes:
        return part(self._usage_key(payer.tenant), _row_name(payer.key, payer.model))

    def _calls(self, subjects: tuple[Subject, ...]) -> Calls:
        return Calls.of(*self._encoded(subjects))

    def _notes(self, tenant: TenantId) -> Calls:
        """The calls for requests of a tenant that no limit counts."""
        return Calls.of(self._lease_keys(tenant), self._settings)

    def _encoded(self, subjects: Sequence[Subject]) -> tuple[tuple[str, ...], bytes]:
        """The keys of a call, and the settings with the limits, as the script wants them."""
        tenant = subjects[0].tenant
        assert all(subject.tenant == tenant for subject in subjects)
        accounts = (self._account(subject) for subject in subjects)
        settings = b"".join((self._settings, *(_packed(subject.limits) for subject in subjects)))
        return (*self._lease_keys(tenant), *accounts), settings

    def _account(self, subject: Subject) -> str:
        name = f"{subject.scope}:{quote(subject.id, safe='')}"
        if subject.scope is Scope.MODEL:
            assert not self._links.is_cluster, "the configuration asks for one node"
            return f"{self._prefix}:{name}"
        return f"{self._prefix}:{{{tag_of(subject.tenant)}}}:{name}"


async def _asked(link: RedisLink, command: bytes) -> list[Any]:
    """Raises RedisUnavailable."""
    try:
        reply: list[Any] = await link.call(command)
    except ScriptMissing:  # so nothing was done
        reply = await link.call(in_full(command))
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
