"""The share of a step that prompts may take."""

from __future__ import annotations

import math

import pytest

from engine.core import pace
from tests.engine.core.sequences import COST, sequence


@pytest.mark.parametrize(("pending_len", "tokens_left", "length"), [(5, 9, 5), (9, 5, 5), (9, 0, 0)])
def test_a_chunk_is_bounded_by_what_is_pending_and_what_is_left(
    pending_len: int, tokens_left: int, length: int
) -> None:
    assert pace.chunk_len(pending_len, tokens_left) == length


@pytest.mark.parametrize(
    ("target_s", "decodes_s", "prompts", "budget_s"),
    [
        (0.1, 0.01, [0.0], 0.005),  # one prompt: a gap half as long again
        (0.1, 0.01, [9.0], 0.005),  # a lone prompt need not hurry, however late: none waits behind it
        (0.1, 0.01, [0.0, 1.0], 0.016),
        (0.1, 0.01, [0.5, 2.0], 0.04),  # one is late
        (
            0.1,
            0.01,
            [0.0] * 50,
            0.09,
        ),  # prompts that come faster than they are computed: what the target leaves
        (0.1, 0.08, [0.0], 0.04),  # decodes that nearly fill the target, or overfill it, do not stop prompts
        (0.1, 0.2, [0.0], 0.1),
        (0.1, 0.2, [0.0] * 50, 0.32),
        (math.inf, 0.01, [0.0], math.inf),  # no target is set
    ],
)
def test_prompts_take_a_multiple_of_the_decodes_time_each_up_to_the_target(
    target_s: float, decodes_s: float, prompts: list[float], budget_s: float
) -> None:
    odd, even = [pace.prompt_budget_s(target_s, decodes_s, prompts, is_odd=odd) for odd in (True, False)]
    assert (odd + even) / 2 == pytest.approx(budget_s)
    assert odd / even == pytest.approx(1.15 / 0.85) if len(prompts) == 1 and odd < math.inf else odd == even


@pytest.mark.parametrize(
    ("target_s", "base_s", "budget_s"),
    [
        (0.1, 0.01, 0.09),
        (0.1, 0.07, 0.28),  # most of a step within the target would go into the weights
        (0.1, 0.2, 0.8),
        (math.inf, 0.01, math.inf),
    ],
)
def test_without_decodes_a_steps_fixed_part_is_at_most_a_fifth_of_it(
    target_s: float, base_s: float, budget_s: float
) -> None:
    assert pace.prompt_budget_alone_s(target_s, base_s) == pytest.approx(budget_s)


@pytest.mark.parametrize(
    ("tokens_left", "time_left_s", "least_s", "reserved"),
    [
        (1600, 0.16, 0.001, (100, 0.01)),
        (17, 0.16, 0.001, (2, 0.01)),
        (1600, 0.16, 0.03, (100, 0.03)),  # the time of one token that reads a long context
        (1600, 0.16, 0.2, (100, 0.08)),  # but no more than half
    ],
)
def test_a_part_of_the_step_is_reserved_for_the_prefill_that_has_run_for_longest(
    tokens_left: int, time_left_s: float, least_s: float, reserved: tuple[int, float]
) -> None:
    assert pace.reserve(tokens_left, time_left_s, least_s) == pytest.approx(reserved)


def test_lateness_is_a_prompts_age_over_its_time_alone() -> None:
    prompt = sequence(1, 0.0)
    late = [pace.lateness(prompt, COST, now) for now in (0.0, 0.05, 0.1, 0.4)]
    assert late == pytest.approx([0.0, 0.5, 1.0, 4.0])
