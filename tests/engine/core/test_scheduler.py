"""The scheduler, step by step. Most of these are bugs that other engines have had."""

from __future__ import annotations

import pytest

from engine.core import pace
from engine.core.messages import FinishReason, RunResult, ServiceClass
from engine.core.planner import PASSED_MAX, Planner
from engine.core.policy import FIFO, OLDEST_EVERY
from tests.engine.core.harness import STEP_S, Harness, greedy
from tests.fake_runner import NUMERIC_SEEDS, solo

PROMPT = list(range(1, 11))


# -- one sequence ---------------------------------------------------------------------------------


def test_a_sequence_runs_to_its_length() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(5))
    h.run()
    h.assert_all_as_solo()
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


def test_one_token_and_out() -> None:
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
    h.run()
    h.assert_all_as_solo()


def test_a_long_prompt_is_chunked_by_the_budget() -> None:
    h = Harness(step_tokens_max=8)
    h.add(1, [1] * 20, greedy(2))
    h.run()
    h.assert_all_as_solo()
    assert [plan.lengths for plan in h.plans] == [[8], [8], [4], [1]]
    assert [plan.samples for plan in h.plans] == [[False], [False], [True], [True]]


def test_numeric_failure_ends_one_sequence_and_spoils_no_cache() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(50, seed=NUMERIC_SEEDS))
    h.add(2, [9, *PROMPT], greedy(50))
    h.run()
    h.assert_all_as_solo()
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
    h.run()
    h.assert_all_as_solo()
    assert all(plan.slots[0] == 0 for plan in h.plans[:20]), "a token for the first in every step"


def test_decodes_come_first_whatever_the_chunks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With short chunks several prompts are under way at once; the runner checks each plan's order."""
    monkeypatch.setattr(pace, "chunk_len", lambda pending, left: min(pending, left, 3 + pending % 5))
    h = Harness(step_tokens_max=24)
    for handle in range(1, 9):
        h.add(handle, [handle] * (31 - 3 * handle), greedy(12))
    h.run()
    h.assert_all_as_solo()
    assert any(sum(length > 1 for length in plan.lengths) > 2 for plan in h.plans)


def test_a_budget_as_small_as_the_slots_still_moves_everybody() -> None:
    h = Harness(slots=4, step_tokens_max=4)
    for handle in range(1, 9):
        h.add(handle, [handle] * 9, greedy(6))
    h.run()
    h.assert_all_as_solo()


# -- the door -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [
        ([], 1),
        ([1] * 10, 24),  # 33 tokens to hold, 32 places
        ([1] * 33, 1),
        ([1] * 10, 0),
        ([50], 1),  # outside of the vocabulary
        ([-1], 1),
    ],
)
def test_what_can_never_run_is_rejected_at_once(prompt: list[int], max_tokens: int) -> None:
    h = Harness(pages=8)
    h.add(1, prompt, greedy(max_tokens))
    assert not h.scheduler.has_work
    h.read()
    assert h.reason(1) is FinishReason.REJECTED


def test_beyond_the_context_is_rejected() -> None:
    h = Harness(max_model_len=16)
    h.add(1, [1] * 10, greedy(6))
    h.add(2, [1] * 10, greedy(7))
    h.run()
    assert (h.reason(1), h.reason(2)) == (FinishReason.LENGTH, FinishReason.REJECTED)


def test_what_fills_the_pool_exactly_runs() -> None:
    h = Harness(pages=8, watermark=0.5)
    h.add(1, [1] * 30, greedy(3))
    h.run()
    h.assert_all_as_solo()


def test_a_full_queue_rejects_at_once_and_the_queued_are_served() -> None:
    h = Harness(slots=1, queue_len_max=2)
    for handle in (1, 2, 3):
        h.add(handle, PROMPT, greedy(2))
    h.read()
    assert h.finished.keys() == {3}
    h.step()
    h.add(4, PROMPT, greedy(2))
    h.run()
    assert h.reason(4) is FinishReason.LENGTH


def replaced_of(h: Harness) -> list[tuple[int, int, int]]:
    return [change for plan in h.plans for change in plan.replaced]


def test_doubles_are_merged_while_both_go_on() -> None:
    """Their prompts share a beginning and are computed one after the other; what they put out is the same,
    and fills the same page in the same step."""
    h = Harness()
    h.add(1, [1] * 9, greedy(8))
    h.add(2, [1] * 9, greedy(8))
    while not replaced_of(h):
        h.step()
    assert h.scheduler.stats().pages_owned == 5, "three in common, and one each"
    h.run()
    h.assert_all_as_solo()
    assert h.scheduler.stats().pages_cached == 4
    assert len(replaced_of(h)) == 1


