from __future__ import annotations

import pytest

from engine.core.tenants import SPAN_TOKENS, TenantCounters


def test_fairness_counts_how_far_a_tenant_is_ahead_of_its_competitors() -> None:
    counters = TenantCounters()
    counters.charge("a", 500)
    counters.charge("b", 200)
    counters.charge("c", 100)
    assert counters.leads(["a", "b", "b"]) == {"a": 300, "b": 0}
    assert counters.leads(["a", "b", "c"]) == {"a": 400, "b": 100, "c": 0}
    assert counters.leads(["b"]) == {"b": 0}
    assert counters.leads([]) == {}


@pytest.mark.parametrize("newcomer", ["unheard of", "away"])
def test_fairness_bounds_the_head_start_of_a_tenant_that_was_away(newcomer: str) -> None:
    counters = TenantCounters()
    counters.charge("away", 1)
    counters.charge("busy", 100 * SPAN_TOKENS)
    assert counters.leads(["busy", newcomer]) == {"busy": SPAN_TOKENS, newcomer: 0}
    counters.charge(newcomer, SPAN_TOKENS + 5)
    assert counters.leads(["busy", newcomer]) == {"busy": 0, newcomer: 5}


def test_fairness_keeps_a_bounded_number_of_tenants_and_a_forgotten_one_is_new() -> None:
    counters = TenantCounters(tenants_max=2)
    for tenant in ("a", "b", "c"):
        counters.charge(tenant, 10 * SPAN_TOKENS)
    assert counters.leads(["a", "c"]) == {"a": 0, "c": SPAN_TOKENS}
