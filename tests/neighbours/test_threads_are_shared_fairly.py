"""Long texts wait for threads, and others' texts do not wait for theirs; a caller that leaves frees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.gateway.attack import MODEL, Attack, Law, padded
from tests.bench.gateway.attackers import named
from tests.neighbours.conftest import House, attacks


@pytest.mark.parametrize("attack", attacks(Law.THREADS), ids=lambda attack: attack.name)
async def test_long_texts_leave_the_threads_to_others_as_well(house: House, attack: Attack) -> None:
    await house.attacked(attack)


async def test_a_text_of_8_mib_that_is_tokenized_whole_leaves_the_threads_to_others(house: House) -> None:
    whole = padded(f'{{"model": "{MODEL}", "prompt": "', "penstock ", '"}', between="")
    outcomes = await house.attacked(replace(named("long texts to tokenize"), body=whole))
    assert {outcome.status for outcome in outcomes} == {200}
