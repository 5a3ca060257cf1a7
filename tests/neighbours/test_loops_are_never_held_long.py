"""Requests that are small or legal, and long to decode, to compute or to encode, beside a stream."""

from __future__ import annotations

import pytest

from gateway.bench.attack import Attack, Law
from gateway.bench.attacks import against
from tests.neighbours.conftest import House


@pytest.mark.parametrize("attack", against(Law.LOOPS), ids=lambda attack: attack.name)
async def test_a_request_that_is_long_to_handle_lets_others_run(house: House, attack: Attack) -> None:
    await house.attacked(attack)
