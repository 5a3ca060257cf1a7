from __future__ import annotations

import pytest

from engine.core.queue.tenants import ARRIVAL_TOKENS, SPAN_TOKENS, TenantCounters


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


@pytest.mark.parametrize("newcomer", ["unheard of", "away"])
def test_fairness_lets_a_tenant_that_comes_begin_a_little_behind_the_least_served(
    newcomer: str,
) -> None:
    """What the others were served before it came is no credit of its own."""
    counters = TenantCounters()
    counters.charge("away", 1)
    counters.charge("gone", 100 * SPAN_TOKENS)
    counters.enter("busy")
    counters.enter("modest")
    counters.charge("busy", 5500)
    counters.charge("modest", 5200)
    counters.enter(newcomer)
    ahead = {"busy": 2 * ARRIVAL_TOKENS + 300, "modest": ARRIVAL_TOKENS, newcomer: 0}
    assert counters.leads(ahead) == ahead


def test_fairness_lets_a_tenant_that_is_behind_stay_there_while_it_is_here() -> None:
    counters = TenantCounters()
    for tenant in ("modest", "busy", "modest"):
        counters.enter(tenant)
    counters.charge("busy", 900)
    counters.leave("modest")
    counters.enter("modest")
    assert counters.leads(["busy", "modest"]) == {"busy": 900, "modest": 0}


def test_fairness_gives_a_tenant_that_was_away_no_credit_for_what_others_used() -> None:
    """It comes for a request now and then, beside one that is always here."""
    counters = TenantCounters()
    counters.enter("modest")
    counters.enter("busy")
    counters.charge("busy", 900)
    counters.leave("modest")
    counters.charge("busy", 5000)
    counters.enter("modest")
    assert counters.leads(["busy", "modest"]) == {"busy": ARRIVAL_TOKENS, "modest": 0}


def test_fairness_forgets_who_used_an_idle_engine() -> None:
    counters = TenantCounters()
    counters.enter("alone")
    counters.charge("alone", 900)
    counters.leave("alone")
    for tenant in ("new", "alone"):
        counters.enter(tenant)
    assert counters.leads(["new", "alone"]) == {"new": 0, "alone": 0}
