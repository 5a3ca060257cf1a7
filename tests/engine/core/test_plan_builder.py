"""Prompts that wait for time in a step get it, whoever else has a part of the step reserved."""

from __future__ import annotations

import msgspec
import pytest

from engine.core.estimate import pace
from engine.core.estimate.cost import StepCost, Work
from engine.core.estimate.pace import Credit, PrefillBudget
from engine.core.sequence import Sequence
from engine.core.step.plan_builder import PlanBuilder
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


@pytest.mark.parametrize(("score_s", "tokens"), [(9e-4, 50), (0.0, 250)])
def test_a_prompt_that_is_scored_gets_as_much_time_as_another_and_fewer_tokens(
    score_s: float, tokens: int
) -> None:
    """Its tokens are priced as decodes while no step has told what they take."""
    cost = StepCost(token_s=1e-4, row_s=1e-4, fixed_s=1e-3, score_s=score_s)
    stream, plain, scored = running(1, 8, 7), running(2, 2000, 1), running(3, 2000, 1)
    scored.sampling = msgspec.structs.replace(scored.sampling, prompt_logprobs=5)
    assert scored.is_scored
    lengths = {}
    for prompt in (plain, scored):
        builder = PlanBuilder(tokens_left=2048, prefills=[prompt])
        builder.add_decodes({1: stream})
        builder.open_to_prompts(PrefillBudget(0.05, 0.05), Credit(), cost)
        assert builder.has_time_for(prompt, 1)
        builder.add_chunk(prompt)
        lengths[prompt.handle] = builder.lengths[-1]
        assert cost.seconds(builder.work) <= 0.052
        builder.drop(prompt.slot or 0, prompt)
        assert builder.work == Work.of([7], [1])
    assert lengths == {2: 500, 3: tokens}
