"""Quotas: the pure decisions, and every store against one contract."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.admission import memory_store
from gateway.admission.memory_store import IDLE_MS, MemoryStore
from gateway.admission.quota import (
    BUSY_RETRY_MS,
    GRANT_SHARE,
    LEASE_TTL_MS,
    WEIGHT,
    Account,
    Meter,
    Refusal,
    ReservationId,
    Scope,
    Settlement,
    Subject,
    Windows,
    charged,
    drained,
    fits,
    wait_ms,
)
from gateway.admission.usage import Payer, Used
from gateway.config.quotas import QuotaLimits
from shared.wire.ids import KeyId, TenantId
from tests.fakes import VirtualClock
from tests.gateway.admission.quota_calls import Both, of_limits, remaining, rid, subject, take

T = TypeVar("T")

LIMITS: Final = st.integers(1, 10**9)


# -- the bucket -----------------------------------------------------------------------------------


@given(LIMITS, st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_wait_is_exactly_long_enough(per_min: int, level: int, amount: int) -> None:
    level *= WEIGHT
    if fits(level, per_min, amount):
        return
    wait = wait_ms(level, per_min, amount)
    if amount > per_min:
        assert wait is None
        return
    assert wait is not None
    assert wait > 0
    assert fits(drained(level, per_min, wait), per_min, amount)
    almost = drained(level, per_min, wait - 1)
    assert not fits(almost, per_min, amount)
    assert wait_ms(almost, per_min, amount) == 1


@given(LIMITS, st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 50)), max_size=60))
def test_grants_never_exceed_the_limit_and_what_has_drained(
    per_min: int, arrivals: list[tuple[int, int]]
) -> None:
    """In any time T at most `limit` and `limit` per minute of T pass."""
    level, now_ms, passed = 0, 0, []
    for elapsed_ms, amount in arrivals:
        now_ms += elapsed_ms
        level = drained(level, per_min, elapsed_ms)
        if fits(level, per_min, amount):
            level = charged(level, amount)
            passed.append((now_ms, amount))
    for i, (start_ms, _) in enumerate(passed):
        total = 0
        for at_ms, amount in passed[i:]:
            total += amount
            assert total * WEIGHT <= per_min * WEIGHT + per_min * (at_ms - start_ms)


@pytest.mark.parametrize("seen", [QuotaLimits(requests_per_min=60, tokens_per_min=60), QuotaLimits()])
def test_time_that_runs_backwards_drains_nothing_and_holds_nothing_up(seen: QuotaLimits) -> None:
    """Whether or not a call that sees the earlier time has the limits."""
    ahead_ms = 3_600_000
    limits = QuotaLimits(requests_per_min=60, tokens_per_min=60)
    usage = Account(60 * WEIGHT, 60 * WEIGHT, ahead_ms, requests_at_ms=ahead_ms, tokens_at_ms=ahead_ms)
    back = usage.at(seen, 500)
    assert (back.requests, back.tokens, back.at_ms) == (60 * WEIGHT, 60 * WEIGHT, ahead_ms)
    later = back.at(limits, 1500)
    assert (later.requests, later.tokens) == (59 * WEIGHT, 59 * WEIGHT)


@given(LIMITS, st.lists(st.integers(-90_000, 90_000), max_size=30), st.integers(0, 10**9))
def test_a_clock_that_is_put_back_and_forth_drains_no_more_than_the_time_that_it_showed(
    per_min: int, steps_ms: list[int], level: int
) -> None:
    limits, now_ms, shown_ms = QuotaLimits(tokens_per_min=per_min), 10**9, 0
    usage = Account(tokens=level * WEIGHT, at_ms=now_ms, tokens_at_ms=now_ms)
    for step_ms in steps_ms:
        now_ms += step_ms
        shown_ms += max(0, step_ms)
        usage = usage.at(limits, now_ms)
        assert usage.tokens == drained(level * WEIGHT, per_min, shown_ms)


# -- the contract of a store ----------------------------------------------------------------------


async def test_concurrent_reservations_never_exceed_the_limit(clock_and_store: Both) -> None:
    _, store = clock_and_store
    who = [subject(requests_per_min=100)]
    decisions = await asyncio.gather(*(take(store, rid(i), who, 1) for i in range(1000)))
    assert sum(d.refusal is None for d in decisions) == 100


async def test_the_request_quota_drains_with_time(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    who = [subject(requests_per_min=2)]
    for i in range(2):
        assert (await take(store, rid(i), who, 0)).refusal is None
    refusal = (await take(store, rid(2), who, 0)).refusal
    assert refusal == Refusal(Meter.REQUESTS, Scope.KEY, 2, 30_000)
    clock.advance(29.9)
    assert (await take(store, rid(3), who, 0)).refusal is not None
    clock.advance(0.2)
    assert (await take(store, rid(4), who, 0)).refusal is None


async def test_tokens_are_reserved_and_the_rest_refunded(clock_and_store: Both) -> None:
    _, store = clock_and_store
    who = [subject(tokens_per_min=1000)]
    windows = (await take(store, rid(1), who, 900)).windows
    assert windows is not None
    assert remaining(windows.tokens) == 100
    refusal = (await take(store, rid(2), who, 200)).refusal
    assert refusal is not None
    assert refusal.meter is Meter.TOKENS
    assert refusal.retry_after_ms == 6_000
    assert await store.settle(rid(1), Used(completion=100)) == Settlement(900, 100)
    assert remaining((await store.windows(who)).tokens) == 900
    assert (await take(store, rid(3), who, 900)).refusal is None


async def test_usage_above_the_reservation_is_debt(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    who = [subject(tokens_per_min=60)]
    await take(store, rid(1), who, 10)
    settlement = await store.settle(rid(1), Used(completion=120))
    assert settlement == Settlement(10, 120)
    assert (await take(store, rid(2), who, 1)).refusal is not None
    clock.advance(60)
    assert (await take(store, rid(3), who, 1)).refusal is not None
    clock.advance(1)
    assert (await take(store, rid(4), who, 1)).refusal is None


async def test_a_request_larger_than_its_quota_has_no_retry_after(clock_and_store: Both) -> None:
    _, store = clock_and_store
    refusal = (await take(store, rid(1), [subject(tokens_per_min=10)], 11)).refusal
    assert refusal == Refusal(Meter.TOKENS, Scope.KEY, 10, None)


async def test_a_quota_of_zero_admits_nothing(clock_and_store: Both) -> None:
    _, store = clock_and_store
    for name, limits in (("requests", QuotaLimits(requests_per_min=0)), ("seats", QuotaLimits(concurrent=0))):
        refusal = (await take(store, rid(name), [of_limits(limits)], 0)).refusal
        assert refusal is not None
        assert refusal.retry_after_ms is None, "and waiting does not help"
    assert (await take(store, rid(1), [subject(token_budget=0)], 1)).refusal is not None


async def test_a_reservation_charges_all_subjects_or_none(clock_and_store: Both) -> None:
    _, store = clock_and_store
    key, tenant = subject(tokens_per_min=1000), subject("t", Scope.TENANT, tokens_per_min=100)
    refusal = (await take(store, rid(1), [key, tenant], 500)).refusal
    assert refusal is not None
    assert refusal.scope is Scope.TENANT
    assert remaining((await store.windows([key])).tokens) == 1000
    decision = await take(store, rid(2), [key, tenant], 80)
    assert decision.windows is not None
    tokens = decision.windows.tokens
    assert tokens is not None
    assert (tokens.limit, tokens.remaining) == (100, 20)


async def test_of_several_refusals_the_one_with_the_longest_wait_is_returned(clock_and_store: Both) -> None:
    _, store = clock_and_store
    who = [subject(requests_per_min=1, concurrent=1, token_budget=5)]
    await take(store, rid(1), who, 5)
    refusal = (await take(store, rid(2), who, 5)).refusal
    assert refusal == Refusal(Meter.BUDGET, Scope.KEY, 5, None)


async def test_a_budget_does_not_refill_but_is_refunded(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    who = [subject(token_budget=100)]
    await take(store, rid(1), who, 100)
    assert (await take(store, rid(2), who, 1)).refusal is not None
    await store.settle(rid(1), Used(completion=60))
    clock.advance(3600)
    assert (await take(store, rid(3), who, 41)).refusal is not None
    assert (await take(store, rid(4), who, 40)).refusal is None


async def test_settle_is_idempotent_and_ignores_unknown_reservations(clock_and_store: Both) -> None:
    _, store = clock_and_store
    who = [subject(concurrent=1, token_budget=100)]
    await take(store, rid(1), who, 50)
    assert await store.settle(rid("nobody"), Used(completion=5)) is None
    assert await store.settle(rid(1), Used(completion=20)) is not None
    assert await store.settle(rid(1), Used(completion=20)) is None
    assert (await take(store, rid(2), who, 80)).refusal is None


async def test_concurrency_is_a_lease(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    who = [subject(concurrent=1)]
    await take(store, rid(1), who, 0)
    refusal = (await take(store, rid(2), who, 0)).refusal
    assert refusal == Refusal(Meter.CONCURRENCY, Scope.KEY, 1, BUSY_RETRY_MS)
    clock.advance(LEASE_TTL_MS / 1000 - 1)
    await store.renew([rid(1), rid("nobody")])
    clock.advance(LEASE_TTL_MS / 1000 - 1)
    assert (await take(store, rid(3), who, 0)).refusal is not None, "renewed, so still held"
    clock.advance(1)
    assert (await take(store, rid(4), who, 0)).refusal is None, "a lease outlived its time to live"
    await store.settle(rid(1), Used())
    assert (await take(store, rid(5), who, 0)).refusal is not None, "it had no seat to give back"


async def test_a_settlement_that_comes_late_frees_nobody_elses_seat(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    who = [subject(concurrent=1)]
    await take(store, rid("late"), who, 10)
    clock.advance(LEASE_TTL_MS / 1000)
    await take(store, rid("next"), who, 10)
    assert await store.settle(rid("late"), Used(completion=5)) is not None
    assert (await take(store, rid("third"), who, 0)).refusal is not None


async def test_what_is_reserved_anew_after_its_lease_ran_out_is_settled_once() -> None:
    """Redis remembers what was settled, and this process what it has settled there."""
    clock = VirtualClock()
    store, who = MemoryStore(clock), [subject(token_budget=100)]
    await store.reserve(rid(1), who, 10, 10)
    clock.advance(LEASE_TTL_MS / 1000)
    await store.reserve(rid(1), who, 10, 10)
    assert await store.settle(rid(1), Used(completion=10)) == Settlement(10, 10)
    assert await store.settle(rid(1), Used(completion=10)) is None


async def test_a_lease_that_ran_out_stays_charged(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    who = [subject(token_budget=100)]
    await take(store, rid(1), who, 100)
    clock.advance(LEASE_TTL_MS / 1000)
    assert (await take(store, rid(2), who, 1)).refusal is not None


async def test_limits_that_differ_by_subject_are_kept_apart(clock_and_store: Both) -> None:
    _, store = clock_and_store
    for scope in Scope:
        for name in ("a", "b"):
            who = [subject(name, scope, requests_per_min=1)]
            assert (await take(store, rid(f"{scope}{name}"), who, 0)).refusal is None
            assert (await take(store, rid(f"{scope}{name}2"), who, 0)).refusal is not None


async def test_the_same_holder_in_two_tenants_has_two_accounts(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    for scope, name in ((Scope.KEY, "idp:1"), (Scope.KEY_MODEL, "idp:1/m")):
        for tenant in ("a", "b"):
            who = [Subject(scope, name, QuotaLimits(concurrent=1, token_budget=10), TenantId(tenant))]
            for admitted in (True, False):
                call = store.reserve(rid(f"{scope} {tenant} {admitted}"), who, 10, 10)
                assert ((await call).refusal is None) == admitted
            assert await store.settle(rid(f"{scope} {tenant} True"), Used(completion=4)) is not None
            assert (await store.reserve(rid(f"{scope} {tenant} left"), who, 6, 6)).refusal is None
    clock.advance(LEASE_TTL_MS / 1000)
    await take(store, rid("later"), who, 0)
    assert (await take(store, rid("one at a time"), who, 0)).refusal is not None


async def test_without_limits_nothing_is_shown_or_kept(clock_and_store: Both) -> None:
    _, store = clock_and_store
    decision = await take(store, rid(1), [subject()], 10**9)
    assert decision.refusal is None
    assert decision.windows == Windows()


async def test_a_seat_is_taken_before_any_token(clock_and_store: Both) -> None:
    _, store = clock_and_store
    who = [subject(requests_per_min=2, concurrent=1, tokens_per_min=100)]
    decision = await store.enter(rid(1), who, needs_tokens=True)
    assert decision.refusal is None
    windows = await store.windows(who)
    assert remaining(windows.requests) == 1
    assert remaining(windows.tokens) == 100
    refusal = (await store.enter(rid(2), who, needs_tokens=False)).refusal
    assert refusal == Refusal(Meter.CONCURRENCY, Scope.KEY, 1, BUSY_RETRY_MS)
    await store.settle(rid(1), Used())
    assert (await store.enter(rid(3), who, needs_tokens=True)).refusal is None
    await store.settle(rid(3), Used())
    refusal = (await store.enter(rid(4), who, needs_tokens=True)).refusal
    assert refusal is not None
    assert refusal.meter is Meter.REQUESTS, "ended requests stay counted"


@pytest.mark.parametrize("limits", [QuotaLimits(tokens_per_min=0), QuotaLimits(token_budget=0)])
async def test_a_subject_without_a_token_left_gets_no_seat_for_a_request_with_tokens(
    clock_and_store: Both, limits: QuotaLimits
) -> None:
    _, store = clock_and_store
    who = [of_limits(limits)]
    assert (await store.enter(rid(1), who, needs_tokens=True)).refusal is not None
    assert (await store.enter(rid(2), who, needs_tokens=False)).refusal is None


async def test_a_seat_whose_lease_ran_out_is_taken_anew_with_the_tokens(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    who = [subject(concurrent=1, token_budget=100)]
    await store.enter(rid(1), who, needs_tokens=True)
    clock.advance(LEASE_TTL_MS / 1000)
    assert (await store.reserve(rid(1), who, 10, 10)).refusal is None
    assert (await store.enter(rid(2), who, needs_tokens=True)).refusal is not None
    await store.settle(rid(1), Used(completion=10))
    await store.enter(rid(3), who, needs_tokens=True)
    clock.advance(LEASE_TTL_MS / 1000)
    await store.enter(rid(4), who, needs_tokens=True)
    refusal = (await store.reserve(rid(3), who, 10, 10)).refusal
    assert refusal is not None
    assert refusal.meter is Meter.CONCURRENCY, "somebody else sits there now"


async def test_an_open_maximum_is_granted_a_share_of_what_is_left(clock_and_store: Both) -> None:
    _, store = clock_and_store
    who = [subject(token_budget=1000)]
    assert (await take(store, rid(1), who, 10, 10_000)).granted == 1000 // GRANT_SHARE
    assert (await take(store, rid(2), who, 10, 100)).granted == 100, "no more than it could use"
    assert (await take(store, rid(3), who, 300, 10_000)).granted == 300, "no less than it needs"
    refusal = (await take(store, rid(4), who, 351, 10_000)).refusal
    assert refusal == Refusal(Meter.BUDGET, Scope.KEY, 1000, None, 350)
    assert (await take(store, rid(5), who, 350, 10_000)).granted == 350
    assert (await take(store, rid(6), [subject("free")], 10, 10_000)).granted == 10_000


async def test_a_repeated_call_changes_nothing(clock_and_store: Both) -> None:
    _, store = clock_and_store
    who = [subject(requests_per_min=10, concurrent=2, token_budget=100)]
    for _ in range(3):
        assert (await store.enter(rid(1), who, needs_tokens=True)).refusal is None
    first = await store.reserve(rid(1), who, 10, 1000)
    assert await store.reserve(rid(1), who, 10, 1000) == first
    assert first.windows is not None
    assert remaining(first.windows.requests) == 9
    assert (await store.enter(rid(2), who, needs_tokens=True)).refusal is None
    assert (await store.reserve(rid(2), who, 75, 75)).refusal is None
    assert await store.settle(rid(1), Used(completion=25)) == Settlement(25, 25)


# -- law 4 ----------------------------------------------------------------------------------------


def run(call: Awaitable[T]) -> T:
    async def awaited() -> T:
        return await call

    return asyncio.run(awaited())


class Law4(RuleBasedStateMachine):
    """Reserved = settled + released (and overdrawn, and outstanding) whatever comes in whatever order, all
    that is settled is counted, and no lease outlives its time to live."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.store = MemoryStore(self.clock, days_kept=10**6)
        self.who = [
            subject(
                requests_per_min=50,
                tokens_per_min=5000,
                concurrent=5,
                token_budget=100_000,
                tokens_per_day=50_000,
                tokens_per_month=90_000,
            ),
            subject("t", Scope.TENANT, tokens_per_min=8000, concurrent=7),
        ]
        self.granted: dict[ReservationId, float] = {}
        self.count = 0

    @rule(least=st.integers(1, 6000), more=st.integers(0, 6000), subjects=st.integers(1, 2))
    def reserve(self, least: int, more: int, subjects: int) -> None:
        self.count += 1
        name = rid(self.count)
        payer = Payer(TenantId("t"), KeyId(f"k{subjects}"), "m")
        decision = run(take(self.store, name, self.who[:subjects], least, least + more, payer))
        if decision.refusal is None:
            assert least <= decision.granted <= least + more
            self.granted[name] = self.clock.monotonic()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), tokens=st.integers(0, 9000))
    def settle(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.granted)))
        del self.granted[name]
        settlement = run(self.store.settle(name, Used(completion=tokens)))
        assert settlement is not None, "also where its lease has run out"
        assert run(self.store.settle(name, Used(completion=tokens))) is None

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.granted)))
        expired = self.clock.monotonic() - self.granted[name] >= LEASE_TTL_MS / 1000
        run(self.store.renew([name]))
        if not expired:
            self.granted[name] = self.clock.monotonic()

    @rule(seconds=st.integers(0, 90) | st.sampled_from([3_600, 86_400, 31 * 86_400]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @invariant()
    def conserved(self) -> None:
        assert self.store.ledger.balanced
        for usage in self.store._accounts.values():
            assert usage.live >= 0
            assert usage.spent >= 0
            assert usage.tokens >= 0
            assert 0 <= usage.day <= usage.month
        rows = self.store.rows.of(TenantId("t"), 0, 10**6)
        assert sum(row.totals.total_tokens for row in rows) == self.store.ledger.settled

    def teardown(self) -> None:
        self.clock.advance(LEASE_TTL_MS / 1000)
        run(self.store.renew([]))
        assert self.store.live == 0
        assert self.store.ledger.outstanding == 0
        assert all(usage.live == 0 for usage in self.store._accounts.values())


TestLaw4 = Law4.TestCase
TestLaw4.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


async def test_accounts_that_nobody_uses_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens name subjects without end, each with an account of its own."""
    monkeypatch.setattr(memory_store, "ACCOUNTS_MIN", 10)
    clock = VirtualClock()
    store = MemoryStore(clock)

    async def use(*names: str, **limits: Any) -> None:
        for name in names:
            decision = await take(store, rid(name), [subject(name, **limits)], 1)
            assert decision.refusal is None
            await store.settle(rid(name), Used(completion=1 if "token_budget" in limits else 0))

    await use("spender", token_budget=2)
    await use(*(f"first-{number}" for number in range(100)), concurrent=1)
    assert len(store._accounts) == 101, "nobody has been idle yet"
    clock.advance(IDLE_MS / 1000)
    await use(*(f"second-{number}" for number in range(100)), concurrent=1)
    assert len(store._accounts) == 101
    assert not any(name.startswith("first") for _, name, _ in store._accounts)
    assert (await take(store, rid("more"), [subject("spender", token_budget=2)], 2)).refusal is not None


async def test_the_account_of_a_request_that_runs_for_hours_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_store, "ACCOUNTS_MIN", 1)
    clock = VirtualClock()
    store, who = MemoryStore(clock), [subject(concurrent=1)]
    await take(store, rid("long"), who, 0)
    for _ in range(4 * IDLE_MS // LEASE_TTL_MS):
        clock.advance(LEASE_TTL_MS / 2000)
        await store.renew([rid("long")])
    for i in range(5):
        await take(store, rid(i), [subject(f"new {i}", concurrent=1)], 0)
    assert (await take(store, rid("second"), who, 0)).refusal is not None
    await store.settle(rid("long"), Used())
    assert (await take(store, rid("third"), who, 0)).refusal is None


async def test_reservations_that_lapsed_are_kept_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_store, "LAPSED_MAX", 3)
    clock = VirtualClock()
    store = MemoryStore(clock)
    for i in range(5):
        await take(store, rid(i), [subject(token_budget=100)], 1)
    clock.advance(LEASE_TTL_MS / 1000)
    await store.renew([])
    settled = [await store.settle(rid(i), Used(completion=1)) is not None for i in range(5)]
    assert settled == [False, False, True, True, True], "the oldest are forgotten"
