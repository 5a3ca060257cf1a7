"""The arithmetic of quotas. Pure: whole numbers in, a decision out, the time is a parameter.

Six meters: requests per minute, tokens per minute, concurrent requests, and token budgets for a day, for a
month, and for good. The first two are leaky buckets (GCRA in its "level" form): a bucket of `limit` per
minute holds at most one minute's worth and drains steadily, so there is no window whose edge lets twice the
limit through at once. Days and months are those of the calendar in UTC.

Who is metered is a subject: a key, a tenant, either of them on one model, or a model whoever asks for it.

Rules:

1. A request reserves in two steps, each on all meters of all its subjects or on none: its seat (one
   request, and one of the concurrent ones) from its headers alone, before its body is read; its tokens
   once they are counted. A subject that could not pay for one token gives no seat to a request for some.
   The model is not known before the body is read: subjects with a model give their seat with the tokens.
2. Tokens are reserved before they are known (prompt + the most that may be generated) and settled
   with what was used. A refund lowers the level at once; usage above the reservation becomes debt:
   the level passes the brim, and nothing is admitted until it has drained. A request that states no
   maximum is granted between the least it can do with and the most it could use: a `GRANT_SHARE`-th
   of what is left, so that one request leaves something to the next. One whose prompt was estimated may turn
   out to be larger: what it wants beside is granted out of what is left, so that the last of several takes
   all of it, and a budget is passed by one of them at most.
3. Whole numbers throughout, so that a store in another language decides the same. One request or
   token weighs `WEIGHT` units; a bucket of `limit` per minute drains `limit` units each millisecond.
4. Time that runs backwards drains nothing, and begins no day or month anew. A bucket drains on from the
   earlier time: if it waited until the clock was where it had been, its subject would be refused for as long
   as the clock was ahead. A clock that is put back and forth (the servers of a failover differ) drains the
   difference twice, which gives no more than the bucket held.
5. Tokens belong to the day and the month in which they were reserved. What is settled after the end of that
   period changes nothing in the next one.
6. A limit counts what is used while it is set. A call whose limits lack a meter neither adds to it nor takes
   from it, for the same subject may be reached with other limits: by another grant, by a gateway with another
   file, by a request that came before the limit. What was counted stays: a budget for good, that of a day or
   a month until its period ends, and a bucket until a call has its limit, which says how fast it drained.

Times are milliseconds since the Unix epoch. The months are counted from March of the year 0, as Howard
Hinnant's `civil_from_days` does: the day that a leap year has more is then the last of its year, and the
lengths of months follow one formula ("chrono-Compatible Low-Level Date Algorithms",
https://howardhinnant.github.io/date_algorithms.html). Only whole numbers are divided, each below 2^53
(rule 3).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from enum import StrEnum
from typing import Final, NewType, Protocol

from msgspec import Struct
from msgspec.structs import force_setattr

from gateway.admission.usage import Payer, UsageRow, Used
from gateway.config.quotas import BUDGET_MAX, QUOTA_MAX, QuotaFail, QuotaLimits
from shared.wire.ids import TenantId

# -- days and months ------------------------------------------------------------------------------


DAY_MS: Final = 86_400_000
_EPOCH: Final = 719_468
"""The days from 0000-03-01 to 1970-01-01."""
_ERA: Final = 146_097
"""The days of 400 years, after which the calendar repeats."""


def day_of(ms: int) -> int:
    """The days from the epoch to the day of this moment."""
    return ms // DAY_MS


def month_of(ms: int) -> int:
    """The months from March of the year 0 to the month of this moment."""
    era, day = divmod(ms // DAY_MS + _EPOCH, _ERA)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    return (era * 400 + year) * 12 + (5 * day + 2) // 153


def day_end_ms(ms: int) -> int:
    """The first moment of the next day."""
    return (ms // DAY_MS + 1) * DAY_MS


def month_end_ms(ms: int) -> int:
    """The first moment of the next month."""
    year, month = divmod(month_of(ms) + 1, 12)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5
    return (days - _EPOCH) * DAY_MS


ReservationId = NewType("ReservationId", str)

LEASE_TTL_MS: Final = 60_000
"""The time to live of a lease that is not renewed."""
WEIGHT: Final = 60_000
assert QUOTA_MAX * WEIGHT < 2**53, "levels stay exact where numbers are doubles"
assert BUDGET_MAX < 2**53, "and so do budgets"
BUSY_RETRY_MS: Final = 1_000
"""The `Retry-After` of a refusal by a concurrency limit, in milliseconds. When one of the open requests will
end is unknown, so this only spaces retries."""
GRANT_SHARE: Final = 4
"""The divisor of what is left of a quota that gives the grant of a request without a stated maximum: 4 means
one quarter."""


class Meter(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    BUDGET = "budget"
    DAY_BUDGET = "day_budget"
    MONTH_BUDGET = "month_budget"


class Scope(StrEnum):
    __hash__ = str.__hash__  # usage is looked up by scope, and Enum's own hash is slow

    KEY = "key"
    TENANT = "tenant"
    KEY_MODEL = "key_model"
    """A key's requests for one model."""
    TENANT_MODEL = "tenant_model"
    """A tenant's requests for one model."""
    MODEL = "model"
    """All requests for a model, whoever sends them."""


