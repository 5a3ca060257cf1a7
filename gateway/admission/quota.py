"""Quotas, decided. Pure: whole numbers in, a decision out, the time is a parameter.

Four meters, each at key and at tenant level: requests per minute, tokens per minute, concurrent
requests, and a token budget that time does not refill. The first two are leaky buckets (GCRA in its
"level" form): a bucket of `limit` per minute holds at most one minute's worth and drains steadily,
so there is no window whose edge lets twice the limit through at once.

Rules:

1. A request reserves on all meters of all its subjects, or on none.
2. Tokens are reserved before they are known (prompt + the most that may be generated) and settled
   with what was used. A refund lowers the level at once; usage above the reservation becomes debt:
   the level passes the brim, and nothing is admitted until it has drained.
3. Whole numbers throughout, so that a store in another language decides the same. One request or
   token weighs `WEIGHT` units; a bucket of `limit` per minute drains `limit` units each millisecond.
4. Time that runs backwards drains nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from enum import StrEnum
from typing import Final, NewType, Protocol

from msgspec import Struct

from gateway.config import QUOTA_MAX, QuotaLimits

ReservationId = NewType("ReservationId", str)

WEIGHT: Final = 60_000
assert QUOTA_MAX * WEIGHT < 2**53, "levels stay exact where numbers are doubles"
BUSY_RETRY_MS: Final = 1_000
"""When a concurrency limit may have room again: nobody knows, so this is a guess and a spacing."""


class Meter(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"
    BUDGET = "budget"


class Scope(StrEnum):
    __hash__ = str.__hash__  # accounts are looked up by it, and Enum's own is slow

    KEY = "key"
    TENANT = "tenant"


class Subject(Struct, frozen=True):
    """Somebody whose quotas a request counts against."""

    scope: Scope
    id: str
    limits: QuotaLimits


class Bucket(Struct, frozen=True):
    level: int = 0
    """In units: what was charged and has not drained yet."""
    at_ms: int = 0
    """When `level` was true."""

    def at(self, per_min: int, now_ms: int) -> Bucket:
        if now_ms == self.at_ms:
            return self
        elapsed_ms = max(0, now_ms - self.at_ms)
        return Bucket(max(0, self.level - per_min * elapsed_ms), max(self.at_ms, now_ms))

    def plus(self, amount: int) -> Bucket:
        """`amount` requests or tokens more; less when negative, but never below empty."""
        return Bucket(max(0, self.level + amount * WEIGHT), self.at_ms)

    def wait_ms(self, per_min: int, amount: int) -> int | None:
        """How long until `amount` fits: 0 is now, None is never. `self` must be current."""
        if amount > per_min:
            return None
        excess = self.level + amount * WEIGHT - per_min * WEIGHT
        return max(0, -(-excess // per_min)) if per_min else 0


_EMPTY: Final = Bucket()


class Usage(Struct, frozen=True):
    """What a subject has used, as a store keeps it."""

    requests: Bucket = _EMPTY
    tokens: Bucket = _EMPTY
    live: int = 0
    """Leases held: requests admitted, neither settled nor expired."""
    spent: int = 0
    """Tokens against the budget: used and reserved."""


class Window(Struct, frozen=True):
    """One meter as `x-ratelimit-*` shows it."""

    limit: int
    remaining: int
    reset_ms: int
    """Until the bucket is empty, when nothing more is charged."""


class Windows(Struct, frozen=True):
    """The tightest window of each kind over all subjects; None where nobody has a limit."""

    requests: Window | None = None
    tokens: Window | None = None


class Refusal(Struct, frozen=True):
    meter: Meter
    scope: Scope
    limit: int
    retry_after_ms: int | None
    """None: waiting does not help, the request is larger than the limit or the budget is spent."""


class Decision(Struct, frozen=True):
    refusal: Refusal | None
    windows: Windows


class Settlement(Struct, frozen=True):
    """What became of a reservation: `reserved + overdrawn == settled + released`."""

    reserved: int
    settled: int

    @property
    def released(self) -> int:
        return max(0, self.reserved - self.settled)

    @property
    def overdrawn(self) -> int:
        return max(0, self.settled - self.reserved)


Holding = tuple[Subject, Usage]


class QuotaStore(Protocol):
    """Where usage lives. Each call is atomic, whoever else calls at the same moment. A store that need not
    wait answers with `shield.Done`."""

    def reserve(
        self, reservation: ReservationId, subjects: Sequence[Subject], tokens: int
    ) -> Awaitable[Decision]:
        """Everything or nothing. A granted reservation holds one lease of every subject until it is
        settled or, unless renewed, until the lease's time to live is over."""
        ...

    def settle(self, reservation: ReservationId, tokens: int) -> Awaitable[Settlement | None]:
        """Idempotent: None when it was settled before, or expired, or never granted."""
        ...

    def renew(self, reservations: Sequence[ReservationId]) -> Awaitable[None]:
        """Extend the leases; those that are gone are passed over."""
        ...

    def windows(self, subjects: Sequence[Subject]) -> Awaitable[Windows]:
        """How things stand, charging nothing."""
        ...


