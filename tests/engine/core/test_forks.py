"""Heads that are copied: the choices of a prompt compute it once, and the copies hold what they should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.messages import Plan
from engine.core.queue.policy import OLDEST_EVERY
from tests.effort import drawn
from tests.engine.core.harness import Harness, greedy
from tests.engine.core.test_overlap import Overlapped

PROMPT = list(range(1, 11))


def seed_of(handle: int) -> int:
    """A seed with which the fake model does not fail."""
    return 16 * handle + 1


def computed(h: Harness) -> int:
    return sum(sum(plan.lengths) for plan in h.plans)


def forks(h: Harness) -> list[tuple[int, int, int]]:
    return [fork for plan in h.plans for fork in plan.forked]


def add_choices(h: Harness, n: int, prompt: list[int], max_tokens: int) -> None:
    for handle in range(1, n + 1):
        h.add(handle, prompt, greedy(max_tokens, seed=seed_of(handle)))


@pytest.mark.slow
@settings(max_examples=drawn(20, whole=150), deadline=None)
@given(
    prompt_len=st.integers(1, 40),
    n=st.integers(1, 64),
    max_tokens=st.integers(1, 12),
    page_size=st.sampled_from([1, 2, 4, 8, 16, 64]),
    slots=st.integers(1, 20),
    beyond_slots=st.sampled_from([0, 1, 7, 200]),
    cached_len=st.integers(0, 45),
)
def test_what_the_choices_of_a_prompt_compute_is_what_they_are_charged(
    prompt_len: int,
    n: int,
    max_tokens: int,
    page_size: int,
    slots: int,
    beyond_slots: int,
    cached_len: int,
) -> None:
    """The prompt once, without what was cached, and each output token once. The prompt's last token and the
    first of an output come of one row."""
    h = Harness(pages=2000, page_size=page_size, slots=slots, step_tokens_max=slots + beyond_slots)
    prompt = [7 * i % 50 for i in range(prompt_len)]
    if cached_len:
        h.add(100, (prompt + PROMPT)[:cached_len], greedy(3))
        h.run()
        h.plans.clear()
    add_choices(h, n, prompt, max_tokens)
    h.run_as_solo()
    cached = h.started[1].cached_len
    output = sum(len(h.tokens[handle]) for handle in range(1, n + 1))
    assert computed(h) == prompt_len - cached - 1 + output
    assert all(h.started[handle].cached_len == prompt_len - 1 for handle in range(2, n + 1))


@pytest.mark.parametrize("prompt_len", [1, 2, 63, 64, 65])
def test_sixty_four_choices_with_a_token_for_each_slot(prompt_len: int) -> None:
    h = Harness(pages=128, page_size=64, slots=64, step_tokens_max=64)
    add_choices(h, 64, [3] * prompt_len, 2)
    h.run_as_solo()
    assert computed(h) == prompt_len - 1 + sum(len(tokens) for tokens in h.tokens.values())
    assert len(h.plans) <= 5


def test_a_prompt_that_is_scored_is_computed_once_more_at_most() -> None:
    """By the choice that has its log-probabilities: cached positions have none. The others take it."""
    h = Harness()
    h.add(1, PROMPT, greedy(2, prompt_logprobs=1))
    for handle in (2, 3, 4):
        h.add(handle, PROMPT, greedy(2))
    h.run_as_solo()
    assert [h.started[handle].cached_len for handle in (1, 2, 3, 4)] == [0, 9, 9, 9]


def test_a_head_is_copied_and_never_shared() -> None:
    h = Harness()
    add_choices(h, 3, PROMPT, 6)
    h.steps(2)
    tables = [list(s.pages) for s in h.scheduler._allocator.running.values()]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert len({table[2] for table in tables}) == 3
    assert sorted(forks(h)) == sorted((tables[0][2], table[2], 1) for table in tables[1:])


def test_a_head_is_found_when_its_owner_is_gone() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(1))
    h.run()
    h.add(2, PROMPT, greedy(1))
    h.run()
    assert h.started[2].cached_len == 9
    h.assert_all_as_solo()


def test_heads_are_told_apart_by_what_is_before_them_and_by_salt() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(2))
    h.run()
    h.add(2, [9, *PROMPT[1:]], greedy(2))
    h.add(3, PROMPT, greedy(2), cache_salt=b"other")
    h.add(4, [*PROMPT[:-2], 30, 30], greedy(2))
    h.run_as_solo()
    assert [h.started[handle].cached_len for handle in (2, 3, 4)] == [0, 0, 8]


def test_a_source_that_the_same_plan_evicts_is_copied_first() -> None:
    """Two newcomers take all pages. The first finds a head; the second writes over its source."""
    h = Harness(pages=5)
    h.add(1, PROMPT[:3], greedy(1))
    h.run()
    h.add(2, PROMPT[:3], greedy(2))
    h.add(3, [20] * 14, greedy(2))
    plan = h.step()
    assert plan is not None
    ((source, page, length),) = plan.forked
    assert (length, source != page) == (2, True)
    assert source in dict(plan.grown)[plan.slots[1]]
    h.run_as_solo()


def test_a_source_outlasts_the_plan_where_any_other_page_is_available() -> None:
    """A page with a head alone is the first to be evicted, but not while choices take it."""
    h = Harness(pages=4)
    h.add(1, PROMPT[:3], greedy(1))
    h.run()
    h.add(2, [20] * 12, greedy(1))
    h.run()
    assert h.scheduler.stats().pages_free == 0
    for handle in (3, 4, 5):
        h.add(handle, PROMPT[:3], greedy(1))
    plan = h.step()
    assert plan is not None
    assert len({source for source, _, _ in plan.forked}) == 1
    assert len(plan.forked) == 3
    h.assert_all_as_solo()


def test_a_source_that_is_the_last_page_becomes_the_sequences_own() -> None:
    h = Harness(pages=3)
    h.add(1, PROMPT, greedy(1))
    h.run()
    h.add(2, PROMPT, greedy(3))
    h.add(3, PROMPT, greedy(3))
    plan = h.step()
    assert plan is not None
    ((source, page, length),) = plan.forked
    assert (source, length) == (page, 1)
    h.run_as_solo()
    assert h.started[2].cached_len == 9


def test_in_a_pool_too_small_for_a_copy_beside_its_source_choices_take_turns() -> None:
    h = Harness(pages=3, slots=4)
    add_choices(h, 6, PROMPT, 3)
    h.run_as_solo()
    assert computed(h) == 9 + sum(len(tokens) for tokens in h.tokens.values())


def test_a_choice_that_ends_while_its_copy_is_made_leaves_the_others_alone() -> None:
    h = Overlapped(pages=12)
    h.add(1, PROMPT, greedy(8))
    h.add(2, PROMPT, greedy(8, seed=33))
    h.add(3, PROMPT, greedy(8, seed=49))
    while not h.plans or not h.plans[-1].forked:
        h.launch()
        h.land()
    h.launch()
    copying: Plan = next(plan for plan in h.plans if plan.forked)
    assert len(copying.forked) == 2
    h.abort(2)
    h.run()
    assert [h.tokens[handle] for handle in (1, 3)] == [h.solo(handle).tokens for handle in (1, 3)]


@pytest.mark.parametrize("left", [(1,), (1, 2, 3)])
def test_a_source_whose_owner_ends_while_it_is_copied(left: tuple[int, ...]) -> None:
    """All pages are taken anew by others in the very next plan."""
    h = Overlapped(pages=6)
    add_all = [(1, 9), (2, 33), (3, 49)]
    for handle, seed in add_all:
        h.add(handle, PROMPT[:6], greedy(6, seed=seed))
    h.launch()
    h.land()
    plan = h.launch()
    assert plan is not None
    assert plan.forked
    h.abort(*left)
    h.add(4, [30] * 7, greedy(4))
    h.add(5, [31] * 5, greedy(4))
    h.run()
    for handle in {2, 3, 4, 5} - set(left):
        assert h.tokens[handle] == h.solo(handle).tokens


def test_a_choice_that_fails_takes_its_head_with_it() -> None:
    """What broke it may be in there."""
    h = Harness()
    h.add(1, PROMPT, greedy(40, seed=16))
    h.run()
    assert h.solo(1).reason is h.reason(1)
    assert len(h.tokens[1]) < 40
    h.add(2, PROMPT, greedy(2))
    h.run()
    assert h.started[2].cached_len == 0


def test_the_oldest_has_no_turn_while_another_computes_its_prompt() -> None:
    """It is not computed twice, however many pass meanwhile; and the first place is its own afterwards."""
    h = Harness(pages=400, slots=2, step_tokens_max=3, max_model_len=400)
    h.add(1, [7] * 200, greedy(2))
    h.add(2, [7] * 200, greedy(2))
    for handle in range(3, 3 + 3 * OLDEST_EVERY):
        h.add(handle, [handle % 50], greedy(1))
    h.run_as_solo()
    assert h.started[2].cached_len == 199


def test_a_sequence_that_yields_finds_what_it_computed() -> None:
    h = Harness(slots=2, pages=40)
    h.add(1, PROMPT, greedy(9), tenant="a")
    h.add(2, [20, *PROMPT], greedy(9), tenant="a")
    h.steps(4)
    h.add(3, [30] * 6, greedy(9), tenant="b")
    h.run_as_solo()
    assert sum(end.preemptions for end in h.finished.values()) == 1
    prompts = sum(len(message.prompt_ids) - 1 for message in h.messages.values())
    assert computed(h) == prompts + sum(len(tokens) for tokens in h.tokens.values())
