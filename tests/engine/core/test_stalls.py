"""Paused sequences, whose clients do not read: what is computed for them, what they keep, and how others go
on."""

from __future__ import annotations

import math

import pytest

from engine.contract.messages import FinishReason
from engine.core.sequence import Status
from tests.engine.core.harness import STEP_S, Harness, greedy
from tests.fake_runner import NUMERIC_SEEDS

PROMPT = list(range(1, 11))


def held(h: Harness) -> tuple[int, int, int, int]:
    stats = h.scheduler.stats()
    return stats.waiting, stats.running, stats.stalled, stats.pages_owned


def shares_pages(h: Harness, count: int) -> None:
    """Let so many sequences run whose prompts have two pages in common."""
    h.add(1, [7] * 8 + [1] * 4, greedy(20, seed=1))
    h.step()
    for handle in range(2, count + 1):
        h.add(handle, [7] * 8 + [handle] * 4, greedy(20, seed=handle))
    h.step()
    assert held(h) == (0, count, 0, 3 + count), "two pages in common"


# -- a pause --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
def test_a_pause_at_any_moment_changes_no_token(steps: int) -> None:
    """The sequence is waiting, in its prefill, at its first token, or decoding."""
    h = Harness(step_tokens_max=8)
    h.add(1, [1] * 30, greedy(6, prompt_logprobs=1))
    h.steps(steps)
    h.pause(1)
    owned = h.scheduler.stats().pages_owned
    plans = len(h.plans)
    h.steps(3)
    assert len(h.plans) == plans, "nothing is computed"
    assert held(h) == (0, 0, 1, owned), "the pages stay"
    h.resume(1)
    h.run_as_solo()
    assert sum(sum(plan.lengths) for plan in h.plans) == 35, "nothing is computed twice"
    assert h.finished[1].stalled_s == pytest.approx(0.0), "no time passed"


@pytest.mark.parametrize("resumes", [False, True])
def test_the_token_in_flight_at_a_pause_is_neither_lost_nor_doubled(resumes: bool) -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(4))
    h.step()
    plan = h.plan()
    assert plan is not None
    h.pause(1)
    if resumes:
        h.resume(1)
    h.finish_step(plan)
    output = h.read()
    assert output is not None
    assert (output.handles, output.stats.stalled) == ([1], 0 if resumes else 1)
    assert (h.plan() is None) == (not resumes)


def test_a_pause_between_two_steps_has_no_effect() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(4))
    h.step()
    h.pause(1)
    h.resume(1)
    h.run_as_solo()
    assert len([start for plan in h.plans for start in plan.seated]) == 1


@pytest.mark.parametrize(("tokens", "seed"), [(1, 1), (50, NUMERIC_SEEDS)])
def test_a_pause_of_a_sequence_that_ends_meanwhile_has_no_effect(tokens: int, seed: int) -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(tokens, seed=seed))
    while not h.finished:
        plan = h.plan()
        assert plan is not None
        h.pause(1)
        h.finish_step(plan)
        h.resume(1)
        h.read()
    h.assert_all_as_solo()
    h.pause(1)
    assert h.scheduler.idle_s(h.now) == math.inf
    assert h.scheduler.report() is None


def test_pauses_are_exact_and_idempotent() -> None:
    h = Harness()
    for handle in (1, 10, 11):
        h.add(handle, [handle, *PROMPT], greedy(5))
    h.step()
    h.pause(1, 1, 99)
    h.now += 1.0
    h.pause(1)
    h.resume(10, 99)
    h.run()
    assert h.finished.keys() == {10, 11}
    h.resume(1, 1)
    h.run_as_solo()
    assert h.finished[1].stalled_s == pytest.approx(1.0 + 4 * STEP_S)


def test_abort_cancels_a_stalled_sequence() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(5))
    h.steps(2)
    h.pause(1)
    h.step()
    h.abort(1)
    assert held(h) == (0, 0, 0, 0)
    h.read()
    assert h.reason(1) is FinishReason.ABORTED
    h.resume(1)
    assert not h.scheduler.has_work


def test_a_paused_waiting_sequence_is_passed_and_blocks_no_other() -> None:
    h = Harness(slots=1)
    for handle in (1, 2):
        h.add(handle, [handle, *PROMPT], greedy(2))
    h.pause(1)
    h.step()
    assert h.started.keys() == {2}
    assert held(h)[:3] == (0, 1, 1)
    h.resume(1)
    h.run_as_solo()
    assert h.finished[1].stalled_s == pytest.approx(STEP_S)


# -- whom it may not harm -------------------------------------------------------------------------


