"""The rule for the time that prompts have in a step, and its laws."""

from __future__ import annotations

import math
import random

import pytest

from engine.core.estimate import pace
from engine.core.estimate.cost import StepCost
from engine.core.estimate.pace import Credit, PrefillBudget
from engine.core.step.plan_builder import chunk_len

GPU = StepCost(token_s=2.5e-5, row_s=1e-5, pair_s=2e-10, context_s=3e-8, fixed_s=6e-3)
CPU = StepCost(token_s=1.8e-3, row_s=7e-4, pair_s=7e-7, context_s=6.3e-6, fixed_s=0.068)


@pytest.mark.parametrize(("pending_len", "tokens_left", "length"), [(5, 9, 5), (9, 5, 5), (9, 0, 0)])
def test_a_chunk_is_bounded_by_what_is_pending_and_what_is_left(
    pending_len: int, tokens_left: int, length: int
) -> None:
    assert chunk_len(pending_len, tokens_left) == length


@pytest.mark.parametrize(
    ("target_s", "decodes_s", "share", "error", "budget_s"),
    [
        (0.1, 0.01, 0.5, 0.0, 0.09),  # the target binds
        (0.1, 0.01, 0.5, 0.25, 0.07),  # and is kept although the estimate errs
        (0.1, 0.08, 0.5, 0.0, 0.08),  # the share binds
        (0.1, 0.08, 0.2, 0.0, 0.02),
        (0.1, 0.2, 0.5, 0.25, 0.16),
        (0.1, 0.2, 0.75, 0.0, 0.6),
        (math.inf, 0.01, 0.5, 0.1, pace.STEP_S_MAX),  # no target is set
    ],
)
def test_prompts_fill_the_step_up_to_the_target_or_have_their_share(
    target_s: float, decodes_s: float, share: float, error: float, budget_s: float
) -> None:
    assert pace.prompt_budget(target_s, decodes_s, share, error).seconds == pytest.approx(budget_s)


def test_no_step_takes_longer_than_the_target_or_twice_its_decodes() -> None:
    """Even if it takes longer than its estimate by the whole error, and whatever credit there is."""
    rng = random.Random(1)
    for _ in range(2000):
        target_s, decodes_s, share = rng.uniform(0.01, 1.0), rng.uniform(0.001, 1.0), rng.uniform(0.05, 0.9)
        error = rng.uniform(0.0, 1.0)
        budget = pace.prompt_budget(target_s, decodes_s, share, error)
        prompts_s = pace.time_with_credit_s(budget, Credit(rng.uniform(-1.0, 10.0)))
        most_s = max(target_s, decodes_s * (1.0 + error) * max(2.0, 1.0 / (1.0 - share)))
        assert (decodes_s + prompts_s) * (1.0 + error) <= most_s * (1.0 + 1e-9)
        assert prompts_s <= budget.longest_s


def test_prompts_have_no_less_with_a_larger_target_a_larger_share_or_better_estimates() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        target_s, decodes_s, share = rng.uniform(0.01, 1.0), rng.uniform(0.001, 1.0), rng.uniform(0.05, 0.9)
        error = rng.uniform(0.0, 1.0)
        budget_s = pace.prompt_budget(target_s, decodes_s, share, error).seconds
        assert pace.prompt_budget(1.5 * target_s, decodes_s, share, error).seconds >= budget_s
        assert pace.prompt_budget(target_s, decodes_s, min(0.95, 1.1 * share), error).seconds >= budget_s
        assert pace.prompt_budget(target_s, decodes_s, share, 0.9 * error).seconds >= budget_s
        assert budget_s * (1.0 + error) >= share / (1.0 - share) * decodes_s * (1.0 - 1e-9)


def test_what_a_step_takes_without_any_row_is_at_most_a_fifth_where_nothing_decodes() -> None:
    fixed_s = 0.01
    alone = pace.prompt_budget(0.001, fixed_s, pace.ALONE_SHARE, 0.0)
    assert fixed_s / (fixed_s + alone.seconds) == pytest.approx(0.2)


def test_debt_is_paid_and_credit_is_bounded() -> None:
    budget = PrefillBudget(0.02, 0.05)
    assert pace.time_with_credit_s(budget, Credit(-0.03)) == pytest.approx(-0.01)
    assert pace.time_with_credit_s(budget, Credit(0.01)) == pytest.approx(0.03)
    assert pace.time_with_credit_s(budget, Credit(9.0)) == pytest.approx(0.05)
    assert pace.time_with_credit_s(budget, Credit(9.0, wanted_s=0.07)) == pytest.approx(0.07)


@pytest.mark.parametrize("cost", [GPU, CPU])
@pytest.mark.parametrize("position", [0, 1, 500, 8000, 100_000])
def test_the_least_chunk_reads_its_context_for_a_quarter_of_its_time(cost: StepCost, position: int) -> None:
    length = pace.chunk_len_min(cost, position)
    reading_s = cost.context_s * position
    assert length >= 1 or not position
    assert reading_s <= pace.REREAD_SHARE * cost.chunk_s(position, max(1, length)) * (1 + 1e-9)
    if length > 2:
        assert reading_s > 0.9 * pace.REREAD_SHARE * cost.chunk_s(position, length - 2)


def test_a_runner_that_reads_for_nothing_has_no_least_chunk() -> None:
    assert pace.chunk_len_min(StepCost(context_s=0.0), 5000) == 1
    assert pace.chunk_len_min(StepCost(0.0, 0.0, 0.0, 0.0), 5000) == 1


@pytest.mark.parametrize(
    ("tokens_left", "time_left_s", "least_s", "reserved"),
    [
        (1600, 0.16, 0.001, (100, 0.01)),
        (17, 0.16, 0.001, (2, 0.01)),
        (1600, 0.16, 0.03, (100, 0.03)),  # the time of one token that reads a long context
        (1600, 0.16, 0.2, (100, 0.08)),  # but no more than half
        (1600, -0.1, 0.2, (100, 0.0)),
    ],
)
def test_a_part_of_the_step_is_reserved_for_the_prefill_that_has_run_for_longest(
    tokens_left: int, time_left_s: float, least_s: float, reserved: tuple[int, float]
) -> None:
    assert pace.RESERVED_PART == 16
    assert pace.reserve(tokens_left, time_left_s, least_s) == pytest.approx(reserved)
