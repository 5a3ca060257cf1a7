"""The order of service: short prompts first, and a turn for the oldest, so that no sequence starves."""

from __future__ import annotations

import pytest

from engine.contract.messages import ServiceClass
from engine.core.queue.policy import OLDEST_EVERY
from tests.engine.core.harness import STEP_S, Harness, greedy
from tests.engine.core.sequences import DEFAULT, FLEX, PRIORITY


@pytest.mark.parametrize("oldest_class", [FLEX, DEFAULT])
def test_the_oldest_sequence_has_its_turn_and_never_starves(oldest_class: ServiceClass) -> None:
    """One slot, a long prompt of a low class, and an endless stream of short ones of the highest."""
    h = Harness(slots=1, pages=64, step_tokens_max=64)
    h.add(1, [1] * 60, greedy(1), service_class=oldest_class)
    h.add(2, [2], greedy(1), service_class=PRIORITY)
    for handle in range(3, 40):
        h.add(handle, [handle], greedy(1), service_class=PRIORITY)
        h.step()
        if 1 in h.started:
            break
    assert len(h.started) == OLDEST_EVERY


def test_in_the_turn_of_the_oldest_pages_are_kept_for_it() -> None:
    h = Harness(pages=16, slots=4)
    h.add(100, [9] * 24, greedy(24))
    h.step()
    h.add(1, [1] * 44, greedy(1), service_class=FLEX)  # needs 11 pages, beside at least 6 of the first
    for handle in range(2, 22):
        h.add(handle, [handle], greedy(1), service_class=PRIORITY)
        h.step()
    assert 100 not in h.finished
    assert list(h.started) == [100, *range(2, 2 + OLDEST_EVERY - 1)]
    h.run_as_solo()


@pytest.mark.parametrize("leaves", ["aborted", "paused"])
def test_the_turn_of_one_that_leaves_is_the_next_of_its_tenants(leaves: str) -> None:
    """The first of two long prompts has its turn, and does not fit beside what its tenant runs; the turn goes
    on to another tenant. Then it leaves, and nothing of its tenant passes the second, either."""
    h = Harness(pages=16, slots=4)
    h.add(100, [9] * 24, greedy(24), tenant="a")
    h.step()
    for handle in (1, 2):
        h.add(handle, [handle] * 44, greedy(1), service_class=FLEX, tenant="a")
    for handle in range(3, 3 + OLDEST_EVERY):
        h.add(handle, [handle], greedy(1), service_class=PRIORITY, tenant="b")
        h.step()
    assert [*h.started] == [100, *range(3, 3 + OLDEST_EVERY)]
    if leaves == "aborted":
        h.scheduler.abort([1], h.now)
    else:
        h.scheduler.pause([1], h.now)
    for handle in range(200, 205):
        h.add(handle, [handle % 50], greedy(1), service_class=PRIORITY, tenant="a")
        h.step()
    assert 100 not in h.finished
    assert [*h.started] == [100, *range(3, 3 + OLDEST_EVERY)], "another of its tenant's goes first"
    h.scheduler.abort([1], h.now)
    h.run()
    assert list(h.started).index(2) < list(h.started).index(200)


def test_the_rate_of_prefill_is_learned_from_the_steps() -> None:
    """The step of the first prompt was slow for its length, which lets the short prompt pass the long one."""
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
    assert h.plans[-1].lengths == [4, 12], "the rest of the step is the long prompt's"
    h.run_as_solo()


def test_a_long_prompt_that_has_begun_gets_a_chunk_in_every_step() -> None:
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
    h.run_as_solo()
