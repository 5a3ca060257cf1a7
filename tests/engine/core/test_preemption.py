"""Preemption: which sequence is a victim, for which other, how often, and what that costs it."""

from __future__ import annotations

import pytest

from engine.core.queue.policy import FIFO
from tests.engine.core.harness import Harness, greedy
from tests.engine.core.sequences import DEFAULT, FLEX, PRIORITY


def test_the_younger_sequence_is_preempted_and_no_token_changes() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    h.run_as_solo()
    assert (h.finished[1].preemptions, h.finished[2].preemptions) == (0, 1)
    assert h.finished[2].preempted_s > 0


def test_a_preempted_sequence_finds_its_own_prefix_again() -> None:
    h = Harness(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    h.run()
    again = next(start for plan in h.plans[1:] for start in plan.seated)
    assert again.prompt_len == 8
    assert len(again.token_ids) > 8, "prompt and output so far"
    row = next(plan for plan in h.plans[1:] if plan.seated)
    position = row.positions[row.slots.index(again.slot)]
    assert position > 0, "some of it was still cached"
    assert h.finished[2].again_tokens == len(again.token_ids) - 1 - position, (
        "its newest was not computed yet"
    )
    assert h.finished[1].again_tokens == 0


def test_a_preempted_sequence_is_admitted_before_newcomers() -> None:
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
    h.run_as_solo()


def test_prompt_logprobs_are_sent_once_by_a_preempted_prefill() -> None:
    """A prefill is preempted after its first chunk; its second admission has a prefix hit."""
    h = Harness(pages=10, step_tokens_max=8)
    h.add(1, [1] * 20, greedy(16))
    h.steps(2)
    h.add(2, list(range(2, 22)), greedy(2, prompt_logprobs=1))
    h.run_as_solo()
    assert h.finished[2].preemptions >= 1
    assert len(h.prompt_logprobs[2]) == 19
    admissions = [(plan, start) for plan in h.plans for start in plan.seated if start.token_ids[0] == 2]
    assert len(admissions) >= 2
    plan, start = admissions[-1]
    assert plan.positions[plan.slots.index(start.slot)] > 0


@pytest.mark.parametrize("preemptions_max", [1, 3])
def test_preemptions_of_one_sequence_are_bounded(preemptions_max: int) -> None:
    h = Harness(pages=12, slots=6, step_tokens_max=32, preemptions_max=preemptions_max)
    for handle in range(1, 41):
        h.add(handle, [handle] * 5, greedy(30, seed=3))
    h.run_as_solo()
    counts = [finished.preemptions for finished in h.finished.values()]
    assert max(counts) == preemptions_max, "there was pressure, and it stopped at the bound"


def test_beside_a_protected_sequence_none_is_admitted_that_could_preempt_it() -> None:
    h = Harness(pages=8, preemptions_max=1, discipline=FIFO)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while 1 not in h.finished:
        h.step()
    h.step()
    assert h.finished.keys() == {1}
    assert h.scheduler.stats().running == 1, "the second is back, protected, and may grow to 7 pages"
    h.add(3, [3] * 4, greedy(8))  # 3 pages at most
    h.add(4, [4], greedy(3))  # 1 page: it would fit, and may not pass
    h.step()
    assert h.scheduler.stats().pages_free + h.scheduler.stats().pages_cached >= 1
    assert h.started.keys() == {1, 2}
    h.run_as_solo()


def test_beside_a_protected_sequence_one_that_fits_to_its_end_is_admitted() -> None:
    h = Harness(pages=8, preemptions_max=1)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while 1 not in h.finished:
        h.step()
    h.add(3, [3], greedy(4))  # 1 page at most
    h.step()
    assert h.started.keys() == {1, 2, 3}
    h.run_as_solo()
    assert h.finished[2].preemptions == 1


def test_the_watermark_holds_admissions_back_while_a_sequence_runs() -> None:
    h = Harness(pages=8, watermark=0.25, discipline=FIFO)
    h.add(1, [1] * 12, greedy(2))
    h.add(2, [2] * 13, greedy(2))  # 4 of the 5 pages left, 2 must remain
    h.add(3, [3], greedy(2))
    h.step()
    assert h.started.keys() == {1}, "and none overtakes it"
    h.run_as_solo()


def test_no_newcomer_takes_the_pages_that_a_preempted_sequence_released() -> None:
    h = Harness(pages=8, slots=2, discipline=FIFO)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    h.add(3, [3], greedy(1))
    while not h.scheduler.stats().preemptions:
        plan = h.step()
    assert plan is not None
    assert (plan.left, plan.seated) == ([1], [])
    h.run_as_solo()


def test_the_pages_of_one_victim_serve_several_sequences() -> None:
    h = Harness(pages=6)
    for handle in (1, 2, 3):
        h.add(handle, [handle] * 8, greedy(3))
    h.steps(2)  # all three need a third page; the two of the last serve the others
    assert h.scheduler.stats().preemptions == 1
    assert h.scheduler.stats().running == 2
    h.run_as_solo()


def test_a_sequence_that_needs_a_page_is_preempted_itself_when_most_expendable() -> None:
    h = Harness(pages=7)
    h.add(1, [1] * 13, greedy(8))
    h.add(2, [2] * 10, greedy(8))
    h.run_as_solo()
    assert (h.finished[1].preemptions, h.finished[2].preemptions) == (0, 1)


# -- for a higher class ---------------------------------------------------------------------------


def test_a_higher_class_preempts_a_lower_one_for_pages_and_no_token_changes() -> None:
    h = Harness(pages=8, slots=4)
    h.add(1, [1] * 12, greedy(16), service_class=FLEX)
    h.add(2, [2] * 12, greedy(8))
    h.step()
    h.add(3, [3] * 12, greedy(4), service_class=PRIORITY)
    h.step()
    assert 3 in h.started, "the lowest class gave way at once"
    h.run_as_solo()
    assert h.finished[1].preemptions >= 1
    assert h.finished[3].preemptions == 0


def test_a_higher_class_preempts_a_lower_one_for_a_slot() -> None:
    h = Harness(slots=2)
    h.add(1, [1] * 4, greedy(16))
    h.add(2, [2] * 4, greedy(16), service_class=FLEX)
    h.steps(3)
    h.add(3, [3] * 4, greedy(16))
    h.step()
    assert 3 in h.started
    h.run_as_solo()
    assert [h.finished[handle].preemptions for handle in (1, 2, 3)] == [0, 1, 0]


def test_an_equal_class_preempts_none() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(16), service_class=PRIORITY)
    h.step()
    h.add(2, [2] * 4, greedy(2), service_class=PRIORITY)
    h.run_as_solo()
    assert h.finished[1].preemptions == 0


