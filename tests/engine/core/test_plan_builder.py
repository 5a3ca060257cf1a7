"""Prompts that wait for time in a step get it, whoever else has a part of the step reserved."""

from __future__ import annotations

import pytest

from engine.core import pace
from engine.core.cost import StepCost
from engine.core.pace import Credit
from engine.core.plan_builder import PlanBuilder
from engine.core.sequence import Sequence
from tests.engine.core.sequences import sequence

COSTLY_CONTEXT = StepCost(token_s=2.7e-5, row_s=4.4e-5, context_s=1.1e-7, fixed_s=4.1e-4)
"""A chunk has to be as long as the credit of a step allows, to be worth reading its context."""
VERY_COSTLY_CONTEXT = StepCost(token_s=2.7e-5, row_s=1e-6, context_s=1e-6, fixed_s=4.1e-4)
"""A single token far into its context takes longer than the decodes."""


def running(handle: int, prompt_len: int, computed_len: int) -> Sequence:
    found = sequence(handle, 0.0, prompt_len=prompt_len)
    found.admit(handle, [0], computed_len, 0.0)
    return found


@pytest.mark.parametrize("cost", [COSTLY_CONTEXT, VERY_COSTLY_CONTEXT])
@pytest.mark.parametrize("elder_at", [1, 20, 143, 400])
def test_the_reserve_of_the_eldest_prefill_does_not_stop_one_of_higher_rank_for_good(
    cost: StepCost, elder_at: int
) -> None:
    stream, elder, higher = running(1, 8, 7), running(2, 2000, elder_at), running(3, 2000, 977)
    credit, chunks = Credit(), []
    for _ in range(100):
        builder = PlanBuilder(tokens_left=256, prefills=[elder, higher])
        builder.add_decodes({1: stream})
        budget = pace.prompt_budget(1e-4, cost.seconds(builder.work), 0.5, 0.02)
        builder.open_to_prompts(budget, credit, cost)
        builder.add_chunk(higher)
        builder.add_chunk(elder)
        credit = builder.credit
        chunks += [length for row, length in zip(builder.rows, builder.lengths, strict=True) if row is higher]
    assert len(chunks) >= 20