def decide(holdings: Iterable[Holding], tokens: int, now_ms: int) -> Refusal | None:
    """Whether one request of `tokens` may pass. Of several refusals, the one that lasts longest."""
    worst: Refusal | None = None
    for subject, usage in holdings:
        for refusal in _refusals(subject, usage, tokens, now_ms):
            if worst is None or _lasts_ms(refusal) > _lasts_ms(worst):
                worst = refusal
    return worst


def charge(limits: QuotaLimits, usage: Usage, tokens: int, now_ms: int) -> Usage:
    """After a grant."""
    return Usage(
        requests=_changed(usage.requests, limits.requests_per_min, 1, now_ms),
        tokens=_changed(usage.tokens, limits.tokens_per_min, tokens, now_ms),
        live=usage.live + 1,
        spent=usage.spent + tokens,
    )


def settle(limits: QuotaLimits, usage: Usage, settlement: Settlement, now_ms: int) -> Usage:
    """After the request ended: the lease is given back, and the difference is charged or refunded."""
    assert usage.live > 0, "a lease is given back once"
    difference = settlement.settled - settlement.reserved
    return Usage(
        requests=usage.requests,
        tokens=_changed(usage.tokens, limits.tokens_per_min, difference, now_ms),
        live=usage.live - 1,
        spent=max(0, usage.spent + difference),
    )


def expire(usage: Usage) -> Usage:
    """A lease ran out unsettled: the seat is free again, the reserved tokens stay charged."""
    assert usage.live > 0
    return Usage(usage.requests, usage.tokens, usage.live - 1, usage.spent)


def windows_of(holdings: Iterable[Holding], now_ms: int) -> Windows:
    requests: list[Window] = []
    tokens: list[Window] = []
    for subject, usage in holdings:
        if (limit := subject.limits.requests_per_min) is not None:
            requests.append(_window(usage.requests.at(limit, now_ms), limit))
        if (limit := subject.limits.tokens_per_min) is not None:
            tokens.append(_window(usage.tokens.at(limit, now_ms), limit))
    return Windows(_tightest(requests), _tightest(tokens))


def _refusals(subject: Subject, usage: Usage, tokens: int, now_ms: int) -> Iterable[Refusal]:
    limits = subject.limits
    if (limit := limits.requests_per_min) is not None:
        wait_ms = usage.requests.at(limit, now_ms).wait_ms(limit, 1)
        if wait_ms != 0:
            yield Refusal(Meter.REQUESTS, subject.scope, limit, wait_ms)
    if (limit := limits.tokens_per_min) is not None:
        wait_ms = usage.tokens.at(limit, now_ms).wait_ms(limit, tokens)
        if wait_ms != 0:
            yield Refusal(Meter.TOKENS, subject.scope, limit, wait_ms)
    if (limit := limits.concurrent) is not None and usage.live >= limit:
        yield Refusal(Meter.CONCURRENCY, subject.scope, limit, BUSY_RETRY_MS)
    if (limit := limits.token_budget) is not None and usage.spent + tokens > limit:
        yield Refusal(Meter.BUDGET, subject.scope, limit, None)


def _changed(bucket: Bucket, per_min: int | None, amount: int, now_ms: int) -> Bucket:
    """Without a limit nothing is kept: a limit that comes later starts from an empty bucket."""
    return _EMPTY if per_min is None else bucket.at(per_min, now_ms).plus(amount)


def _lasts_ms(refusal: Refusal) -> float:
    return float("inf") if refusal.retry_after_ms is None else refusal.retry_after_ms


def _window(bucket: Bucket, limit: int) -> Window:
    remaining = max(0, limit * WEIGHT - bucket.level) // WEIGHT
    return Window(limit, remaining, -(-bucket.level // limit) if limit else 0)


def _tightest(windows: list[Window]) -> Window | None:
    return min(windows, key=lambda window: window.remaining, default=None)
