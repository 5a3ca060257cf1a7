"""The host tier: pages that the prefix cache evicts go to host memory, and come back by copy.

`test_simulation` has worlds of it, in which the fake runner checks what every page holds.
"""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import replace

import pytest

from engine.contract.messages import FinishReason, ServiceClass
from engine.core.estimate.cost import StepCost
from engine.core.pages.block_manager import BlockManager, PageChain, PageIdentity
from engine.core.pages.host_pool import HostPool
from engine.core.sequence import Sequence, Status
from engine.core.step.host_tier import HostTier
from tests.core_laws import check_host
from tests.engine.core.harness import COPIES_ARE_CHEAP, Harness, greedy, knowing

HISTORY = list(range(1, 18))
"""Four pages, and a token that must be computed."""


def tiered(**settings: object) -> Harness:
    """A pool of eight pages with a host tier."""
    h = Harness(**{"pages": 8, "host_pages": 16, **settings})  # type: ignore[arg-type]
    knowing(h.scheduler, COPIES_ARE_CHEAP)
    return h


def evict(h: Harness, handle: int) -> None:
    """Compute another prompt that needs the whole pool."""
    h.add(handle, [40] * 30, greedy(1))
    h.run()


def told(h: Harness, handle: int, salt: bytes = b"") -> tuple[int, int]:
    """Compute the history once more; the tokens of it that were cached, and those from host memory."""
    h.add(handle, HISTORY, greedy(2), salt)
    h.run()
    return h.started[handle].cached_len, h.started[handle].host_len


def identity(number: int) -> PageIdentity:
    return PageIdentity(number.to_bytes(32, "little"))


# -- in the scheduler -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_evicted_prefix_comes_back_by_copy(is_kept: bool) -> None:
    h = tiered()
    h.add(1, HISTORY, greedy(2), has_next_turn=is_kept)
    h.run()
    assert h.scheduler.stats().pages_kept == 4 * is_kept
    evict(h, 2)
    assert told(h, 3) == (16, 16)
    h.assert_all_as_solo()
    plan = next(plan for plan in h.plans if plan.swapped_in)
    assert len(plan.swapped_in) == 4
    assert (plan.positions, plan.lengths) == ([16], [1]), "nothing of the prefix is computed"
    stats = h.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_host_tokens, stats.prefix_disk_tokens) == (16, 16, 0)
    assert stats.swaps_in == 0, "no sequence was preempted"
    assert stats.swapped_in_bytes == 4 * h.runner.info.page_bytes
    assert told(h, 4) == (16, 0), "it is on the device again"


def test_a_part_on_the_device_and_the_rest_in_host_memory() -> None:
    h = tiered(pages=10)
    told(h, 1)
    h.add(2, [40] * 30, greedy(1))  # the tail of the history makes room for it
    h.run()
    cached, host = told(h, 3)
    assert cached == 16
    assert 0 < host < 16
    h.assert_all_as_solo()


def test_another_salt_finds_nothing() -> None:
    h = tiered()
    told(h, 1, b"a tenant")
    evict(h, 2)
    assert told(h, 3, b"another") == (0, 0)
    h.assert_all_as_solo()


@pytest.mark.parametrize("settings", [{"host_pages": 0}, {"prefix_cache": False}])
def test_without_a_tier_what_is_evicted_is_lost(settings: dict[str, object]) -> None:
    h = tiered(**settings)
    told(h, 1)
    evict(h, 2)
    assert told(h, 3) == (0, 0)
    assert not any(plan.swapped_out for plan in h.plans)
    h.assert_all_as_solo()


def test_nothing_is_kept_that_is_cheaper_to_compute() -> None:
    h = tiered()
    knowing(h.scheduler, StepCost(token_s=0.001, page_s=0.1))
    told(h, 1)
    evict(h, 2)
    assert told(h, 3) == (0, 0)


