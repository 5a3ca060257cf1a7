"""Snapshots of states: where they are taken, what goes on from them, and who loses them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.contract.messages import FinishReason, SamplingParams
from engine.core.estimate.cost import StepCost
from tests.effort import drawn
from tests.engine.core.harness import Harness, greedy, knowing
from tests.fake_runner import NUMERIC_SEEDS
from tests.overlapped import simulate_overlapped
from tests.simulator import simulate
from tests.worlds import random_history_of_states

SLOW = StepCost(token_s=1.0, fixed_s=0.1)
"""Tokens so slow that every snapshot pays."""


def harness(cost: StepCost = SLOW, **options: Any) -> Harness:
    h = Harness(**({"state_bytes": 8, "state_places": 40, "pages": 200} | options))
    knowing(h.scheduler, cost)
    return h


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * at) % 50 for at in range(length)]


def cached_len(h: Harness, handle: int, tokens: list[int], **options: Any) -> int:
    """The tokens that a new prompt need not compute."""
    h.add(handle, tokens, greedy(2), **options)
    h.run()
    return h.started[handle].cached_len


def test_a_prompt_that_comes_again_goes_on_from_the_last_page_that_leaves_something_to_compute() -> None:
    for length, known_len in ((26, 24), (24, 20), (25, 24), (4, 0), (5, 4)):
        h = harness()
        assert cached_len(h, 1, prompt(length)) == 0
        assert cached_len(h, 2, prompt(length)) == known_len
        h.assert_all_as_solo()


def test_the_next_turn_goes_on_from_the_last_page_of_the_answer() -> None:
    for answer_len in range(1, 12):
        h = harness()
        h.add(1, prompt(26), greedy(answer_len))
        h.run()
        turn = prompt(26) + h.tokens[1] + [1, 2, 3, 4, 5]
        assert cached_len(h, 2, turn) == (26 + answer_len - 1) // 4 * 4
        assert h.scheduler.stats().states.kept <= 4, "of an answer the newest alone"
        h.assert_all_as_solo()


def test_a_long_prompt_has_snapshots_at_intervals() -> None:
    h = harness(state_every_len=16, step_tokens_max=100)
    cached_len(h, 1, prompt(90))
    assert [plan.lengths for plan in h.plans if plan.lengths != [1]] == [[16]] * 5 + [[8], [2]]
    assert cached_len(h, 2, [*prompt(60), 3, 3, 3, 3, 3]) == 48
    h.assert_all_as_solo()


def test_a_prefix_is_found_the_third_time_where_a_second_prompt_left_the_first() -> None:
    """The second finds pages without a state, computes them again, and leaves a snapshot there."""
    h = harness()
    shared = prompt(41)
    assert [cached_len(h, at, shared + prompt(20, first=at)) for at in (1, 2, 3)] == [0, 0, 40]
    assert h.scheduler.stats().states.stateless_tokens == 40
    h.assert_all_as_solo()


def test_choices_of_one_prompt_go_on_from_its_last_snapshot() -> None:
    h = harness(slots=4)
    for handle in range(1, 5):
        h.add(handle, prompt(26), greedy(6))
    h.run()
    assert [h.started[handle].cached_len for handle in range(1, 5)] == [0, 24, 24, 24]
    h.assert_all_as_solo()


def test_what_stalls_goes_on_from_the_last_page_of_its_answer_beside_a_victim() -> None:
    h = harness(slots=2)
    h.add(1, prompt(26), greedy(20))
    h.add(2, prompt(26, first=3), greedy(20), tenant="victim")
    h.steps(12)
    sequence = h.scheduler._sequences[1]
    before = sequence.computed_len
    h.pause(1)
    h.step()
    assert (sequence.slot, sequence.pages) == (None, [])
    h.resume(1)
    h.run_as_solo()
    assert h.finished[1].again_tokens == before % 4
    assert h.finished[2].again_tokens == 0


def test_a_prompt_that_loses_its_slot_keeps_the_state_that_it_has_come_to() -> None:
    h = harness(step_tokens_max=17, slots=2)
    h.add(1, prompt(60), greedy(2))
    h.steps(2)
    assert h.scheduler._sequences[1].computed_len == 32, "chunks end with pages"
    h.pause(1)
    h.step()
    assert h.scheduler.stats().states.kept == 1
    h.resume(1)
    h.run()
    assert h.finished[1].again_tokens == 0
    h.assert_all_as_solo()


def test_no_chunk_ends_for_a_snapshot_that_saves_less_than_a_step_takes() -> None:
    h = harness(StepCost(token_s=1.0, fixed_s=20.0))
    cached_len(h, 1, prompt(10))
    assert h.plans[0].lengths == [10]


def test_a_state_goes_with_its_page() -> None:
    h = harness(pages=16)
    cached_len(h, 1, prompt(26), tenant="first")
    kept = h.scheduler.stats().states.kept
    for handle in range(2, 6):
        cached_len(h, handle, prompt(40, first=handle), tenant="other")
    assert kept
    assert cached_len(h, 9, prompt(26), tenant="first") == 0


def test_a_tenant_with_long_prompts_does_not_take_anothers_snapshots() -> None:
    """With one tenant for both, the victim would find nothing."""
    for flood, known_len in (("flood", 24), ("victim", 0)):
        h, handle = harness(state_places=48, state_every_len=8, pages=2000, step_tokens_max=64), 0
        for _ in range(4):
            handle += 1
            found = cached_len(h, handle, prompt(26), tenant="victim")
            for _ in range(4):
                handle += 1
                cached_len(h, handle, [handle, *prompt(120, first=handle)], tenant=flood)
        assert found == known_len
        assert h.scheduler.stats().states.evicted > 50


def test_a_sessions_snapshots_are_kept_for_its_next_turn() -> None:
    for session, known_len in ((True, 28), (False, 0)):
        h = harness(state_places=6, pages=2000)
        h.add(1, prompt(26), greedy(6), has_next_turn=session)
        h.run()
        for handle in range(2, 10):
            cached_len(h, handle, [handle, *prompt(60, first=handle)])
        assert cached_len(h, 10, prompt(26) + h.tokens[1] + [1, 2, 3]) == known_len


def test_the_states_of_what_failed_are_not_found() -> None:
    h = harness()
    for at in range(20):
        h.add(at, prompt(26, first=at), SamplingParams(seed=NUMERIC_SEEDS * at, max_tokens=30))
    h.run()
    ends = {handle: end.reason for handle, end in h.finished.items()}
    assert set(ends.values()) == {FinishReason.NUMERIC, FinishReason.LENGTH}
    for handle, reason in ends.items():
        known_len = 0 if reason is FinishReason.NUMERIC else 24
        assert cached_len(h, 100 + handle, prompt(26, first=handle)) == known_len


def test_without_a_place_nothing_is_cached() -> None:
    h = harness(state_places=0)
    assert [cached_len(h, handle, prompt(26)) for handle in (1, 2)] == [0, 0]
    assert h.scheduler.stats().pages_cached == 0


HISTORIES = drawn(70, whole=10_000)
BATCH = drawn(70, whole=200)
LEAST = {
    "hits": 80,
    "saved": 1200,
    "restored": 120,
    "evicted": 300,
    "stateless": 100,
    "preempted": 100,
    "drafted": 350,
    "accepted": 150,
}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, HISTORIES, BATCH))
def test_any_history_has_the_tokens_of_sequences_alone(first: int) -> None:
    """A third of them with overlapped steps, two fifths without drafts. What they compute is charged or
    named."""
    seen = Counter[str]()
    for seed in range(first, first + BATCH):
        report = (simulate_overlapped if seed % 3 == 0 else simulate)(seed, random_history_of_states(seed))
        assert report.computed_tokens <= report.owed_tokens + report.uncharged_tokens, seed
        states = report.states
        seen["hits"] += report.hit_tokens > 0
        seen["saved"] += states.saved
        seen["restored"] += states.restored
        seen["evicted"] += states.evicted
        seen["stateless"] += states.stateless_tokens
        seen["preempted"] += report.preemptions
        seen["drafted"] += report.drafted
        seen["accepted"] += sum(end.accepted for end in report.ends)
    assert {what: seen[what] for what, least in LEAST.items() if seen[what] < least * BATCH // 200} == {}