def test_prompts_computed_beside_each_other_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rule D, which makes the second wait for the first."""
    monkeypatch.setattr(Planner, "_is_coming", lambda *_: False)
    h = Harness()
    for handle in (1, 2, 3):
        h.add(handle, [1] * 14, greedy(3))
    h.step()
    h.abort(2)
    h.step()
    assert sorted(index for _, index, _ in replaced_of(h)) == [0, 1, 2], "of the one that is left"
    assert h.scheduler.stats().pages_owned == 5
    h.add(4, [1] * 14, greedy(3))
    h.run()
    assert h.tokens[1] == h.tokens[3] == h.tokens[4] == h.solo(1).tokens
    assert h.scheduler.stats().pages_owned == 0


def test_a_queue_full_of_tokens_rejects_but_one_may_wait_alone() -> None:
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


def test_preempted_work_takes_no_place_in_the_queue() -> None:
    h = Harness(pages=6, queue_len_max=1, slots=2)
    h.add(1, [1] * 8, greedy(12))
    h.step()
    h.add(2, [2] * 8, greedy(12))
    while not h.scheduler.stats().preemptions:
        h.step()
    h.add(3, [3] * 4, greedy(2))
    h.run()
    assert h.reason(3) is FinishReason.LENGTH


# -- the prefix cache -----------------------------------------------------------------------------


def test_a_block_aligned_prompt_again_still_computes_its_last_token() -> None:
    h = Harness()
    for handle in (1, 2):
        h.add(handle, PROMPT[:8], greedy(3))
        h.run()
    h.assert_all_as_solo()
    assert h.started[2].cached_len == 4
    assert h.plans[3].lengths == [4]


def test_a_hit_of_all_but_one_token_is_a_single_row() -> None:
    h = Harness()
    for handle in (1, 2):
        h.add(handle, PROMPT[:9], greedy(3))
        h.run()
    h.assert_all_as_solo()
    assert h.started[2].cached_len == 8
    assert (h.plans[3].positions, h.plans[3].lengths, h.plans[3].samples) == ([8], [1], [True])
    stats = h.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (18, 8)


def test_output_is_found_again_by_the_next_turn() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(8))
    h.run()
    h.add(2, PROMPT + h.tokens[1] + [5, 6], greedy(3))
    h.run()
    assert h.started[2].cached_len == 16  # 10 + 8 tokens, the last of them never computed
    h.assert_all_as_solo()


def test_salts_do_not_share() -> None:
    h = Harness()
    for handle, salt in ((1, b"a"), (2, b"b"), (3, b"a")):
        h.add(handle, PROMPT, greedy(3), cache_salt=salt)
        h.run()
    assert [h.started[handle].cached_len for handle in (1, 2, 3)] == [0, 0, 8]


def test_without_the_cache_nothing_is_shared() -> None:
    h = Harness(prefix_cache=False)
    for handle in (1, 2):
        h.add(handle, PROMPT, greedy(3))
    h.run()
    h.assert_all_as_solo()
    assert h.started[2].cached_len == 0
    assert h.scheduler.stats().pages_cached == 0


def test_prompt_logprobs_read_nothing_from_the_cache_and_fill_it() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(3))
    h.run()
    h.add(2, PROMPT, greedy(3, prompt_logprobs=2))
    h.run()
    assert h.started[2].cached_len == 0
    h.assert_all_as_solo()


def test_children_of_one_prompt_compute_it_once() -> None:
    h = Harness(step_tokens_max=16)
    prompt = [7] * 33
    for handle in (1, 2, 3, 4):
        h.add(handle, prompt, greedy(4, seed=handle))
    h.run()
    h.assert_all_as_solo()
    assert [h.started[handle].cached_len for handle in (1, 2, 3, 4)] == [0, 32, 32, 32]


def test_those_who_wait_for_a_common_page_are_passed_by_others() -> None:
    h = Harness(step_tokens_max=16)
    h.add(1, [7] * 12, greedy(4))
    h.add(2, [7] * 12, greedy(4))
    h.add(3, [8] * 3, greedy(4))
    plan = h.step()
    assert plan is not None
    assert h.started.keys() == {1, 3}
    h.step()
    assert h.started.keys() == {1, 2, 3}


def test_a_plan_looks_at_a_bounded_number_of_those_who_wait_for_a_common_page() -> None:
    h = Harness(slots=20, step_tokens_max=40)
    for handle in range(1, PASSED_MAX + 2):
        h.add(handle, [7] * 33, greedy(2, seed=handle))
    h.add(100, [8] * 33, greedy(2))
    h.step()
    assert h.started.keys() == {1}
    h.step()
    assert len(h.started) == PASSED_MAX + 2
    h.run()
    h.assert_all_as_solo()


def test_nobody_waits_for_a_page_whose_computer_was_aborted() -> None:
    h = Harness(step_tokens_max=8)
    h.add(1, [7] * 30, greedy(4))
    h.add(2, [7] * 30, greedy(4))
    h.step()
    assert h.started.keys() == {1}
    h.abort(1)
    h.step()
    assert h.started[2].cached_len == 8
    h.run()
    assert h.tokens[2] == h.solo(2).tokens


# -- preemption -----------------------------------------------------------------------------------


def test_preemption_gives_way_to_the_older_and_changes_no_token() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    h.run()
    h.assert_all_as_solo()
    assert (h.finished[1].preemptions, h.finished[2].preemptions) == (0, 1)
    assert h.finished[2].preempted_s > 0


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    h.run()
    again = next(start for plan in h.plans[1:] for start in plan.seated)
    assert again.prompt_len == 8
    assert len(again.token_ids) > 8, "prompt and output so far"
    row = next(plan for plan in h.plans[1:] if plan.seated)
    assert row.positions[row.slots.index(again.slot)] > 0, "some of it was still cached"


def test_preempted_work_goes_ahead_of_newcomers() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while not h.scheduler.stats().preemptions:
        h.step()
    h.add(3, [3] * 4, greedy(2))
    while 3 not in h.started:
        h.step()
    assert h.finished.keys() >= {1}
    assert sum(len(plan.seated) for plan in h.plans) == 4
    assert [start.prompt_len for plan in h.plans for start in plan.seated] == [8, 8, 8, 4]
    h.run()
    h.assert_all_as_solo()


def test_prompt_logprobs_are_sent_once_whatever_happens() -> None:
    """A prefill is preempted after its first chunk, and its second admission starts from the cache."""
    h = Harness(pages=10, step_tokens_max=8)
    h.add(1, [1] * 20, greedy(16))
    h.steps(2)
    h.add(2, list(range(2, 22)), greedy(2, prompt_logprobs=1))
    h.run()
    h.assert_all_as_solo()
    assert h.finished[2].preemptions >= 1
    assert len(h.prompt_logprobs[2]) == 19
    seats = [(plan, start) for plan in h.plans for start in plan.seated if start.token_ids[0] == 2]
    assert len(seats) >= 2
    plan, start = seats[-1]
    assert plan.positions[plan.slots.index(start.slot)] > 0


@pytest.mark.parametrize("preemptions_max", [1, 3])
def test_preemptions_of_one_sequence_are_bounded(preemptions_max: int) -> None:
    h = Harness(pages=12, slots=6, step_tokens_max=32, preemptions_max=preemptions_max)
    for handle in range(1, 41):
        h.add(handle, [handle] * 5, greedy(30, seed=3))
    h.run()
    h.assert_all_as_solo()
    counts = [finished.preemptions for finished in h.finished.values()]
    assert max(counts) == preemptions_max, "there was pressure, and it stopped at the bound"


def test_a_protected_sequence_lets_nobody_in_who_could_displace_it() -> None:
    h = Harness(pages=8, preemptions_max=1, discipline=FIFO)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while 1 not in h.finished:
        h.step()
    h.step()
    assert h.finished.keys() == {1}
    assert h.scheduler.stats().running == 1, "the second is back, protected, and may grow to 7 pages"
    h.add(3, [3] * 4, greedy(8))  # 3 pages at most
    h.add(4, [4], greedy(3))  # 1 page: it would fit, and waits for its turn
    h.step()
    assert h.scheduler.stats().pages_free + h.scheduler.stats().pages_cached >= 1
    assert h.started.keys() == {1, 2}
    h.run()
    h.assert_all_as_solo()


def test_beside_a_protected_sequence_there_is_room_for_what_ends_small() -> None:
    h = Harness(pages=8, preemptions_max=1)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while 1 not in h.finished:
        h.step()
    h.add(3, [3], greedy(4))  # 1 page at most
    h.step()
    assert h.started.keys() == {1, 2, 3}
    h.run()
    h.assert_all_as_solo()
    assert h.finished[2].preemptions == 1


def test_the_watermark_holds_admissions_back_while_somebody_runs() -> None:
    h = Harness(pages=8, watermark=0.25, discipline=FIFO)
    h.add(1, [1] * 12, greedy(2))
    h.add(2, [2] * 13, greedy(2))  # 4 of the 5 pages left, 2 must remain
    h.add(3, [3], greedy(2))
    h.step()
    assert h.started.keys() == {1}, "and nobody overtakes"
    h.run()
    h.assert_all_as_solo()


def test_nobody_takes_what_a_preempted_sequence_gave_back() -> None:
    h = Harness(pages=8, slots=2, discipline=FIFO)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    h.add(3, [3], greedy(1))
    while not h.scheduler.stats().preemptions:
        plan = h.step()
    assert plan is not None
    assert (plan.left, plan.seated) == ([1], [])
    h.run()
    h.assert_all_as_solo()


def test_one_victim_serves_all_whom_its_pages_suffice() -> None:
    h = Harness(pages=6)
    for handle in (1, 2, 3):
        h.add(handle, [handle] * 8, greedy(3))
    h.steps(2)  # all three cross into a third page; the last gives its two to the others
    assert h.scheduler.stats().preemptions == 1
    assert h.scheduler.stats().running == 2
    h.run()
    h.assert_all_as_solo()


def test_the_one_that_needs_a_page_yields_itself_when_it_is_the_least() -> None:
    h = Harness(pages=7)
    h.add(1, [1] * 13, greedy(8))
    h.add(2, [2] * 10, greedy(8))
    h.run()
    h.assert_all_as_solo()
    assert (h.finished[1].preemptions, h.finished[2].preemptions) == (0, 1)


# -- aborts ---------------------------------------------------------------------------------------


def held(h: Harness) -> tuple[int, int, int]:
    stats = h.scheduler.stats()
    return stats.waiting, stats.running, stats.pages_owned


@pytest.mark.parametrize("steps", range(8))
def test_abort_after_any_number_of_steps_frees_everything_at_once(steps: int) -> None:
    """Waiting, mid-prefill, at the first token, in decode."""
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


def test_abort_in_the_final_step_ends_it_once() -> None:
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


def test_abort_of_a_preempted_sequence() -> None:
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


def test_abort_after_the_end_or_of_the_unknown_does_nothing() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(1))
    h.run()
    h.abort(1, 7, 11)
    assert h.scheduler.report() is None


def test_handles_are_exact() -> None:
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


def test_a_handle_that_lives_cannot_be_added_again() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(3))
    with pytest.raises(AssertionError, match="never reused"):
        h.add(1, PROMPT, greedy(3))


# -- reports --------------------------------------------------------------------------------------


def test_every_step_reports_and_idleness_does_not() -> None:
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


def test_times_of_a_life() -> None:
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


def test_a_runner_that_brings_too_little_is_a_bug() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(4))
    plan = h.plan()
    assert plan is not None
    with pytest.raises(AssertionError):
        h.scheduler.commit(plan, RunResult([], [], []), h.now)


# -- classes and turns ----------------------------------------------------------------------------

FLEX, DEFAULT, PRIORITY = ServiceClass


def test_a_higher_class_takes_pages_from_a_lower_one_and_no_token_changes() -> None:
    h = Harness(pages=8, slots=4)
    h.add(1, [1] * 12, greedy(16), service_class=FLEX)
    h.add(2, [2] * 12, greedy(8))
    h.step()
    h.add(3, [3] * 12, greedy(4), service_class=PRIORITY)
    h.step()
    assert 3 in h.started, "the lowest class gave way at once"
    h.run()
    h.assert_all_as_solo()
    assert h.finished[1].preemptions >= 1
    assert h.finished[3].preemptions == 0


def test_a_higher_class_takes_a_slot_from_a_lower_one() -> None:
    h = Harness(slots=2)
    h.add(1, [1] * 4, greedy(16))
    h.add(2, [2] * 4, greedy(16), service_class=FLEX)
    h.steps(3)
    h.add(3, [3] * 4, greedy(16))
    h.step()
    assert 3 in h.started
    h.run()
    h.assert_all_as_solo()
    assert [h.finished[handle].preemptions for handle in (1, 2, 3)] == [0, 1, 0]


def test_an_equal_class_takes_nothing() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(16), service_class=PRIORITY)
    h.step()
    h.add(2, [2] * 4, greedy(2), service_class=PRIORITY)
    h.run()
    h.assert_all_as_solo()
    assert h.finished[1].preemptions == 0


def test_nobody_is_preempted_for_one_who_would_not_fit_all_the_same() -> None:
    h = Harness(pages=11)
    h.add(1, [1] * 24, greedy(8))
    h.add(2, [2] * 4, greedy(8), service_class=FLEX)
    h.steps(2)
    h.add(3, [3] * 24, greedy(2), service_class=DEFAULT)
    h.steps(2)
    assert 3 not in h.started
    h.run()
    h.assert_all_as_solo()
    assert h.finished[2].preemptions == 0


def test_as_few_as_possible_give_way() -> None:
    h = Harness(pages=12, discipline=FIFO)
    h.add(1, [1] * 4, greedy(8), service_class=FLEX)
    h.add(2, [2] * 20, greedy(8), service_class=FLEX)
    h.add(3, [3] * 8, greedy(8), service_class=FLEX)
    h.step()
    h.add(4, [4] * 28, greedy(1))
    h.step()
    assert 4 in h.started
    assert h.plans[-1].left == [1], "one large one, and not two small ones beside"
    h.run()
    h.assert_all_as_solo()


def test_who_is_protected_gives_way_to_no_class() -> None:
    h = Harness(slots=1, preemptions_max=2)
    h.add(1, [1] * 4, greedy(40), service_class=FLEX)
    for handle in range(2, 8):
        h.steps(4)  # enough for the one before, and for the first to be back
        h.add(handle, [handle] * 4, greedy(2), service_class=PRIORITY)
    h.run()
    h.assert_all_as_solo()
    assert h.finished[1].preemptions == 2


@pytest.mark.parametrize("elder_class", [FLEX, DEFAULT])
def test_the_eldest_has_its_turn_whatever_comes(elder_class: ServiceClass) -> None:
    """One slot, a long prompt of a low class, and an endless stream of short ones of the highest."""
    h = Harness(slots=1, pages=64, step_tokens_max=64)
    h.add(1, [1] * 60, greedy(1), service_class=elder_class)
    h.add(2, [2], greedy(1), service_class=PRIORITY)
    for handle in range(3, 40):
        h.add(handle, [handle], greedy(1), service_class=PRIORITY)
        h.step()
        if 1 in h.started:
            break
    assert len(h.started) == OLDEST_EVERY


def test_in_the_eldests_turn_pages_are_kept_for_it() -> None:
    h = Harness(pages=16, slots=4)
    h.add(100, [9] * 24, greedy(24))
    h.step()
    h.add(1, [1] * 44, greedy(1), service_class=FLEX)  # 11 pages beside at least 6
    for handle in range(2, 22):
        h.add(handle, [handle], greedy(1), service_class=PRIORITY)
        h.step()
    assert 100 not in h.finished
    assert list(h.started) == [100, *range(2, 2 + OLDEST_EVERY - 1)]
    h.run()
    h.assert_all_as_solo()


def test_the_rate_of_prefill_is_learned_from_the_steps() -> None:
    """Two short prompts and a long one: after a step that was slow for its length, shorter goes first."""
    h = Harness(slots=1, step_tokens_max=256, max_model_len=512, pages=128)
    h.add(1, [1] * 100, greedy(1))
    h.step()
    h.add(2, [2] * 200, greedy(1))
    h.now += STEP_S
    h.add(3, [3] * 4, greedy(1))
    h.now += STEP_S
    h.step()
    assert list(h.started) == [1, 3]


def test_a_short_prompt_passes_a_long_one_that_has_begun() -> None:
    h = Harness(step_tokens_max=16, slots=4)
    h.add(1, [1] * 120, greedy(1))
    h.step()
    h.add(2, [2] * 4, greedy(1))
    h.now += 1.0
    h.step()
    assert 2 in h.finished
    assert h.plans[-1].lengths == [4, 12], "and what it leaves is the long one's"
    h.run()
    h.assert_all_as_solo()


def test_a_long_prompt_that_has_begun_always_gets_on() -> None:
    h = Harness(step_tokens_max=64, slots=8, prefix_cache=False)
    h.add(1, [1] * 200, greedy(1))
    h.step()
    for handle in range(2, 400):
        h.add(handle, [handle % 50] * 60, greedy(1))
        h.step()
        slot = next(start.slot for plan in h.plans for start in plan.seated if len(start.token_ids) == 200)
        assert slot in h.plans[-1].slots, "it is in every step"
        if 1 in h.finished:
            break
    assert 1 in h.finished
    h.run()
    h.assert_all_as_solo()


def test_the_queue_is_told_by_class() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(9), service_class=ServiceClass.PRIORITY)
    h.add(2, [2] * 4, greedy(9), service_class=ServiceClass.FLEX)
    h.add(3, [3] * 4, greedy(9), service_class=ServiceClass.FLEX)
    h.steps(2)
    stats = h.scheduler.stats()
    assert stats.class_waiting == (2, 0, 0)
    assert stats.class_waited_s == pytest.approx((2 * STEP_S, 0.0, 0.0))
