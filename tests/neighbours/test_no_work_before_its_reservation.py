"""A key without requests, seats or tokens is refused by the heads of its requests, whatever their bodies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.gateway.attack import Attack, Law
from tests.bench.gateway.attackers import named
from tests.bench.gateway.neighbourhood import LIVE_MAX
from tests.neighbours.conftest import House, attacks


@pytest.mark.parametrize("attack", attacks(Law.RESERVATION), ids=lambda attack: attack.name)
async def test_a_key_without_quota_is_refused_before_its_body_is_read(house: House, attack: Attack) -> None:
    outcomes = await house.attacked(attack)
    assert not house.has_reached_engine(outcomes)
    if attack.statuses == {429}:
        lines = house.gateway_lines(outcomes)
        assert {line["stage"] for line in lines.values()} == {"seat"}


async def test_heads_without_bodies_take_no_seat_however_many_there_are(house: House) -> None:
    """4,100 of a key without requests once left every other tenant none for 30 seconds."""
    heads = replace(named("900 heads without a body"), count=4_100, at_once=4 * LIVE_MAX)
    outcomes = await house.attacked(heads)
    assert {outcome.status for outcome in outcomes} == {429}
    assert not house.has_reached_engine(outcomes)
