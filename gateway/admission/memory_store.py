"""Quotas and accounting in this process's memory: the embedded default.

One event loop, no await inside a call: every call is atomic. Usage lives as long as the process, so
a restart forgives it, budgets too. An account is forgotten when it was not used for `IDLE_MS`, owes nothing
of a budget, and there are many: tokens name subjects that the configuration does not know.

Leases run by the monotonic clock. Buckets and calendar days need a time that is the wall clock's and never
goes back: the monotonic clock's, put ahead by the difference of the two, which is looked at with every
renewal and only ever raised. So a wall clock that is put back is not followed, and one that is put forward
is.

Leases all have the same time to live, so the reservations stay in the order of their expiry when a
renewal moves to the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from gateway.admission import quota
from gateway.admission.quota import (
    DAY_MS,
    LEASE_TTL_MS,
    Account,
    AccountName,
    Decision,
    ReservationId,
    Settlement,
    Subject,
    SubjectAccount,
    Windows,
    day_of,
)
from gateway.admission.usage import NOTHING, Payer, UsageRow, UsageRows, Used
from gateway.config.accounting import AccountingConfig
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.shield import Done
from shared.wire.ids import TenantId

ACCOUNTS_MIN: Final = 20_000
"""The number of accounts up to which none is forgotten."""
IDLE_MS: Final = 3_600_000
"""How long an account is not used before it is forgotten. Its buckets have drained within a minute, but for
what an answer took above its reservation."""
PERIOD_KEPT_MS: Final = 31 * DAY_MS
"""How long an account with a budget for a day or a month is kept unused: that begins anew within it."""
DAYS_KEPT: Final = AccountingConfig().days
LAPSED_MAX: Final = 10_000
"""Reservations whose leases ran out and that may be settled after all."""
LOOKS: Final = 2
"""The number of accounts that are looked at for each new one. Two look faster than one fills."""
_EMPTY: Final = Account()
_SEATED: Final = Done(Decision(None, None))


class _Reservation(Struct):
    subjects: tuple[Subject, ...]
    expires_ms: int
    reserved_ms: int
    """When the tokens were reserved; until then, when the seat was taken."""
    tokens: int = 0
    payer: Payer | None = None
    """Where it is counted. None as long as nothing was granted."""


@dataclass(slots=True)
class Ledger:
    """Tokens since the start. Law: `reserved + overdrawn == settled + released + outstanding`."""

    reserved: int = 0
    overdrawn: int = 0
    settled: int = 0
    released: int = 0
    outstanding: int = 0

    @property
    def balanced(self) -> bool:
        return self.reserved + self.overdrawn == self.settled + self.released + self.outstanding


class MemoryStore:
    """A `QuotaStore` in this process's memory."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, days_kept: int = DAYS_KEPT) -> None:
        self._monotonic = clock.monotonic
        self._wall = clock.wall
        self._ahead_ms = self._difference_ms()
        self.rows: Final = UsageRows(days_kept)
        """Usage by key, tenant, model and day."""
        self._accounts: OrderedDict[AccountName, Account] = OrderedDict()
        """The account of each subject; first those that were looked at longest ago."""
        self._reservations: dict[ReservationId, _Reservation] = {}
        """The open reservations, in the order of their expiry."""
        self._lapsed: OrderedDict[ReservationId, _Reservation] = OrderedDict()
        """Granted ones whose leases ran out, the oldest first."""
        self._none_expires_before_ms = 0
        self.ledger = Ledger()

    def enter(
        self, reservation: ReservationId, subjects: Sequence[Subject], *, needs_tokens: bool
    ) -> Done[Decision]:
        now_ms = self._now_ms()
        if reservation in self._reservations:
            return _SEATED
        holdings = self._holdings(subjects, now_ms)
        refusal = quota.decide(holdings, seated=0, tokens=1 if needs_tokens else 0)
        if refusal is None:
            self._charge(holdings, seated=0, tokens=0)
            reserved_ms = now_ms + self._ahead_ms
            self._reservations[reservation] = _Reservation(
                tuple(subjects), now_ms + LEASE_TTL_MS, reserved_ms
            )
            return _SEATED
        return Done(Decision(refusal, quota.windows_of(holdings)))

    def reserve(
        self,
        reservation: ReservationId,
        subjects: Sequence[Subject],
        least: int,
        most: int,
        payer: Payer | None = None,
        *,
        wanted: int = 0,
    ) -> Done[Decision]:
        assert 0 <= least <= most
        now_ms = self._now_ms()
        holdings = self._holdings(subjects, now_ms)
        entry = self._reservations.get(reservation)
        if entry is not None and entry.tokens:
            return Done(Decision(None, quota.windows_of(holdings), entry.tokens))
        seated = 0 if entry is None else len(entry.subjects)
        refusal = quota.decide(holdings, seated=seated, tokens=least)
        if refusal is not None:
            return Done(Decision(refusal, quota.windows_of(holdings)))
        tokens = quota.grant(holdings, least, most, wanted)
        holdings = self._charge(holdings, seated=seated, tokens=tokens)
        if entry is None:
            self._lapsed.pop(reservation, None)
            entry = self._reservations[reservation] = _Reservation((), now_ms + LEASE_TTL_MS, now_ms)
        entry.subjects, entry.tokens = tuple(subjects), tokens
        entry.reserved_ms, entry.payer = now_ms + self._ahead_ms, payer
        self.ledger.reserved += tokens
        self.ledger.outstanding += tokens
        return Done(Decision(None, quota.windows_of(holdings), tokens))

    def settle(self, reservation: ReservationId, used: Used) -> Done[Settlement | None]:
        now_ms = self._now_ms()
        entry, leases = self._reservations.pop(reservation, None), 1
        if entry is None:
            entry, leases = self._recalled(reservation), 0
        if entry is None:
            return Done(None)
        settlement = Settlement(entry.tokens, used.tokens)
        for subject, usage in self._holdings(entry.subjects, now_ms):
            settled = quota.settle(subject.limits, usage, settlement, entry.reserved_ms, leases=leases)
            self._accounts[subject.account] = settled
        self._book(entry, settlement, used)
        return Done(settlement)

    def release(self, reservation: ReservationId) -> None:
        """Give a reservation back as if it had never been granted: it is counted elsewhere."""
        entry = self._reservations.pop(reservation, None) or self._recalled(reservation)
        if entry is not None:
            entry.payer = None
            self._book(entry, Settlement(entry.tokens, 0), NOTHING)

    def renew(self, reservations: Sequence[ReservationId]) -> Done[None]:
        self._ahead_ms = max(self._ahead_ms, self._difference_ms())
        now_ms = self._now_ms()
        for reservation in reservations:
            if (entry := self._reservations.pop(reservation, None)) is not None:
                entry.expires_ms = now_ms + LEASE_TTL_MS
                self._reservations[reservation] = entry
        return Done(None)

    def windows(self, subjects: Sequence[Subject]) -> Done[Windows]:
        now_ms = self._now_ms()
        return Done(quota.windows_of(self._holdings(subjects, now_ms)))

    async def usage(self, tenant: TenantId, first: int, last: int) -> AsyncIterator[UsageRow]:
        for row in self.rows.of(tenant, first, last):
            yield row

    def payers(self, first: int, last: int) -> Done[set[TenantId]]:
        return Done(self.rows.tenants(first, last))

    @property
    def live(self) -> int:
        """The number of reservations that are held."""
        return len(self._reservations)

    def holds(self, reservation: ReservationId) -> bool:
        """True if this reservation is held, as far as was noticed: its lease may have run out."""
        return reservation in self._reservations

    def _holdings(self, subjects: Sequence[Subject], now_ms: int) -> list[SubjectAccount]:
        accounts, at_ms = self._accounts, now_ms + self._ahead_ms
        holdings: list[SubjectAccount] = []
        for subject in subjects:  # a comprehension is a function that is made each time
            account = accounts.get(subject.account, _EMPTY)
            holdings.append((subject, account.at(subject.limits, at_ms)))
        return holdings

    def _charge(self, holdings: list[SubjectAccount], *, seated: int, tokens: int) -> list[SubjectAccount]:
        charged: list[SubjectAccount] = []
        for place, (subject, before) in enumerate(holdings):
            account = quota.charge(subject.limits, before, 1 if place >= seated else 0, tokens)
            name = subject.account
            if name not in self._accounts:
                self._forget_idle(account.at_ms)
            self._accounts[name] = account
            charged.append((subject, account))
        return charged

    def _forget_idle(self, now_ms: int) -> None:
        """Look at a few accounts, and forget those that are idle."""
        if len(self._accounts) < ACCOUNTS_MIN:
            return
        for _ in range(LOOKS):
            name, account = self._accounts.popitem(last=False)
            kept_ms = PERIOD_KEPT_MS if account.day or account.month else IDLE_MS
            if account.live or account.spent or now_ms - account.at_ms < kept_ms:
                self._accounts[name] = account

    def _expire(self, now_ms: int) -> None:
        """Settle the reservations whose leases have run out as if all their tokens had been used."""
        self._none_expires_before_ms = now_ms + LEASE_TTL_MS
        while self._reservations:
            reservation, entry = next(iter(self._reservations.items()))
            if entry.expires_ms > now_ms:
                self._none_expires_before_ms = entry.expires_ms
                return
            del self._reservations[reservation]
            for subject in entry.subjects:
                name = subject.account
                self._accounts[name] = quota.expire(self._accounts[name])
            self._book(entry, Settlement(entry.tokens, entry.tokens), Used(estimated=entry.tokens))
            if entry.tokens or entry.payer is not None:
                self._lapsed[reservation] = entry
                if len(self._lapsed) > LAPSED_MAX:
                    self._lapsed.popitem(last=False)

    def _recalled(self, reservation: ReservationId) -> _Reservation | None:
        """A reservation whose lease ran out, as if its tokens were still to be settled; None without one."""
        entry = self._lapsed.pop(reservation, None)
        if entry is not None:
            if entry.payer is not None:
                self.rows.uncount_estimate(entry.payer, day_of(entry.reserved_ms), entry.tokens)
            self.ledger.settled -= entry.tokens
            self.ledger.outstanding += entry.tokens
        return entry

    def _book(self, entry: _Reservation, settlement: Settlement, used: Used) -> None:
        if entry.payer is not None:
            self.rows.count(entry.payer, day_of(entry.reserved_ms), used)
        ledger = self.ledger
        ledger.outstanding -= settlement.reserved
        ledger.settled += settlement.settled
        if (more := settlement.settled - settlement.reserved) > 0:
            ledger.overdrawn += more
        else:
            ledger.released -= more

    def _now_ms(self) -> int:
        """The time, at which those that have run out by now are settled."""
        now_ms = int(self._monotonic() * 1000 + 0.5)
        if now_ms >= self._none_expires_before_ms:
            self._expire(now_ms)
        return now_ms

    def _difference_ms(self) -> int:
        return int((self._wall() - self._monotonic()) * 1000 + 0.5)