def test_the_slot_of_a_stalled_sequence_serves_others() -> None:
    h = Harness(slots=1)
    h.add(1, PROMPT, greedy(5))
    h.steps(2)
    h.pause(1)
    h.add(2, [9, *PROMPT], greedy(5))
    h.step()
    assert h.started.keys() == {1, 2}
    h.resume(1)
    h.step()
    assert held(h)[:3] == (1, 1, 0), "it waits for a slot, and holds its pages"
    h.run_as_solo()
    back = next(plan for plan in h.plans[3:] if plan.seated)
    assert (back.positions, back.lengths) == ([11], [1]), "it goes on where it was"


def test_a_resumed_sequence_is_admitted_before_waiting_ones() -> None:
    h = Harness(slots=1)
    h.add(1, PROMPT, greedy(5))
    h.step()
    h.pause(1)
    for handle in (2, 3):
        h.add(handle, [handle, *PROMPT], greedy(3))
    h.step()
    h.resume(1)
    h.run_as_solo()
    assert list(h.finished) == [2, 1, 3]


def test_a_stalled_sequence_is_preempted_before_any_running_one() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.step()
    h.pause(1)
    h.add(2, [2] * 8, greedy(20))
    h.add(3, [3] * 8, greedy(9))
    h.run()
    assert h.finished.keys() == {2, 3}
    assert (h.finished[2].preemptions, h.finished[3].preemptions) == (0, 0)
    assert held(h) == (0, 0, 1, 0)
    h.resume(1)
    h.run_as_solo()
    assert h.finished[1].preemptions == 0, "it did not run"
    assert h.scheduler.stats().preemptions == 1


def test_a_paused_sequence_that_lost_its_pages_is_not_admitted_before_it_resumes() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.step()
    h.pause(1)
    h.add(2, [2] * 24, greedy(4))
    h.run()
    assert h.scheduler.stats().preemptions == 1
    h.steps(3)
    assert held(h) == (0, 0, 1, 0)
    h.resume(1)
    h.run_as_solo()


def test_an_admission_preempts_no_more_stalled_sequences_than_it_needs() -> None:
    h = Harness(pages=10)
    for handle in (1, 2, 3):
        h.add(handle, [handle] * 8, greedy(20))
        h.step()
    h.pause(2)
    h.now += 1.0
    h.pause(1, 3)
    h.add(4, [4] * 12, greedy(2))
    h.step()
    assert h.started.keys() == {1, 2, 3, 4}
    assert h.scheduler.stats().preemptions == 1
    h.resume(1, 3)
    h.step()
    assert held(h)[:3] == (0, 2, 1), "the longest away has lost its pages, the others have not"
    h.resume(2)
    h.run_as_solo()


def test_pages_shared_by_stalled_sequences_alone_can_be_reclaimed() -> None:
    """A page in three tables is free when the third sequence has released it."""
    h = Harness(pages=16)
    shares_pages(h, 3)
    h.pause(1, 2, 3)
    h.add(9, [9] * 60, greedy(4))
    h.run()
    assert h.finished.keys() == {9}
    h.resume(1, 2, 3)
    h.run_as_solo()


def test_pages_shared_with_running_sequences_cannot_be_reclaimed() -> None:
    h = Harness(pages=7, slots=3)
    h.add(1, [7] * 12, greedy(8, seed=1))
    h.step()
    h.add(2, [7] * 12, greedy(8, seed=2))
    h.steps(2)
    h.pause(2)
    h.add(3, [3] * 12, greedy(2))
    h.run()
    assert h.finished.keys() == {1, 3}
    h.resume(2)
    h.run_as_solo()


def test_the_prefix_of_an_admission_is_not_reclaimed_for_it() -> None:
    """The prefix that it hits is in the pages of the very sequence whose other pages are reclaimed."""
    h = Harness(pages=8)
    h.add(1, [7] * 25, greedy(4))
    h.step()
    h.pause(1)
    h.add(2, [7] * 12 + [8] * 14, greedy(4))
    h.step()
    assert h.started[2].cached_len == 12
    assert h.scheduler.stats().preemptions == 1
    h.resume(1)
    h.run_as_solo()


def test_a_pause_does_not_lift_a_sequences_protection() -> None:
    """A protected sequence that resumes after a stall waits until all can grow, and then is not preempted."""
    h = Harness(pages=8, preemptions_max=1)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while 1 not in h.finished:
        h.step()
    assert h.finished.keys() == {1}
    h.step()
    h.pause(2)
    h.add(3, [3] * 4, greedy(20))  # it may grow to 6 pages
    h.step()
    assert h.started.keys() == {1, 2, 3}
    h.resume(2)
    h.step()
    assert held(h)[:2] == (1, 1), "both could not end here"
    h.run_as_solo()
    assert h.finished[3].preemptions == 0
    assert h.finished[2].preemptions == 1


