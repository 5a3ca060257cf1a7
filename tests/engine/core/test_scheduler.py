"""The scheduler, step by step: one sequence, the budget, rejections, reports."""

from __future__ import annotations

import math

import pytest

from engine.contract.messages import FinishReason, RunResult, ServiceClass, TokenLogprobs, Want
from engine.core.step import plan_builder, planner
from tests.engine.core.harness import STEP_S, Harness, greedy
from tests.fake_runner import NUMERIC_SEEDS, solo

PROMPT = list(range(1, 11))


# -- one sequence ---------------------------------------------------------------------------------


def test_a_sequence_runs_to_its_length() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(5))
    h.run_as_solo()
    assert h.reason(1) is FinishReason.LENGTH
    assert [plan.lengths for plan in h.plans] == [[10], [1], [1], [1], [1]]
    assert [plan.positions for plan in h.plans] == [[0], [10], [11], [12], [13]]


def test_the_stop_token_is_the_last_and_in_the_same_output() -> None:
    h = Harness()
    alone = solo(PROMPT, greedy(20), 50)
    stop = alone.tokens[3]
    h.add(1, PROMPT, greedy(20, stop_token_ids=(stop,)))
    h.run()
    assert h.reason(1) is FinishReason.STOP
    assert h.tokens[1] == alone.tokens[: alone.tokens.index(stop) + 1]


def test_a_sequence_of_one_token_ends_with_its_prefill() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(1, prompt_logprobs=1))
    plan = h.plan()
    assert plan is not None
    h.finish_step(plan)
    output = h.read()
    assert output is not None
    assert output.handles == [1]
    assert [f.reason for f in output.finished] == [FinishReason.LENGTH]
    assert len(output.prompt_logprobs[0][1]) == len(PROMPT) - 1
    assert output.stats.pages_owned == 0


def test_the_last_token_needs_no_page() -> None:
    h = Harness(pages=2)
    h.add(1, [1] * 4, greedy(5))  # 9 tokens, 8 of them computed
    h.run_as_solo()


def test_a_long_prompt_is_chunked_by_the_budget() -> None:
    h = Harness(step_tokens_max=8)
    h.add(1, [1] * 20, greedy(2))
    h.run_as_solo()
    assert [plan.lengths for plan in h.plans] == [[8], [8], [4], [1]]
    assert [plan.wants for plan in h.plans] == [[Want.NOTHING]] * 2 + [[Want.SAMPLE]] * 2


def test_numeric_failure_ends_one_sequence_and_spoils_no_cache() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(50, seed=NUMERIC_SEEDS))
    h.add(2, [9, *PROMPT], greedy(50))
    h.run_as_solo()
    assert (h.reason(1), h.reason(2)) == (FinishReason.NUMERIC, FinishReason.LENGTH)
    h.add(3, PROMPT, greedy(2))
    h.run()
    assert h.started[3].cached_len == 0, "pages of a sequence that overflowed are not trusted"


# -- the budget -----------------------------------------------------------------------------------


def test_decodes_come_first_and_a_long_prompt_does_not_stall_them() -> None:
    h = Harness(step_tokens_max=8)
    h.add(1, [1] * 3, greedy(20))
    h.step()
    h.add(2, [2] * 30, greedy(2))
    plan = h.step()
    assert plan is not None
    assert (plan.slots, plan.lengths) == ([0, 1], [1, 7])
    h.run_as_solo()
    assert all(plan.slots[0] == 0 for plan in h.plans[:20]), "a token for the first in every step"


def test_decodes_come_first_beside_chunks_of_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """With short chunks several prompts are in one plan; the runner checks the order of each plan's rows."""
    monkeypatch.setattr(plan_builder, "chunk_len", lambda pending, left: min(pending, left, 3 + pending % 5))
    h = Harness(step_tokens_max=24)
    for handle in range(1, 9):
        h.add(handle, [handle] * (31 - 3 * handle), greedy(12))
    h.run_as_solo()
    assert any(sum(length > 1 for length in plan.lengths) > 2 for plan in h.plans)


def test_a_plan_admits_no_more_once_those_that_it_admits_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """63 choices of a cached prompt of 130,000 tokens were once admitted by one plan, in 0.35 s."""
    monkeypatch.setattr(planner, "SEATED_LEN_MAX", 2 * len(PROMPT))
    h = Harness(slots=8)
    h.add(1, PROMPT, greedy(2))
    h.run()
    for handle in range(2, 9):
        h.add(handle, PROMPT, greedy(8))
    h.run_as_solo()
    assert [len(plan.seated) for plan in h.plans if plan.seated] == [1, 2, 2, 2, 1]


def test_a_budget_of_one_token_per_slot_finishes_all_sequences() -> None:
    h = Harness(slots=4, step_tokens_max=4)
    for handle in range(1, 9):
        h.add(handle, [handle] * 9, greedy(6))
    h.run_as_solo()


# -- prompts that are scored, and nothing more -----------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 10])
@pytest.mark.parametrize("tops", [None, 1])
def test_a_prompt_is_read_and_nothing_sampled(length: int, tops: int | None) -> None:
    h = Harness(slots=4, step_tokens_max=4)
    h.add(1, PROMPT, greedy(12))
    h.add(2, [*range(20, 20 + length)], greedy(0, prompt_logprobs=tops))
    h.run()
    assert (h.tokens[2], h.reason(2), h.finished[2].late_tokens) == ([], FinishReason.LENGTH, 0)
    assert len(h.prompt_logprobs[2]) == (0 if tops is None else length - 1)
    assert sum(plan.sampled for plan in h.plans) == 12
    h.assert_all_as_solo()