def test_none_is_preempted_for_a_sequence_that_would_not_fit_all_the_same() -> None:
    h = Harness(pages=11)
    h.add(1, [1] * 24, greedy(8))
    h.add(2, [2] * 4, greedy(8), service_class=FLEX)
    h.steps(2)
    h.add(3, [3] * 24, greedy(2), service_class=DEFAULT)
    h.steps(2)
    assert 3 not in h.started
    h.run_as_solo()
    assert h.finished[2].preemptions == 0


def test_as_few_victims_as_possible_are_preempted() -> None:
    h = Harness(pages=12, discipline=FIFO)
    h.add(1, [1] * 4, greedy(8), service_class=FLEX)
    h.add(2, [2] * 20, greedy(8), service_class=FLEX)
    h.add(3, [3] * 8, greedy(8), service_class=FLEX)
    h.step()
    h.add(4, [4] * 28, greedy(1))
    h.step()
    assert 4 in h.started
    assert h.plans[-1].left == [1], "one large one, and not two small ones beside"
    h.run_as_solo()


def test_a_protected_sequence_is_preempted_for_no_class() -> None:
    h = Harness(slots=1, preemptions_max=2)
    h.add(1, [1] * 4, greedy(40), service_class=FLEX)
    for handle in range(2, 8):
        h.steps(4)  # enough for the one before to end, and for the first to be admitted again
        h.add(handle, [handle] * 4, greedy(2), service_class=PRIORITY)
    h.run_as_solo()
    assert h.finished[1].preemptions == 2
