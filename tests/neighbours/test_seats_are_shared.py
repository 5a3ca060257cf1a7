"""One tenant's sequences fill every slot and its part of the queue; another is admitted all the same."""

from __future__ import annotations

import pytest

from tests.bench.gateway.attack import Attack, Ends, Law
from tests.neighbours.conftest import House, attacks


@pytest.mark.parametrize("attack", attacks(Law.SEATS), ids=lambda attack: attack.name)
async def test_a_flood_on_all_slots_yields_to_another_tenant(house: House, attack: Attack) -> None:
    outcomes = await house.attacked(attack)
    if attack.ends is Ends.ON_CUE:
        has_ended = [
            outcome.is_done or (outcome.status == 200 and not outcome.is_stream) for outcome in outcomes
        ]
        assert not any(has_ended), "the other tenant was served after the flood, and not beside it"
