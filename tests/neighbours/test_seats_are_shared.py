"""One tenant's sequences fill every slot and its part of the queue; another is admitted all the same."""

from __future__ import annotations

import pytest

from shared.bench.attacks import Attack, Law, against
from tests.neighbours.conftest import House


@pytest.mark.parametrize("attack", against(Law.SEATS), ids=lambda attack: attack.name)
async def test_a_flood_on_all_slots_yields_to_another_tenant(house: House, attack: Attack) -> None:
    await house.attacked(attack)
