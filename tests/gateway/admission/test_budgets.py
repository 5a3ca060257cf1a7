"""Budgets of calendar days and months, and limits of models: what each store does; and the calendar
itself, against the standard library's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import quota
from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import (
    BUSY_RETRY_MS,
    DAY_MS,
    LEASE_TTL_MS,
    Account,
    Meter,
    Refusal,
    Scope,
    Settlement,
    Subject,
    Window,
    Windows,
    charge,
    day_end_ms,
    day_of,
    decide,
    month_end_ms,
    month_of,
)
from gateway.admission.usage import Used
from gateway.config.quotas import BUDGET_MAX, QuotaLimits
from shared.wire.ids import TenantId
from tests.fakes import VirtualClock
from tests.gateway.admission.quota_calls import Both, of_limits, remaining, rid, subject, take
from tests.gateway.redis_server import RedisServer

# -- budgets of a day and of a month --------------------------------------------------------------

NOON_MS: Final = 1_700_049_600_000  # 2023-11-15T12:00Z
HALF_A_DAY_MS: Final = 43_200_000


def at_noon(clock: VirtualClock) -> None:
    """Move to the middle of a day in the middle of a month."""
    clock.advance(NOON_MS / 1000 - clock.wall())


async def test_a_days_budget_is_full_again_at_midnight_utc_and_says_so(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    at_noon(clock)
    await store.renew([])
    who = [subject(tokens_per_day=100)]
    await take(store, rid(1), who, 90)
    refusal = (await take(store, rid(2), who, 20)).refusal
    assert refusal == Refusal(Meter.DAY_BUDGET, Scope.KEY, 100, HALF_A_DAY_MS, 10)
    assert (await store.windows(who)).day == Window(100, 10, HALF_A_DAY_MS)
    clock.advance(HALF_A_DAY_MS / 1000 - 0.001)
    assert (await take(store, rid(3), who, 20)).refusal is not None
    clock.advance(0.001)
    assert (await take(store, rid(4), who, 100)).refusal is None


async def test_a_months_budget_is_full_again_on_the_first(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    at_noon(clock)
    who = [subject(tokens_per_month=100, tokens_per_day=60)]
    assert (await take(store, rid(1), who, 60)).refusal is None
    clock.advance(86_400)
    left_ms = 15 * 86_400_000 - HALF_A_DAY_MS
    refusal = (await take(store, rid(2), who, 50)).refusal
    assert refusal == Refusal(Meter.MONTH_BUDGET, Scope.KEY, 100, left_ms, 40)
    assert (await take(store, rid(3), who, 40)).refusal is None
    clock.advance(left_ms / 1000)
    assert (await take(store, rid(4), who, 60)).refusal is None


async def test_a_request_larger_than_a_whole_period_has_no_retry_after(clock_and_store: Both) -> None:
    _, store = clock_and_store
    for who in (subject("day", tokens_per_day=10), subject("month", tokens_per_month=10)):
        refusal = (await take(store, rid(who.id), [who], 11)).refusal
        assert refusal is not None
        assert refusal.retry_after_ms is None


async def test_a_request_as_large_as_a_whole_period_may_come_again_when_the_next_begins(
    clock_and_store: Both,
) -> None:
    clock, store = clock_and_store
    at_noon(clock)
    for who in (subject("day", tokens_per_day=10), subject("month", tokens_per_month=10)):
        await take(store, rid(f"before {who.id}"), [who], 1)
        refusal = (await take(store, rid(who.id), [who], 10)).refusal
        assert refusal is not None
        assert refusal.retry_after_ms is not None


@pytest.mark.parametrize("used", [0, 30, 500])
async def test_what_is_settled_after_midnight_changes_nothing_in_the_new_day(
    clock_and_store: Both, used: int
) -> None:
    """A refund would give the new day more than its budget, and a debt less."""
    clock, store = clock_and_store
    at_noon(clock)
    clock.advance(HALF_A_DAY_MS / 1000 - 1)
    who = [subject(tokens_per_day=100, tokens_per_month=10_000)]
    await take(store, rid("late"), who, 60)
    clock.advance(2)
    await take(store, rid("new"), who, 40)
    assert await store.settle(rid("late"), Used(completion=used)) == Settlement(60, used)
    windows = await store.windows(who)
    assert remaining(windows.day) == 60
    assert remaining(windows.month) == 10_000 - 40 - used


async def test_usage_above_the_reservation_counts_in_the_same_day(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    at_noon(clock)
    who = [subject(tokens_per_day=100)]
    await take(store, rid(1), who, 10)
    await store.settle(rid(1), Used(completion=150))
    assert remaining((await store.windows(who)).day) == 0
    assert (await take(store, rid(2), who, 1)).refusal is not None
    clock.advance(HALF_A_DAY_MS / 1000)
    assert (await take(store, rid(3), who, 100)).refusal is None


def test_a_clock_that_goes_back_over_midnight_begins_no_day_twice() -> None:
    limits = QuotaLimits(tokens_per_day=100, tokens_per_month=100)
    midnight_ms = NOON_MS + HALF_A_DAY_MS
    usage = Account(at_ms=midnight_ms - 5, day=90, month=90).at(limits, midnight_ms)
    assert (usage.day, usage.month) == (0, 90)
    spent = charge(limits, usage, 1, 100)
    for now_ms in (midnight_ms - 1, midnight_ms + 1, midnight_ms - 3_600_000):
        assert spent.at(limits, now_ms).day == 100


def test_a_budget_of_any_size_is_exact() -> None:
    limits = QuotaLimits(tokens_per_month=BUDGET_MAX, token_budget=BUDGET_MAX)
    usage = charge(limits, Account(), 1, BUDGET_MAX - 1)
    holdings = [(of_limits(limits), usage)]
    assert decide(holdings, seated=1, tokens=1) is None
    assert decide(holdings, seated=1, tokens=2) is not None


async def test_a_wall_clock_that_is_put_forward_begins_the_day_and_one_put_back_does_not() -> None:
    clock = VirtualClock()
    at_noon(clock)
    store, who = MemoryStore(clock), [subject(tokens_per_day=100)]
    await take(store, rid(1), who, 100)
    clock._wall += HALF_A_DAY_MS / 1000
    await store.renew([])
    assert (await take(store, rid(2), who, 100)).refusal is None
    clock._wall -= 2 * HALF_A_DAY_MS / 1000
    await store.renew([])
    refusal = (await take(store, rid(3), who, 1)).refusal
    assert refusal is not None
    assert refusal.meter is Meter.DAY_BUDGET
    assert store.live == 2, "leases run by the other clock"


# -- limits of a model ----------------------------------------------------------------------------


def of_model(scope: Scope, tenant: str = "t", **limits: int | None) -> Subject:
    id_ = "m" if scope is Scope.MODEL else f"{tenant}/m"
    return Subject(scope, id_, QuotaLimits(**limits), TenantId(tenant))


@pytest.mark.parametrize("scope", [Scope.MODEL, Scope.KEY_MODEL, Scope.TENANT_MODEL])
async def test_a_models_limits_are_taken_with_the_tokens_or_not_at_all(
    clock_and_store: Both, scope: Scope
) -> None:
    _, store = clock_and_store
    key, model = subject(concurrent=9, tokens_per_min=1000), of_model(scope, concurrent=1, token_budget=100)
    for name in (1, 2):
        assert (await store.enter(rid(name), [key], needs_tokens=True)).refusal is None
    assert (await store.reserve(rid(1), [key, model], 60, 60)).granted == 60
    refusal = (await store.reserve(rid(2), [key, model], 10, 10)).refusal
    assert refusal == Refusal(Meter.CONCURRENCY, scope, 1, BUSY_RETRY_MS)
    assert remaining((await store.windows([key])).tokens) == 940, "and nothing of the key's"
    await store.settle(rid(1), Used(completion=50))
    assert (await store.reserve(rid(2), [key, model], 50, 50)).refusal is None
    refusal = (await take(store, rid(3), [key], 0)).refusal
    assert refusal is None, "another model is not concerned"


async def test_what_is_left_of_a_model_for_all_tenants_is_shown_to_none(clock_and_store: Both) -> None:
    _, store = clock_and_store
    limits = {"requests_per_min": 2, "tokens_per_min": 100, "tokens_per_day": 100, "tokens_per_month": 100}
    for name in (1, 2, 3):
        own, model = subject(f"k{name}", requests_per_min=9), of_model(Scope.MODEL, "t", **limits)
        decision = await store.reserve(rid(name), [own, model], 30, 30)
        assert (decision.refusal is None) == (name < 3)
        left = 8 if name < 3 else 9
        assert decision.windows == Windows(requests=Window(9, left, (9 - left) * 6667))


async def test_a_models_limit_counts_all_tenants_together(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    for at, tenant in enumerate(("a", "b", "c")):
        model = of_model(Scope.MODEL, tenant, concurrent=2)
        assert (await store.reserve(rid(tenant), [model], 5, 5)).refusal is None or at == 2
    model = of_model(Scope.MODEL, "d", concurrent=2)
    assert (await store.reserve(rid("d"), [model], 5, 5)).refusal is not None
    clock.advance(LEASE_TTL_MS / 1000)  # both gateways died, and neither tenant calls again
    assert (await store.reserve(rid("d2"), [model], 5, 5)).refusal is None


EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LUA: Final = (Path(quota.__file__).parent / "quota.lua").read_text()
MOMENTS: Final = st.integers(0, 4_102_444_800_000)  # until 2100


def at(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


@given(MOMENTS)
def test_a_period_ends_where_the_calendar_says(ms: int) -> None:
    moment = at(ms)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    assert at(day_end_ms(ms)) == midnight + timedelta(days=1)
    assert at(month_end_ms(ms)) == (midnight.replace(day=1) + timedelta(days=31)).replace(day=1)


def test_days_and_months_are_counted_without_a_gap_or_a_repetition() -> None:
    """Every day from 1970 to 2105, over leap years and 2100, which is none."""
    month = month_of(0)
    for day in range(1, 49_500):
        ms = day * DAY_MS
        month += at(ms).day == 1
        assert (day_of(ms), day_of(ms - 1), month_of(ms)) == (day, day - 1, month)


def test_redis_counts_the_same_months(redis: RedisServer) -> None:
    begin, end = LUA.index("local function day_of"), LUA.index("local function parse")
    script = f"local DAY_MS = 86400000\n{LUA[begin:end]}\nlocal found = {{}}\n" + (
        "for day = 0, 49499 do found[#found + 1] = month_of(day * DAY_MS + 5) end return found"
    )
    assert redis.admin.eval(script, 0) == [month_of(day * DAY_MS) for day in range(49_500)]


@pytest.mark.parametrize(
    "limits",
    [
        QuotaLimits(requests_per_min=1),
        QuotaLimits(tokens_per_min=100),
        QuotaLimits(token_budget=100),
        QuotaLimits(tokens_per_day=100),
        QuotaLimits(tokens_per_month=100),
    ],
)
async def test_a_call_without_a_limit_leaves_what_was_counted_by_it(
    clock_and_store: Both, limits: QuotaLimits
) -> None:
    """The limit is set while a request runs, or somebody else reaches the subject without it."""
    _, store = clock_and_store
    limited, others = [of_limits(limits)], [subject(concurrent=9)]
    await take(store, rid("before"), others, 70)
    assert (await take(store, rid(1), limited, 60)).refusal is None, "what came before does not count"
    await store.settle(rid(1), Used(completion=100))
    await take(store, rid("beside"), others, 80)
    await store.settle(rid("before"), Used(completion=1))
    await store.settle(rid("beside"), Used(completion=200))
    shown = await store.windows(limited)
    assert all(
        window is None or window.remaining == 0 for window in (shown.requests, shown.tokens, shown.day)
    )
    assert (await take(store, rid(2), limited, 1)).refusal is not None


async def test_a_bucket_drains_on_while_calls_without_its_limit_come(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    limited, others = [subject(requests_per_min=2, tokens_per_min=100)], [subject(tokens_per_min=100)]
    for i in range(2):
        assert (await take(store, rid(i), limited, 50)).refusal is None
    for second in range(29):
        clock.advance(1)
        await take(store, rid(f"other {second}"), others, 1)
    refusal = (await take(store, rid(3), limited, 0)).refusal
    assert refusal == Refusal(Meter.REQUESTS, Scope.KEY, 2, 1_000)
    clock.advance(1)
    assert (await take(store, rid(4), limited, 0)).refusal is None
    refusal = (await take(store, rid(5), limited, 0)).refusal
    assert refusal == Refusal(Meter.REQUESTS, Scope.KEY, 2, 30_000), "and no faster"


async def test_a_days_budget_ends_with_its_day_whoever_calls(clock_and_store: Both) -> None:
    clock, store = clock_and_store
    limited, others = [subject(tokens_per_day=100, tokens_per_month=1000)], [subject(concurrent=9)]
    assert (await take(store, rid(1), limited, 100)).refusal is None
    clock.advance(86_400)
    await take(store, rid(2), others, 1)
    windows = await store.windows(limited)
    assert (remaining(windows.day), remaining(windows.month)) == (100, 900)
