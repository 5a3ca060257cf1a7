from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.fairness.fair_share import ALPHA, FairShare, held_max


def greedy(share: FairShare, tenant: str) -> int:
    """Take one unit after the other until refused. Returns how many were taken."""
    taken = 0
    while share.acquire(tenant, 1):
        taken += 1
        assert taken <= share.capacity
    return taken


def test_a_lone_tenant_gets_three_quarters() -> None:
    share = FairShare(4096)
    assert greedy(share, "a") == share.most == 3072 == 4096 * ALPHA // (1 + ALPHA)


@pytest.mark.parametrize("attackers", [1, 2, 3])
def test_a_newcomer_finds_room_whoever_was_greedy(attackers: int) -> None:
    share = FairShare(1000)
    for i in range(attackers):
        greedy(share, f"attacker-{i}")
    assert 1000 - share.held >= 1000 // 4**attackers
    assert greedy(share, "victim") >= 1000 // 4**attackers * 3 // 4


def test_tenants_that_come_and_go_end_with_equal_parts() -> None:
    share = FairShare(1000)
    for _ in range(200):  # each gives a little back and takes what it can
        for tenant in ("a", "b", "c"):
            share.release(tenant, share.held_by(tenant) // 10)
            greedy(share, tenant)
    parts = [share.held_by(tenant) for tenant in ("a", "b", "c")]
    assert max(parts) - min(parts) <= 40
    assert sum(parts) <= 1000


def test_one_large_amount_may_be_held_alone_and_leaves_the_others_their_part() -> None:
    share = FairShare(256)
    assert not share.acquire("a", 1000)
    assert share.acquire("a", 1000, alone=True)
    assert not share.acquire("a", 1, alone=True), "it holds something already"
    assert share.acquire("b", 40)
    share.release("a", 1000)
    share.release("b", 40)
    assert share.held == 0
    assert greedy(share, "b") == share.most


def test_two_large_amounts_may_be_held_together_and_no_third() -> None:
    share = FairShare(8)
    assert [share.acquire(tenant, 256, alone=True) for tenant in "abc"] == [True, True, False]
    assert 8 + 256 < share.held <= held_max(8, 256)


def test_requests_without_a_tenant_have_the_whole_capacity() -> None:
    share = FairShare(100)
    assert greedy(share, "") == 100
    assert not share.acquire("a", 1)


def test_a_capacity_of_one_serves_one() -> None:
    share = FairShare(1)
    assert share.acquire("a", 1)
    assert not share.acquire("b", 1)
    share.release("a", 1)
    assert share.acquire("b", 1)


@given(
    capacity=st.integers(1, 200),
    moves=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-40, 80), st.booleans()), max_size=80),
)
def test_all_together_never_hold_more_than_the_capacity_but_for_two_large_amounts(
    capacity: int, moves: list[tuple[str, int, bool]]
) -> None:
    share, model = FairShare(capacity), dict.fromkeys("abcd", 0)
    largest = 0
    for tenant, amount, alone in moves:
        if amount < 0:
            amount = min(-amount, model[tenant])
            share.release(tenant, amount)
            model[tenant] -= amount
        elif share.acquire(tenant, amount, alone=alone):
            model[tenant] += amount
            largest = max(largest, amount) if alone else largest
        assert share.held <= held_max(capacity, largest)
        assert {tenant: share.held_by(tenant) for tenant in "abcd"} == model
        assert share.held == sum(model.values())
    clipped = sum(min(held, share.most) for held in model.values())
    assert clipped <= capacity + min(largest, share.most)
