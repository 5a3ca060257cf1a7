"""Answers whose grammars are long to compile, or whose masks are long to fill, beside a stream."""

from __future__ import annotations

import pytest

from tests.bench.gateway.attack import Attack, Law
from tests.neighbours.conftest import House, attacks


@pytest.mark.parametrize("attack", attacks(Law.GRAMMARS), ids=lambda attack: attack.name)
async def test_an_answer_with_a_structure_lets_others_run(house: House, attack: Attack) -> None:
    await house.attacked(attack)