AccountName = tuple[Scope, str, TenantId | None]
NOBODYS: Final[AccountName] = (Scope.KEY, "", None)


class Subject(Struct, frozen=True, cache_hash=True):
    """A key, a tenant or a model whose quotas a request counts against."""

    scope: Scope
    id: str
    """The key's or the tenant's id, the model's name, or both with a slash between."""
    limits: QuotaLimits
    tenant: TenantId
    """The tenant that sends the request. A request's subjects all have the same."""
    fail: QuotaFail = "closed"
    """The answer to its requests while the store of quotas cannot be asked; the tenant's setting."""
    account: AccountName = NOBODYS
    """The name of its account, which is not given but made. A holder of the same id in another tenant is
    somebody else; a model is the same for all tenants."""

    def __post_init__(self) -> None:
        tenant = None if self.scope is Scope.MODEL else self.tenant
        force_setattr(self, "account", (self.scope, self.id, tenant))


class Account(Struct, frozen=True, gc=False):
    """A subject's usage, as a store keeps it."""

    requests: int = 0
    """The level of the requests bucket, in units: what was charged and has not drained yet."""
    tokens: int = 0
    """The level of the tokens bucket, in units."""
    at_ms: int = 0
    """The time at which the account was used last, in milliseconds on the store's clock."""
    live: int = 0
    """The leases that the subject holds: its requests that are admitted and neither settled nor expired."""
    spent: int = 0
    """Tokens against the budget: used and reserved."""
    day: int = 0
    """The same against the budget of the day that `at_ms` is in."""
    month: int = 0
    """The same against the budget of the month that `at_ms` is in."""
    requests_at_ms: int = 0
    """The time at which the level of the requests bucket was computed."""
    tokens_at_ms: int = 0
    """The time at which the level of the tokens bucket was computed."""

    def at(self, limits: QuotaLimits, now_ms: int) -> Account:
        """The usage at another time. Time that runs backwards drains nothing (rule 4), and a meter without a
        limit is left as it is (rule 6)."""
        if now_ms == self.at_ms == self.requests_at_ms == self.tokens_at_ms:
            return self
        at_ms = max(self.at_ms, now_ms)
        requests, requests_at_ms = self.requests, at_ms
        if requests:
            per_min = limits.requests_per_min
            requests, requests_at_ms = _drained_to(requests, self.requests_at_ms, per_min, now_ms)
        tokens, tokens_at_ms = self.tokens, at_ms
        if tokens:
            tokens, tokens_at_ms = _drained_to(tokens, self.tokens_at_ms, limits.tokens_per_min, now_ms)
        day, month = self.day, self.month
        if day and day_of(self.at_ms) != day_of(at_ms):
            day = 0
        if month and month_of(self.at_ms) != month_of(at_ms):
            month = 0
        return Account(
            requests, tokens, at_ms, self.live, self.spent, day, month, requests_at_ms, tokens_at_ms
        )


