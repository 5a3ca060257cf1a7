"""Aborts, which cancel sequences in any status and free all that they hold."""

from __future__ import annotations

import pytest

from engine.contract.messages import FinishReason
from tests.engine.core.harness import Harness, greedy

PROMPT = list(range(1, 11))


def held(h: Harness) -> tuple[int, int, int]:
    stats = h.scheduler.stats()
    return stats.waiting, stats.running, stats.pages_owned


@pytest.mark.parametrize("steps", range(8))
def test_abort_cancels_after_any_number_of_steps_and_frees_everything_at_once(steps: int) -> None:
    """The sequence is waiting, in its prefill, at its first token, or decoding."""
    h = Harness(step_tokens_max=8)
    h.add(1, [1] * 30, greedy(20))
    h.steps(steps)
    h.abort(1)
    assert held(h) == (0, 0, 0)
    h.abort(1)
    h.run()
    assert h.reason(1) is FinishReason.ABORTED
    assert h.tokens[1] == h.solo(1).tokens[: len(h.tokens[1])]
    h.add(2, [2] * 30, greedy(20))
    h.run()
    assert h.tokens[2] == h.solo(2).tokens, "the slot and the pages serve the next"


def test_late_output_of_an_aborted_sequence_is_dropped() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(9))
    h.add(2, PROMPT[1:], greedy(9))
    h.step()
    plan = h.plan()
    assert plan is not None
    assert len(plan.slots) == 2
    h.abort(1)
    assert h.scheduler.stats().running == 1
    h.finish_step(plan)
    h.read()
    assert len(h.tokens[1]) == 1
    h.run()
    assert h.reason(1) is FinishReason.ABORTED
    assert h.tokens[2] == h.solo(2).tokens


def test_abort_in_the_final_step_ends_a_sequence_once() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(1, prompt_logprobs=0))
    plan = h.plan()
    assert plan is not None
    h.abort(1)
    h.finish_step(plan)
    h.abort(1)
    output = h.read()
    assert output is not None
    assert (output.handles, output.prompt_logprobs) == ([], [])
    assert [f.reason for f in output.finished] == [FinishReason.ABORTED]
    assert h.scheduler.report() is None


def test_abort_cancels_a_preempted_sequence() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while not h.scheduler.stats().preemptions:
        h.step()
    h.abort(2)
    assert held(h)[0] == 0
    h.run()
    assert h.reason(2) is FinishReason.ABORTED
    assert h.finished[2].preemptions == 1
    assert h.tokens[1] == h.solo(1).tokens


def test_abort_of_a_finished_or_unknown_handle_does_nothing() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(1))
    h.run()
    h.abort(1, 7, 11)
    assert h.scheduler.report() is None


def test_abort_cancels_the_exact_handle_alone() -> None:
    h = Harness()
    for handle in (1, 10, 11):
        h.add(handle, PROMPT, greedy(3))
    h.abort(1)
    h.run()
    assert [h.reason(handle) for handle in (1, 10, 11)] == [
        FinishReason.ABORTED,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]


def test_a_handle_in_use_cannot_be_added_again() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(3))
    with pytest.raises(AssertionError, match="never reused"):
        h.add(1, PROMPT, greedy(3))
