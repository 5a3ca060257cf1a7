"""The record of a step says what it computed, what it took, and what those that waited lacked."""

from __future__ import annotations

from engine.contract.messages import Move, ServiceClass
from engine.contract.records import Lack, StepRecord
from tests.engine.core.harness import STEP_S, Harness, greedy

FLEX, _, PRIORITY = ServiceClass


def recorded(harness: Harness) -> StepRecord:
    """The record of one more step."""
    plan = harness.plan()
    assert plan is not None
    harness.finish_step(plan)
    output = harness.read()
    assert output is not None
    assert output.record is not None
    return output.record


def test_a_step_tells_its_prompts_its_decodes_by_class_and_its_times() -> None:
    harness = Harness()
    harness.add(1, [1, 2, 3], greedy(8))
    harness.add(2, [4, 5, 6, 7], greedy(8), service_class=PRIORITY)
    first = recorded(harness)
    assert (first.number, first.prompts, first.prompt_tokens, first.decodes) == (1, 2, 7, (0, 0, 0))
    assert (round(first.interval_s, 6), round(first.step_s, 6), first.expected_s) == (STEP_S, STEP_S, 0.0)
    assert (first.holders, first.held_percent) == (2, 100 * 2 // 64)
    harness.now += 0.05  # the host does something else
    harness.add(3, [9] * 5, greedy(8), service_class=FLEX)
    second = recorded(harness)
    assert (second.number, second.prompts, second.prompt_tokens, second.decodes) == (2, 1, 5, (0, 1, 1))
    assert round(second.interval_s, 6) == round(STEP_S + 0.05, 6)
    assert round(second.step_s, 6) == STEP_S
    assert second.expected_s > 0.0


def test_time_without_work_is_no_gap() -> None:
    harness = Harness()
    harness.add(1, [1, 2, 3], greedy(1))
    recorded(harness)
    harness.now += 1000.0
    harness.add(2, [1, 2, 3], greedy(3))
    assert round(recorded(harness).interval_s, 6) == STEP_S
    harness.pause(2)
    assert harness.plan() is None
    harness.now += 30.0
    harness.resume(2)
    assert round(recorded(harness).interval_s, 6) == STEP_S


def test_what_the_waiting_lack_is_told_and_summed() -> None:
    harness = Harness(pages=4, slots=2, step_tokens_max=8, prefix_cache=False)
    harness.add(1, [1] * 12, greedy(2))
    assert recorded(harness).lack is Lack.NOTHING
    harness.add(2, [2] * 8, greedy(2))
    lacking = recorded(harness)
    assert lacking.lack is Lack.PAGES
    assert lacking.held_percent == 100 * 3 // 4
    harness.run()
    tight = Harness(slots=1)
    tight.add(1, [1] * 4, greedy(4))
    tight.add(2, [2] * 4, greedy(4))
    assert recorded(tight).lack is Lack.SLOTS
    assert recorded(tight).lack is Lack.SLOTS
    crowded = Harness(step_tokens_max=8)
    crowded.add(1, [1] * 30, greedy(4))
    crowded.add(2, [2] * 30, greedy(4))
    assert recorded(crowded).lack is Lack.TURN


def test_a_preemption_is_told_with_its_reason() -> None:
    harness = Harness(slots=1)
    harness.add(1, [1] * 4, greedy(8), service_class=FLEX)
    harness.steps(2)
    harness.add(2, [2] * 4, greedy(2), service_class=PRIORITY)
    plan = harness.plan()
    assert plan is not None
    harness.finish_step(plan)
    output = harness.read()
    assert output is not None
    [moved] = output.moved
    assert (moved.handle, moved.move, moved.swapped) == (1, Move.PREEMPTED_CLASS, False)
    moves = []
    while harness.scheduler.has_work:
        plan = harness.plan()
        assert plan is not None
        harness.finish_step(plan)
        output = harness.read()
        assert output is not None
        moves += [(moved.handle, moved.move) for moved in output.moved]
    assert moves == [(1, Move.READMITTED)]


def test_the_classes_of_decodes_are_told_after_others_came_and_went() -> None:
    """Steps with the same slots are not counted again, unless one was given to another sequence."""
    harness = Harness(slots=2)
    harness.add(1, [1] * 4, greedy(20), service_class=FLEX)
    harness.add(2, [2] * 4, greedy(4))
    assert recorded(harness).decodes == (0, 0, 0)
    assert [recorded(harness).decodes for _ in range(3)] == [(1, 1, 0)] * 3
    harness.add(3, [3] * 4, greedy(3), service_class=PRIORITY)
    assert recorded(harness).decodes == (1, 0, 0)  # beside the prompt of 3
    assert [recorded(harness).decodes for _ in range(2)] == [(1, 0, 1)] * 2
    harness.add(4, [4], greedy(3))
    assert recorded(harness).decodes == (1, 0, 0)  # beside the prompt of 4
    assert recorded(harness).decodes == (1, 1, 0)


def test_a_prompt_of_which_one_token_is_computed_is_no_stream() -> None:
    harness = Harness(step_tokens_max=8)
    harness.add(1, [1] * 9, greedy(3))
    told = [recorded(harness) for _ in range(4)]
    assert [(one.prompts, one.prompt_tokens, sum(one.decodes)) for one in told] == [
        (1, 8, 0),
        (1, 1, 0),
        (0, 0, 1),
        (0, 0, 1),
    ]
    harness.add(2, [1] * 9, greedy(2))  # all but the last are cached
    harness.add(3, [1] * 9, greedy(2), service_class=PRIORITY)
    told = [recorded(harness) for _ in range(2)]
    assert [(one.prompts, one.prompt_tokens, one.decodes) for one in told] == [
        (2, 2, (0, 0, 0)),
        (0, 0, (0, 1, 1)),
    ]


def test_a_single_token_of_a_prompt_behind_a_chunk_is_not_taken_for_another_row() -> None:
    harness = Harness(step_tokens_max=32)
    harness.add(1, [1] * 9, greedy(9))
    harness.steps(2)
    harness.add(2, [2] * 8, greedy(9), service_class=PRIORITY)
    harness.add(3, [1] * 9, greedy(9), service_class=FLEX)
    told = recorded(harness)
    assert (told.prompts, told.prompt_tokens, told.decodes) == (2, 9, (0, 1, 0))