def test_beside_a_stream_the_copies_of_one_step_are_bounded() -> None:
    """Half of the target is enough for two pages, so two come back, and the others are computed."""
    h = tiered(pages=12, gap_target_s=0.05)
    knowing(h.scheduler, StepCost(token_s=0.1, page_s=0.01))
    told(h, 1)
    h.add(2, [40] * 46, greedy(1))
    h.run()
    h.add(3, [45] * 4, greedy(20))
    h.steps(2)
    before = len(h.plans)
    assert told(h, 4) == (8, 8)
    h.assert_all_as_solo()
    assert all(len(plan.swapped_in) + len(plan.swapped_out) <= 2 for plan in h.plans[before:])


def test_of_pages_that_are_evicted_together_the_head_of_the_prefix_is_kept() -> None:
    h = tiered(host_pages=2)
    told(h, 1)
    evict(h, 2)
    assert told(h, 3) == (8, 8)
    h.assert_all_as_solo()


# -- preempted sequences --------------------------------------------------------------------------


def pressed(**settings: object) -> Harness:
    """Two sequences grow to five pages each in a pool of six, so that one must be preempted."""
    h = tiered(**{"pages": 6, "host_pages": 8, **settings})
    h.add(1, [1] * 8, greedy(12))
    h.add(2, [2] * 8, greedy(12))
    return h


def first_row(h: Harness, handle: int) -> tuple[int, int]:
    """The position and length of the row with which a sequence was admitted last."""
    found = [
        (plan, start.slot)
        for plan in h.plans
        for start in plan.seated
        if list(start.token_ids[: start.prompt_len]) == list(h.messages[handle].prompt_ids)
    ]
    plan, slot = found[-1]
    row = plan.slots.index(slot)
    return plan.positions[row], plan.lengths[row]


def test_a_preempted_sequence_comes_back_by_copy_and_computes_less_than_a_page_again() -> None:
    h = pressed()
    h.run_as_solo()
    stats = h.scheduler.stats()
    assert (stats.preemptions, stats.swaps_in) == (1, 1)
    assert stats.swapped_out_bytes >= stats.swapped_in_bytes > 0
    assert h.finished[2].preemptions == 1
    assert h.finished[2].preempted_s > 0
    position, length = first_row(h, 2)
    assert (position % 4, position > 8, length <= 4) == (0, True, True)
    assert h.finished[2].again_tokens < 4


def test_a_preempted_sequence_whose_pages_nobody_needs_computes_nothing_again() -> None:
    """It gave them up for a slot's owner of a higher class, which ends before it takes them."""
    h = Harness(pages=64, slots=1)
    h.add(1, [1] * 16, greedy(6), service_class=ServiceClass.FLEX)
    h.steps(2)
    h.add(2, [2] * 12, greedy(2), service_class=ServiceClass.PRIORITY)
    h.run_as_solo()
    assert h.finished[1].preemptions == 1
    assert first_row(h, 1)[1] == 1
    assert h.finished[1].again_tokens == 0


@pytest.mark.parametrize("settings", [{"host_pages": 0}, {"prefix_cache": False}])
def test_without_host_memory_what_others_took_is_computed_again(settings: dict[str, object]) -> None:
    h = pressed(**settings)
    h.run_as_solo()
    stats = h.scheduler.stats()
    assert (stats.preemptions, stats.swaps_in, stats.swapped_out_bytes) == (1, 0, 0)


def test_a_sequence_that_is_aborted_while_it_is_preempted_leaves_a_prefix_in_host_memory() -> None:
    h = pressed()
    while not h.scheduler.stats().host_pages_kept:
        h.step()
    h.abort(2)
    h.run()
    assert h.reason(2) is FinishReason.ABORTED
    assert h.tokens[1] == h.solo(1).tokens
    assert h.scheduler.stats().host_pages_used == 0
    h.add(3, [2] * 8 + h.tokens[2], greedy(1))
    h.run()
    assert h.started[3].host_len > 0