def test_a_scored_prompt_that_is_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(6))
    h.add(2, PROMPT[::-1], greedy(0, prompt_logprobs=0))
    monkeypatch.setattr(
        h.runner, "_prompt_logprobs", lambda *_: [TokenLogprobs(math.nan, [], [])], raising=True
    )
    h.run()
    assert h.reason(2) is FinishReason.NUMERIC
    assert h.tokens[1] == h.solo(1).tokens


# -- rejection ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [
        ([], 1),
        ([1] * 10, 24),  # 33 tokens whose keys are kept, in pages for 32
        ([1] * 33, 1),
        ([1] * 10, -1),
        ([50], 1),  # outside of the vocabulary
        ([-1], 1),
    ],
)
def test_a_sequence_that_can_never_run_is_rejected_at_once(prompt: list[int], max_tokens: int) -> None:
    h = Harness(pages=8)
    h.add(1, prompt, greedy(max_tokens))
    assert not h.scheduler.has_work
    h.read()
    assert h.reason(1) is FinishReason.REJECTED


def test_a_sequence_longer_than_the_context_is_rejected() -> None:
    h = Harness(max_model_len=16)
    h.add(1, [1] * 10, greedy(6))
    h.add(2, [1] * 10, greedy(7))
    h.run()
    assert (h.reason(1), h.reason(2)) == (FinishReason.LENGTH, FinishReason.REJECTED)


def test_a_sequence_that_fills_the_pool_exactly_runs() -> None:
    h = Harness(pages=8, watermark=0.5)
    h.add(1, [1] * 30, greedy(3))
    h.run_as_solo()


def test_a_full_queue_rejects_at_once_and_serves_the_queued() -> None:
    h = Harness(slots=1, queue_len_max=2)
    for handle in (1, 2, 3):
        h.add(handle, PROMPT, greedy(2))
    h.read()
    assert h.finished.keys() == {3}
    h.step()
    h.add(4, PROMPT, greedy(2))
    h.run()
    assert h.reason(4) is FinishReason.LENGTH


def test_a_queue_full_of_tokens_rejects_and_a_lone_sequence_may_exceed_it() -> None:
    h = Harness(slots=1, queue_tokens_max=25)
    h.add(1, [1] * 40, greedy(2))
    assert h.scheduler.stats().waiting_tokens == 40
    h.add(2, PROMPT, greedy(2))
    h.step()
    for handle, tokens in ((3, 10), (4, 10), (5, 10), (6, 5)):
        h.add(handle, [handle] * tokens, greedy(2))
    h.read()
    assert h.finished.keys() == {2, 5}, "of 25 there were 40, and 20"
    assert h.scheduler.stats().waiting_tokens == 25
    h.abort(4)
    h.add(7, [7] * 10, greedy(2))
    h.run()
    assert {handle for handle in h.finished if h.reason(handle) is FinishReason.LENGTH} == {1, 3, 6, 7}
    assert h.scheduler.stats().waiting_tokens == 0


def test_preempted_sequences_take_no_place_in_the_bounded_queue() -> None:
    h = Harness(pages=6, queue_len_max=1, slots=2)
    h.add(1, [1] * 8, greedy(12))
    h.step()
    h.add(2, [2] * 8, greedy(12))
    while not h.scheduler.stats().preemptions:
        h.step()
    h.add(3, [3] * 4, greedy(2))
    h.run()
    assert h.reason(3) is FinishReason.LENGTH


# -- reports --------------------------------------------------------------------------------------


def test_every_step_is_reported_and_idleness_is_not() -> None:
    h = Harness(step_tokens_max=8)
    assert h.read() is None
    h.add(1, [1] * 20, greedy(2))
    plan = h.plan()
    assert plan is not None
    h.finish_step(plan)
    output = h.read()
    assert output is not None
    assert (output.step, output.handles, len(output.started)) == (1, [], 1)
    assert output.stats.step_tokens == 8
    assert output.stats.step_s == pytest.approx(STEP_S)
    assert (output.stats.running, output.stats.pages_owned) == (1, 5)


def test_a_finished_sequence_reports_its_times() -> None:
    h = Harness(slots=1, step_tokens_max=8)
    h.add(1, [1] * 8, greedy(2))
    h.add(2, [2] * 20, greedy(3))
    h.run()
    finished = h.finished[2]
    assert h.started[2].queue_s == finished.queue_s == pytest.approx(2 * STEP_S)
    assert finished.prefill_s == pytest.approx(3 * STEP_S)
    assert finished.decode_s == pytest.approx(2 * STEP_S)
    assert finished.preempted_s == 0


def test_logprobs_stay_with_their_tokens() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(4))
    h.add(2, PROMPT[1:], greedy(4, logprobs=2))
    got = []
    while h.scheduler.has_work:
        plan = h.plan()
        assert plan is not None
        h.finish_step(plan)
        output = h.read()
        assert output is not None
        for handle, logprobs in zip(output.handles, output.logprobs, strict=True):
            assert (logprobs is None) == (handle == 1)
            got.append(logprobs)
    assert [entry for entry in got if entry is not None] == h.solo(2).logprobs


def test_a_result_with_too_few_tokens_asserts() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(4))
    plan = h.plan()
    assert plan is not None
    with pytest.raises(AssertionError):
        h.scheduler.commit(plan, RunResult([], [], []), h.now)


def test_stats_report_the_queue_by_class() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(9), service_class=ServiceClass.PRIORITY)
    h.add(2, [2] * 4, greedy(9), service_class=ServiceClass.FLEX)
    h.add(3, [3] * 4, greedy(9), service_class=ServiceClass.FLEX)
    h.steps(2)
    stats = h.scheduler.stats()
    assert stats.class_waiting == (2, 0, 0)
    assert stats.class_waited_s == pytest.approx((2 * STEP_S, 0.0, 0.0))
