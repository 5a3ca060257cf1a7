"""A key without requests, seats or tokens is refused by the heads of its requests, whatever their bodies."""

from __future__ import annotations

import pytest

from gateway.bench.attack import Attack, Law
from gateway.bench.attacks import against
from tests.neighbours.conftest import House


@pytest.mark.parametrize("attack", against(Law.RESERVATION), ids=lambda attack: attack.name)
async def test_a_key_without_quota_is_refused_before_its_body_is_read(house: House, attack: Attack) -> None:
    outcomes = await house.attacked(attack)
    assert not house.has_reached_engine(outcomes)
    if attack.statuses == {429}:
        lines = house.gateway_lines(outcomes)
        assert {line["stage"] for line in lines.values()} == {"seat"}