def test_a_stalled_sequence_gives_its_pages_up_before_one_that_runs() -> None:
    h = pressed()
    h.steps(3)
    h.pause(1)
    while not h.scheduler.stats().preemptions:
        h.step()
    assert list(h.scheduler._waiting.queues[Status.PREEMPTED]) == [1]
    h.resume(1)
    h.run_as_solo()
    assert (h.finished[1].preemptions, h.finished[2].preemptions) == (0, 0)


def test_a_prefill_that_is_preempted_in_the_middle_of_its_prompt_goes_on_there() -> None:
    h = Harness(pages=8, host_pages=8, step_tokens_max=8)
    h.add(1, [1] * 26, greedy(4), service_class=ServiceClass.FLEX)
    h.steps(2)
    h.add(2, [2] * 14, greedy(2), service_class=ServiceClass.PRIORITY)
    h.run_as_solo()
    assert h.finished[1].preemptions == 1
    assert first_row(h, 1)[0] == 16


def test_copies_take_their_time_from_the_prompts_of_the_step() -> None:
    """Copies that take longer than the gap target leave one token of the budget."""
    h = pressed(gap_target_s=0.1)
    knowing(h.scheduler, StepCost(token_s=1.0, row_s=0.0, pair_s=0.0, fixed_s=0.0, page_s=0.05))
    h.add(3, [3] * 12, greedy(2))
    h.run_as_solo()
    back = [plan for plan in h.plans if plan.swapped_in]
    assert back
    for plan in back:
        seated = {start.slot for start in plan.seated}
        assert sum(n for slot, n in zip(plan.slots, plan.lengths, strict=True) if slot in seated) == 1


def test_restoring_costs_the_cheaper_of_computing_and_copying_what_is_not_shared() -> None:
    pages = BlockManager(16, 4)
    tier = HostTier(3, pages, math.inf)
    cost = StepCost(token_s=0.001, row_s=0.0, pair_s=0.0, fixed_s=0.0, page_s=0.0005)
    sequence = Sequence(1, greedy(8), 19, array("I", [1] * 19), PageChain(b"", 4), 0.0)
    table = pages.allocate(5)
    for page, own in zip(table, sequence.chain.extend(sequence.tokens, 4), strict=False):
        pages.register(page, own)
    pages.acquire(table[:2])
    sequence.admit(0, table, 18, 0.0)
    assert tier.restore_s(sequence, cost) == pytest.approx(0.003), "three pages, there and back"
    assert tier.restore_s(sequence, replace(cost, page_s=0.01)) == pytest.approx(0.010)
    assert HostTier(2, pages, math.inf).restore_s(sequence, cost) == pytest.approx(0.010)


# -- what is not to be trusted --------------------------------------------------------------------


def test_pages_of_a_numeric_failure_are_forgotten_in_host_memory_too() -> None:
    h = tiered(host_pages=16)
    told(h, 1)
    evict(h, 2)
    kept = h.scheduler.stats().host_pages_kept
    seed = next(s for s in range(0, 10_000, 16) if len(_failing(h, s)) < 2)
    h.add(3, HISTORY, greedy(8, seed=seed))
    h.run()
    h.add(4, HISTORY, greedy(1))
    h.run()
    assert h.started[4].cached_len == 0
    assert kept >= 4


def _failing(h: Harness, seed: int) -> list[int]:
    """The tokens of the history before a numeric failure."""
    from tests.fake_runner import solo

    return solo(HISTORY, greedy(8, seed=seed), h.runner.info.vocab_size).tokens


def test_a_tenant_whose_prompts_never_come_again_takes_no_others_pages() -> None:
    """Its pages go through the device and through host memory, and take each other's room there."""
    h = tiered(pages=8, host_pages=40)
    h.add(1, HISTORY, greedy(2), tenant="stays")
    h.run()
    for turn in range(20):
        h.add(10 + turn, [20 + turn] * 30, greedy(1), tenant="floods")
        h.run()
    h.add(2, HISTORY, greedy(2), tenant="stays")
    h.run()
    assert (h.started[2].cached_len, h.started[2].host_len) == (16, 16)
    h.assert_all_as_solo()


