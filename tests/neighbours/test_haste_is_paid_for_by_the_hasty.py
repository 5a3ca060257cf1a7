"""A tenant whose first tokens are of use for a moment only hurries its own prompts, not others' streams."""

from __future__ import annotations

import pytest

from tests.bench.gateway.attack import Attack, Law
from tests.neighbours.conftest import House, attacks

TOO_LATE = {"first_token_deadline", "first_token_timeout", "queue_full"}


@pytest.mark.parametrize("attack", attacks(Law.HASTE), ids=lambda attack: attack.name)
async def test_a_tenant_in_haste_is_served_in_time_or_told_that_it_is_too_late(
    house: House, attack: Attack
) -> None:
    outcomes = await house.attacked(attack)
    assert all(outcome.is_done or outcome.code in TOO_LATE for outcome in outcomes), outcomes
