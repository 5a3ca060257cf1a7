"""Swapping to host memory: the pool, the decision, and which sequences are swapped when.

`test_simulation` shows that copies are right in any mixture.
"""

from __future__ import annotations

import math
from array import array

import pytest

from engine.contract.messages import FinishReason, Plan, ServiceClass
from engine.core.estimate.cost import StepCost
from engine.core.pages.block_manager import BlockManager, PageChain, pages_for
from engine.core.pages.host_pool import HostPool
from engine.core.sequence import Sequence, Status, Swapped
from engine.core.step.swap import COPY_SHARE, Prefix, Restoration, Swapper, if_cheaper
from tests.engine.core.harness import Harness, greedy

SIZE = 4
COST = StepCost(token_s=0.001, row_s=0.0, pair_s=0.0, fixed_s=0.0, page_s=0.0005)


def always(_: Restoration) -> bool:
    return True


def running(manager: BlockManager, computed_len: int, shared: int = 0, handle: int = 1) -> Sequence:
    """A running sequence with one token to compute; another table contains its first `shared` pages."""
    sequence = Sequence(
        handle=handle,
        sampling=greedy(8),
        prompt_len=computed_len + 1,
        tokens=array("I", [handle] * (computed_len + 1)),
        chain=PageChain(b"", SIZE),
        arrived_at=0.0,
    )
    pages = manager.allocate(pages_for(computed_len + 1, SIZE))
    full = computed_len // SIZE
    for page, identity in zip(pages, sequence.chain.extend(sequence.tokens, full)[:full], strict=False):
        manager.register(page, identity)
    manager.acquire(pages[:shared])
    sequence.admit(0, pages, computed_len, 0.0)
    return sequence


# -- the pool -------------------------------------------------------------------------------------


def test_a_host_page_that_a_plan_reads_is_free_once_the_plan_is_made() -> None:
    pool = HostPool(3)
    kept, left = pool.allocate(1), pool.allocate(2)
    pool.release_after_plan(left)
    assert (pool.free, pool.used) == (0, 3)
    pool.check([kept])
    pool.plan_made()
    assert (pool.free, pool.used) == (2, 1)
    pool.check([kept])


@pytest.mark.parametrize("held", [[], [[0], [0]], [[1]], [[0, 1]]])
def test_check_finds_a_host_page_that_is_lost_or_held_twice(held: list[list[int]]) -> None:
    pool = HostPool(2)
    assert pool.allocate(1) == [0]
    pool.check([[0]])
    with pytest.raises(AssertionError, match="host page"):
        pool.check(held)


def test_allocating_more_host_pages_than_are_free_asserts() -> None:
    with pytest.raises(AssertionError):
        HostPool(2).allocate(3)


# -- the decision ---------------------------------------------------------------------------------


def test_swap_and_recomputation_are_estimated_without_shared_pages() -> None:
    manager = BlockManager(16, SIZE)
    swapper = Swapper(16, manager, math.inf)
    restoration = swapper.restoration(running(manager, 18, shared=2), COST)
    assert (restoration.first, restoration.pages) == (2, 3)
    assert restoration.recompute_s == pytest.approx(0.010)
    assert restoration.swap_s == pytest.approx(0.003)
    assert restoration.least_s == restoration.swap_s
    assert if_cheaper(restoration)


@pytest.mark.parametrize(("page_s", "is_swapped"), [(0.0005, True), (0.0019, True), (0.0021, False)])
def test_a_victim_is_swapped_when_that_is_cheaper_than_recomputing(page_s: float, is_swapped: bool) -> None:
    """Sixteen tokens are recomputed in 16 ms; the alternative copies four pages twice."""
    manager = BlockManager(8, SIZE)
    cost = StepCost(token_s=0.001, row_s=0.0, pair_s=0.0, fixed_s=0.0, page_s=page_s)
    swapped = Swapper(8, manager, math.inf).take_out(running(manager, 16), cost)
    assert (swapped is not None) == is_swapped


@pytest.mark.parametrize(
    ("host_pages", "gap_target_s"), [(0, math.inf), (3, math.inf), (8, 0.0039), (8, 0.0)]
)
def test_a_victim_that_does_not_fit_or_copies_too_long_is_recomputed(
    host_pages: int, gap_target_s: float
) -> None:
    manager = BlockManager(8, SIZE)
    sequence = running(manager, 16)
    assert Swapper(8, manager, 0.0041, always).take_out(sequence, COST) is not None, (
        "half of the target is enough"
    )
    swapper = Swapper(host_pages, manager, gap_target_s, always)
    assert swapper.restoration(sequence, COST).swap_s == math.inf
    assert swapper.take_out(sequence, COST) is None
    swapper.host.check([])
    assert COPY_SHARE == 0.5


def test_the_copies_of_one_step_are_bounded_together() -> None:
    manager = BlockManager(16, SIZE)
    swapper = Swapper(16, manager, 2 * 5 * COST.page_s, always)
    assert swapper.take_out(running(manager, 12), COST) is not None
    assert swapper.take_out(running(manager, 12, handle=2), COST) is None
    swapper.take_copies()
    assert swapper.take_out(running(manager, 12, handle=3), COST) is not None


def test_a_victim_without_computed_tokens_is_not_swapped() -> None:
    manager = BlockManager(8, SIZE)
    assert Swapper(8, manager, math.inf, always).take_out(running(manager, 0), COST) is None