# -- the pool -------------------------------------------------------------------------------------


def test_which_kept_page_makes_room_depends_on_whose_they_are() -> None:
    pool = HostPool(20)
    stays = [pool.keep(identity(number), "stays") for number in range(4)]
    for number in range(100, 160):
        page = pool.keep(identity(number), "floods")
        assert page not in stays
    assert pool.find([identity(number) for number in range(4)]) == 4
    for number in range(1000, 5000):  # who never comes back loses its pages in the end
        pool.keep(identity(number), "floods")
    assert pool.find([identity(0)]) == 0
    check_host(pool)


def test_a_page_that_was_read_from_disk_is_its_tenants() -> None:
    pool = HostPool(20)
    for number in range(2):
        page = pool.lend_empty()
        assert page is not None
        pool.give_back(page, identity(number), "stays")
    for number in range(10, 70):
        pool.keep(identity(number), "floods")
    assert pool.find([identity(0), identity(1)]) == 2


def test_a_page_that_a_thread_reads_is_neither_dropped_nor_overwritten() -> None:
    pool = HostPool(2)
    page = pool.keep(identity(1))
    assert page is not None
    pool.lend(page)
    assert pool.available == 1
    other = pool.keep(identity(2))
    assert other not in (None, page)
    assert pool.keep(identity(3)) == other, "the one that is not lent makes room"
    assert pool.take(identity(1)) == page
    pool.plan_made()
    assert pool.available == 1, "it left, and the thread still reads it"
    pool.give_back(page)
    assert pool.available == 2
    check_host(pool)


def test_a_thread_gets_no_page_that_a_step_in_flight_copies() -> None:
    pool = HostPool(1)
    page = pool.keep(identity(1))
    pool.plan_made(1, [0])
    assert pool.lend_empty() is None
    pool.take(identity(1))
    pool.plan_made(2, [0])
    assert pool.landed(1, [0]) == []
    assert pool.lend_empty() is None
    pool.landed(2, [])
    assert pool.lend_empty() == page
    assert pool.lend_empty() is None
    assert pool.keep(identity(2)) is None, "there is no room"
    pool.give_back(0, identity(3))
    assert pool.is_fetched(identity(3))
    assert pool.find([identity(3), identity(4)]) == 1
    pool.forget([identity(3), identity(4)])
    assert (pool.free, pool.kept, pool.total) == (1, 0, 1)


def test_what_a_thread_wrote_in_vain_is_free() -> None:
    pool = HostPool(2)
    first, second = pool.lend_empty(), pool.lend_empty()
    assert first is not None
    assert second is not None
    pool.give_back(first, identity(1))
    pool.give_back(second, identity(1))
    assert (pool.free, pool.kept) == (1, 1)


def test_any_mixture_leaves_each_page_in_one_place() -> None:
    for seed in range(40):
        _mix(random.Random(seed))


def _mix(rng: random.Random) -> None:
    pool, lent, step = HostPool(rng.randint(1, 8)), list[int](), 0
    for _ in range(120):
        number = identity(rng.randrange(10))
        match rng.randrange(6):
            case 0:
                pool.keep(number)
            case 1:
                pool.take(number)
            case 2:
                step += 1
                pool.plan_made(step, rng.sample(range(pool.total), rng.randint(0, pool.total)))
                pool.landed(step - rng.randrange(2), range(pool.total))
            case 3:
                page = pool._kept.get(number)
                if page is not None and page not in lent:
                    pool.lend(page)
                    lent.append(page)
            case 4 if (page := pool.lend_empty()) is not None:
                lent.append(page)
            case 5 if lent:
                pool.give_back(lent.pop(), rng.choice([None, number]))
        check_host(pool)