class Window(Struct, frozen=True, gc=False):
    """One bucket, or the budget of one period, as the `x-ratelimit-*` headers show it."""

    limit: int
    remaining: int
    reset_ms: int
    """The time until the bucket is empty if nothing more is charged, or until the period ends, in
    milliseconds."""


class Windows(Struct, frozen=True, gc=False):
    """The tightest window of each bucket and period over the subjects that are the caller's own. None for one
    without a limit."""

    requests: Window | None = None
    tokens: Window | None = None
    day: Window | None = None
    month: Window | None = None


class Refusal(Struct, frozen=True, gc=False):
    meter: Meter
    scope: Scope
    limit: int
    retry_after_ms: int | None
    """The time until a retry may succeed, in milliseconds. None when waiting does not help: the request is
    larger than the limit, which may be zero, or a budget is spent that time does not refill."""
    remaining: int = 0
    """The tokens that are left of any of the budgets; 0 for other meters."""


class Decision(Struct, frozen=True, gc=False):
    refusal: Refusal | None
    windows: Windows | None
    """The quotas after the decision. None for an admitted seat: the headers show the quotas after tokens are
    reserved."""
    granted: int = 0
    """The tokens reserved by this call."""


class Settlement(Struct, frozen=True, gc=False):
    """The result of settling a reservation: what was reserved and not settled is released, and what was
    settled beyond it overdrawn."""

    reserved: int
    settled: int


SubjectAccount = tuple[Subject, Account]
"""A subject and its current account."""


class StoreUnavailable(Exception):
    """The store did not do what it was asked, or nobody knows whether it did."""


class QuotaStore(Protocol):
    """Where usage lives. Each call is atomic, and a repeated one changes nothing. A store that need not wait
    answers with `shield.Done`; one that may wait bounds every call in time. Each raises StoreUnavailable when
    the store cannot be asked."""

    def enter(
        self, reservation: ReservationId, subjects: Sequence[Subject], *, needs_tokens: bool
    ) -> Awaitable[Decision]:
        """Take a seat of every subject, or of none.

        The seat is held until the reservation is settled or its lease, which `renew` extends, runs out.
        `needs_tokens`: whether the request will reserve tokens.
        """
        ...

    def reserve(
        self,
        reservation: ReservationId,
        subjects: Sequence[Subject],
        least: int,
        most: int,
        payer: Payer | None = None,
        *,
        wanted: int = 0,
    ) -> Awaitable[Decision]:
        """Reserve between `least` and `most` tokens of every subject, or of none, once per reservation: asked
        again, the tokens that it has are granted. `wanted` are granted as far as they are left. `subjects`
        begins with those that `enter` was given; the
        others, which the model adds, give their seats now. A seat whose lease ran out meanwhile is taken
        anew, or refused. `payer` is where the request is counted once it is granted; None counts nowhere."""
        ...

    def settle(self, reservation: ReservationId, used: Used) -> Awaitable[Settlement | None]:
        """Charge `used` in place of what was reserved, give the seats back, and count the request with its
        payer. Idempotent: None when the reservation was settled before, or was never granted. One that
        expires is counted as if all that was reserved had been used, by estimate; where it is settled after
        all, that replaces the estimate."""
        ...

    def renew(self, reservations: Sequence[ReservationId]) -> Awaitable[None]:
        """Extend the leases of these reservations. Those that have ended are passed over."""
        ...

    def windows(self, subjects: Sequence[Subject]) -> Awaitable[Windows]:
        """The tightest windows of the subjects. Charges nothing."""
        ...

    def usage(self, tenant: TenantId, first: int, last: int) -> AsyncIterator[UsageRow]:
        """A tenant's usage from one day to another, both counted from 1970-01-01."""
        ...

    def payers(self, first: int, last: int) -> Awaitable[set[TenantId]]:
        """The tenants with usage on one of these days, also those that are gone."""
        ...


