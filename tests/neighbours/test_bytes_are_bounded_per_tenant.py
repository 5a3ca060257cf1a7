"""What bodies and answers take of either service's memory is bounded, and no tenant's fill leaves no room."""

from __future__ import annotations

import pytest

from tests.bench.gateway.attack import Attack, Law
from tests.neighbours.conftest import House, attacks


@pytest.mark.parametrize("attack", attacks(Law.BYTES), ids=lambda attack: attack.name)
async def test_a_tenant_that_fills_its_part_of_the_memory_leaves_room_for_others(
    house: House, attack: Attack
) -> None:
    await house.attacked(attack)
