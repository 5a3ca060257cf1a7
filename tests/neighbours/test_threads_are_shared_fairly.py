"""Long texts wait for threads, and others' texts do not wait for theirs; a caller that leaves frees them."""

from __future__ import annotations

import pytest

from gateway.bench.attack import Attack, Law
from gateway.bench.attacks import against
from tests.neighbours.conftest import House


@pytest.mark.parametrize("attack", against(Law.THREADS), ids=lambda attack: attack.name)
async def test_long_texts_leave_the_threads_to_others_as_well(house: House, attack: Attack) -> None:
    await house.attacked(attack)
