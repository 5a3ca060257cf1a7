"""What a meter counts while its limit is set, in every store; a call without the limit leaves it alone."""

from __future__ import annotations

import pytest

from gateway.admission.quota import Meter, Refusal, Scope
from gateway.admission.usage import Used
from gateway.config.quotas import QuotaLimits
from tests.gateway.admission.quota_calls import Both, of_limits, remaining, rid, subject, take


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