# -- the deadline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_a_sequence_that_stays_paused_ends_at_the_stall_deadline(steps: int) -> None:
    h = Harness(step_tokens_max=8, stall_deadline_s=5.0)
    h.add(1, [1] * 30, greedy(20))
    h.steps(steps)
    h.pause(1)
    assert h.plan() is None
    assert h.scheduler.idle_s(h.now) == pytest.approx(5.0)
    h.now += 4.9
    assert h.plan() is None
    assert not h.scheduler.has_work
    assert held(h)[2] == 1
    h.now += h.scheduler.idle_s(h.now)
    assert h.plan() is None
    h.read()
    assert h.reason(1) is FinishReason.STALLED
    assert h.finished[1].stalled_s == pytest.approx(5.0)
    assert h.tokens[1] == h.solo(1).tokens[: len(h.tokens[1])]
    assert held(h) == (0, 0, 0, 0)
    assert h.scheduler.idle_s(h.now) == math.inf


def test_a_resumption_starts_the_stall_deadline_anew() -> None:
    h = Harness(stall_deadline_s=5.0)
    h.add(1, PROMPT, greedy(9))
    for _ in range(4):
        h.step()
        h.pause(1)
        h.now += 4.0
        h.step()
        h.resume(1)
    h.run_as_solo()
    assert h.finished[1].stalled_s == pytest.approx(16.0)


def test_a_stall_deadline_passes_while_others_run() -> None:
    h = Harness(stall_deadline_s=3 * STEP_S)
    h.add(1, PROMPT, greedy(20))
    h.add(2, [9, *PROMPT], greedy(20))
    h.step()
    h.pause(1)
    h.run()
    assert h.reason(1) is FinishReason.STALLED
    assert h.finished[1].stalled_s == pytest.approx(3 * STEP_S)
    assert h.tokens[2] == h.solo(2).tokens


def test_stall_deadlines_come_in_the_order_of_the_pauses() -> None:
    h = Harness(stall_deadline_s=5.0)
    for handle in (1, 2, 3):
        h.add(handle, [handle, *PROMPT], greedy(9))
    h.step()
    for handle in (3, 1, 2):
        h.pause(handle)
        h.now += 1.0
    h.resume(3)
    h.pause(3)
    ends = []
    while (idle_s := h.scheduler.idle_s(h.now)) < math.inf:
        h.now += idle_s
        h.step()
        ends.append(h.now)
    assert list(h.finished) == [1, 2, 3]
    assert ends == pytest.approx([106.01, 107.01, 108.01])


def test_more_paused_sequences_than_allowed_end_those_paused_for_longest() -> None:
    h = Harness(paused_max=2)
    for handle in (1, 2, 3, 4):
        h.add(handle, [handle, *PROMPT], greedy(9))
    h.step()
    for handle in (2, 4, 1):
        h.pause(handle)
    h.step()
    assert h.reason(2) is FinishReason.STALLED
    assert set(h.finished) == {2}
    h.resume(4)
    h.pause(3)
    h.resume(1)
    h.resume(3)
    h.run()
    assert [h.reason(handle) for handle in (1, 3, 4)] == [FinishReason.LENGTH] * 3


def test_a_tenant_that_pauses_many_ends_no_other_tenants() -> None:
    h = Harness(paused_max=4, slots=12)
    h.add(1, [1, *PROMPT], greedy(9), tenant="reads slowly")
    for handle in range(2, 12):
        h.add(handle, [handle, *PROMPT], greedy(9), tenant="does not read")
    h.step()
    for handle in range(1, 12):
        h.pause(handle)
    h.step()
    assert set(h.finished) == set(range(2, 9)), "those of the most, which were paused for longest"
    h.resume(1)
    h.steps(30)
    assert h.reason(1) is FinishReason.LENGTH


def test_where_too_many_pause_at_once_the_ends_are_shared_by_those_that_have_most() -> None:
    h = Harness(paused_max=4)
    for handle in range(1, 8):
        h.add(handle, [handle, *PROMPT], greedy(9), tenant="a" if handle <= 4 else "b")
    h.step()
    h.pause(*range(1, 8))
    h.step()
    assert set(h.finished) == {1, 2, 5}, "one of the four, then one of the three of each"


def test_a_state_is_lost_with_the_slot_and_computed_again_beside_a_victim() -> None:
    """What stalls gives up its pages, and goes on with the same tokens; another is not disturbed."""
    h = Harness(state_bytes=64, slots=2, pages=16)
    h.add(1, [1, 2, 3, 4, 5], greedy(20))
    h.add(2, [1, 2, 3, 4, 5], greedy(20), tenant="victim")
    h.steps(4)
    h.pause(1)
    h.step()
    assert held(h)[2] == 1
    sequence = h.scheduler._sequences[1]
    assert (sequence.slot, sequence.pages, sequence.status) == (None, [], Status.PREEMPTED)
    h.resume(1)
    h.run_as_solo()
    assert h.scheduler.stats().prefix_hit_tokens == 0
    assert h.scheduler._sequences == {}
    assert h.scheduler.stats().pages_cached == 0