@pytest.mark.parametrize(
    ("found", "host_pages", "computed_len"),
    [
        ([], [], 0),  # the shared page is gone: the pages behind it are useless
        ([7], [20, 21, 22], 15),  # the shared page is still cached
        ([7, 8], [21, 22], 15),  # and so is one of the copied pages
        ([7, 8, 9], [22], 15),
        ([7, 8, 9, 10], [], 16),  # another sequence has computed more meanwhile
    ],
)
def test_only_pages_that_the_prefix_cache_lacks_are_copied_back(
    found: list[int], host_pages: list[int], computed_len: int
) -> None:
    manager = BlockManager(8, SIZE)
    sequence = running(manager, 15)
    sequence.preempt(1.0, Swapped(1, [20, 21, 22], 15))
    prefix = Swapper(8, manager, math.inf).prefix(sequence, found)
    assert prefix == Prefix(found, host_pages, computed_len)


# -- in the scheduler -----------------------------------------------------------------------------


def pressed(**settings: object) -> Harness:
    """Two sequences grow to five pages each in a pool of six, so that one must be preempted."""
    h = Harness(**{"pages": 6, "host_pages": 8, "prefers_swap": always, **settings})  # type: ignore[arg-type]
    h.add(1, [1] * 8, greedy(12))
    h.add(2, [2] * 8, greedy(12))
    return h


def plan_of(h: Harness, column: str) -> Plan:
    return next(plan for plan in h.plans if getattr(plan, column))


def test_a_swapped_sequence_resumes_without_recomputation() -> None:
    h = pressed()
    h.run()
    h.assert_all_as_solo()
    stats = h.scheduler.stats()
    assert (stats.preemptions, stats.swaps_out, stats.swaps_in) == (1, 1, 1)
    assert stats.swapped_out_bytes == 3 * h.runner.info.page_bytes
    assert h.finished[2].preemptions == 1
    assert h.finished[2].preempted_s > 0
    back = plan_of(h, "swapped_in")
    row = back.slots.index(back.seated[0].slot)
    assert (back.positions[row], back.lengths[row]) == (12, 1), "nothing is computed twice"


def test_without_host_memory_a_preempted_sequence_is_recomputed() -> None:
    h = pressed(host_pages=0)
    h.run()
    h.assert_all_as_solo()
    stats = h.scheduler.stats()
    assert (stats.preemptions, stats.swaps_out) == (1, 0)


def test_abort_of_a_swapped_sequence_frees_its_host_pages() -> None:
    h = pressed()
    h.add(3, [3] * 2, greedy(1))
    while not h.scheduler.stats().host_pages_used:
        h.step()
    h.abort(2)
    h.run()
    assert h.reason(2) is FinishReason.ABORTED
    assert h.scheduler.stats().host_pages_used == 0
    assert h.tokens[1] == h.solo(1).tokens


def test_a_sequence_preempted_for_a_higher_class_is_swapped() -> None:
    h = Harness(pages=6, host_pages=8, prefers_swap=always, slots=2)
    h.add(1, [1] * 16, greedy(6), service_class=ServiceClass.FLEX)
    h.steps(2)
    h.add(2, [2] * 12, greedy(2), service_class=ServiceClass.PRIORITY)
    h.run()
    h.assert_all_as_solo()
    assert h.scheduler.stats().swaps_out == 1
    assert h.finished[1].preemptions == 1


def test_a_stalled_sequence_is_swapped_before_one_that_runs() -> None:
    h = pressed()
    h.steps(3)
    h.pause(1)
    while not h.scheduler.stats().host_pages_used:
        h.step()
    assert [s.handle for s in h.scheduler._waiting.queues[Status.SWAPPED].values()] == [1]
    h.resume(1)
    h.run()
    h.assert_all_as_solo()
    assert (h.finished[1].preemptions, h.finished[2].preemptions) == (0, 0)


def test_a_prefill_is_swapped_in_the_middle_of_its_prompt() -> None:
    h = Harness(pages=8, host_pages=8, prefers_swap=always, step_tokens_max=8)
    h.add(1, [1] * 26, greedy(4), service_class=ServiceClass.FLEX)
    h.steps(2)
    h.add(2, [2] * 14, greedy(2), service_class=ServiceClass.PRIORITY)
    h.run()
    h.assert_all_as_solo()
    out = plan_of(h, "swapped_out")
    assert len(out.swapped_out) == 4, "sixteen tokens, of pages for twenty-six"


def test_copies_take_their_time_from_the_prompts_of_the_step() -> None:
    """Copies that take longer than the gap target leave one token of the budget."""
    h = pressed(gap_target_s=0.1)
    h.scheduler._learner._cost = StepCost(token_s=0.001, row_s=0.0, pair_s=0.0, fixed_s=0.0, page_s=0.1)
    h.scheduler._learner.observe = lambda work, seconds: 0.0  # type: ignore[method-assign]
    h.add(3, [3] * 12, greedy(2))
    h.run()
    h.assert_all_as_solo()
    for plan in h.plans:
        if plan.swapped_in:
            seated = {start.slot for start in plan.seated}
            assert sum(n for slot, n in zip(plan.slots, plan.lengths, strict=True) if slot in seated) == 1