# -- one bucket -----------------------------------------------------------------------------------


def drained(level: int, per_min: int, elapsed_ms: int) -> int:
    left = level - per_min * elapsed_ms
    return left if left > 0 else 0


def fits(level: int, per_min: int, amount: int) -> bool:
    return level + amount * WEIGHT <= per_min * WEIGHT


def wait_ms(level: int, per_min: int, amount: int) -> int | None:
    """The time until a bucket has room for `amount`, which it has not now, in milliseconds. None when it
    never will."""
    if amount > per_min or not per_min:
        return None
    return -(-(level + (amount - per_min) * WEIGHT) // per_min)


def charged(level: int, amount: int) -> int:
    """The level after charging `amount` requests or tokens. A negative amount lowers it, never below
    empty."""
    return max(0, level + amount * WEIGHT)


def _drained_to(level: int, at_ms: int, per_min: int | None, now_ms: int) -> tuple[int, int]:
    """A bucket's level now, and the time that it is of."""
    if per_min is None:
        return level, min(at_ms, now_ms)
    return drained(level, per_min, max(0, now_ms - at_ms)), now_ms


# -- all meters of a subject ----------------------------------------------------------------------


def decide(holdings: Sequence[SubjectAccount], *, seated: int, tokens: int) -> Refusal | None:
    """The refusal of a request for a seat of all but the first `seated` subjects, and for so many tokens of
    each; None when every subject has room.

    Where several meters refuse, the refusal is the one that lasts longest.
    """
    found: list[Refusal] = []
    for place, (subject, account) in enumerate(holdings):
        limits, scope = subject.limits, subject.scope
        if place >= seated:
            if (limit := limits.requests_per_min) is not None and not fits(account.requests, limit, 1):
                found.append(Refusal(Meter.REQUESTS, scope, limit, wait_ms(account.requests, limit, 1)))
            if (limit := limits.concurrent) is not None and account.live >= limit:
                found.append(Refusal(Meter.CONCURRENCY, scope, limit, BUSY_RETRY_MS if limit else None))
        if tokens:
            if (limit := limits.tokens_per_min) is not None and not fits(account.tokens, limit, tokens):
                found.append(Refusal(Meter.TOKENS, scope, limit, wait_ms(account.tokens, limit, tokens)))
            if (limit := limits.token_budget) is not None and account.spent + tokens > limit:
                found.append(Refusal(Meter.BUDGET, scope, limit, None, max(0, limit - account.spent)))
            if (limit := limits.tokens_per_day) is not None and account.day + tokens > limit:
                until_ms = day_end_ms(account.at_ms) - account.at_ms if tokens <= limit else None
                left = max(0, limit - account.day)
                found.append(Refusal(Meter.DAY_BUDGET, scope, limit, until_ms, left))
            if (limit := limits.tokens_per_month) is not None and account.month + tokens > limit:
                until_ms = month_end_ms(account.at_ms) - account.at_ms if tokens <= limit else None
                left = max(0, limit - account.month)
                found.append(Refusal(Meter.MONTH_BUDGET, scope, limit, until_ms, left))
    return max(found, key=_lasts_ms) if found else None


def grant(holdings: Iterable[SubjectAccount], least: int, most: int, wanted: int = 0) -> int:
    """The tokens that a request is granted, between `least`, which `decide` has admitted, and `most`: what is
    `wanted` as far as it is left, and more where there is much."""
    if least == most:
        return most
    left = min((left for holding in holdings for left in _tokens_left(*holding)), default=None)
    return most if left is None else min(most, max(least, min(wanted, left), left // GRANT_SHARE))


def charge(limits: QuotaLimits, account: Account, seats: int, tokens: int) -> Account:
    """The subject's usage after a grant."""
    return Account(
        account.requests + (seats * WEIGHT if limits.requests_per_min is not None else 0),
        account.tokens + (tokens * WEIGHT if limits.tokens_per_min is not None else 0),
        account.at_ms,
        account.live + seats,
        account.spent + (tokens if limits.token_budget is not None else 0),
        account.day + (tokens if limits.tokens_per_day is not None else 0),
        account.month + (tokens if limits.tokens_per_month is not None else 0),
        account.requests_at_ms,
        account.tokens_at_ms,
    )


def settle(
    limits: QuotaLimits, account: Account, settlement: Settlement, reserved_ms: int, *, leases: int = 1
) -> Account:
    """The subject's usage after a request: its lease is given back, and the difference between what was
    reserved (at `reserved_ms`) and what was used is charged or refunded. `leases` is 0 where it ran out."""
    assert account.live >= leases, "a lease is given back once"
    difference = settlement.settled - settlement.reserved
    tokens, spent, day, month = account.tokens, account.spent, account.day, account.month
    if limits.tokens_per_min is not None:
        tokens = charged(tokens, difference)
    if limits.token_budget is not None:
        spent = max(0, spent + difference)
    if limits.tokens_per_day is not None and day_of(reserved_ms) == day_of(account.at_ms):
        day = max(0, day + difference)
    if limits.tokens_per_month is not None and month_of(reserved_ms) == month_of(account.at_ms):
        month = max(0, month + difference)
    return Account(
        account.requests,
        tokens,
        account.at_ms,
        account.live - leases,
        spent,
        day,
        month,
        account.requests_at_ms,
        account.tokens_at_ms,
    )


def expire(account: Account) -> Account:
    """The subject's usage after a lease ran out: the seat is free again, the reserved tokens stay charged."""
    assert account.live > 0
    return Account(
        account.requests,
        account.tokens,
        account.at_ms,
        account.live - 1,
        account.spent,
        account.day,
        account.month,
        account.requests_at_ms,
        account.tokens_at_ms,
    )


def windows_of(holdings: Iterable[SubjectAccount]) -> Windows:
    """The tightest windows of the subjects, but for those of a model: what is left for all tenants together
    would tell each what the others use."""
    requests: Window | None = None
    tokens: Window | None = None
    day: Window | None = None
    month: Window | None = None
    for subject, account in holdings:
        if subject.scope is Scope.MODEL:
            continue
        limits = subject.limits
        requests = _tighter(requests, limits.requests_per_min, account.requests)
        tokens = _tighter(tokens, limits.tokens_per_min, account.tokens)
        if (limit := limits.tokens_per_day) is not None:
            day = _tighter_period(day, limit, account.day, day_end_ms(account.at_ms) - account.at_ms)
        if (limit := limits.tokens_per_month) is not None:
            month = _tighter_period(month, limit, account.month, month_end_ms(account.at_ms) - account.at_ms)
    return Windows(requests, tokens, day, month)


def _tokens_left(subject: Subject, account: Account) -> Iterable[int]:
    if (limit := subject.limits.tokens_per_min) is not None:
        yield max(0, limit * WEIGHT - account.tokens) // WEIGHT
    if (limit := subject.limits.token_budget) is not None:
        yield max(0, limit - account.spent)
    if (limit := subject.limits.tokens_per_day) is not None:
        yield max(0, limit - account.day)
    if (limit := subject.limits.tokens_per_month) is not None:
        yield max(0, limit - account.month)


def _lasts_ms(refusal: Refusal) -> float:
    return float("inf") if refusal.retry_after_ms is None else refusal.retry_after_ms


def _tighter(window: Window | None, limit: int | None, level: int) -> Window | None:
    if limit is None:
        return window
    left = limit * WEIGHT - level
    remaining = left // WEIGHT if left > 0 else 0
    if window is not None and window.remaining <= remaining:
        return window
    return Window(limit, remaining, -(-level // limit) if limit else 0)


def _tighter_period(window: Window | None, limit: int, spent: int, reset_ms: int) -> Window:
    remaining = max(0, limit - spent)
    if window is not None and window.remaining <= remaining:
        return window
    return Window(limit, remaining, reset_ms)
