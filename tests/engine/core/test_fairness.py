"""Fairness between tenants, which share the slots (rule J in `engine.core.step.victims`)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.messages import FinishReason, ServiceClass
from engine.core.queue.policy import DISPLACED
from engine.core.queue.tenants import TenantHoldings
from engine.core.sequence import Sequence, Status
from engine.core.step import victims
from engine.core.step.allocator import Allocator
from engine.core.step.planner import PASSED_MAX
from tests.bench.engine.core_window import due, holdings
from tests.effort import drawn, some
from tests.engine.core.harness import Harness, greedy
from tests.engine.core.sequences import PRIORITY, sequence
from tests.overlapped import OverlappedSimulation
from tests.worlds import SimConfig

LONG = 200


def flooded(
    count: int = 8, *, slots: int = 8, pages: int = 1024, answer_len: int = LONG, **fields: object
) -> Harness:
    """A harness in which one tenant holds every slot, for long answers."""
    h = Harness(slots=slots, max_model_len=512, pages=pages, **fields)  # type: ignore[arg-type]
    for handle in range(1, count + 1):
        h.add(handle, [handle % 50] * 4, greedy(answer_len), tenant="flood")
    h.steps(2)
    return h


def statuses(h: Harness) -> dict[int, Status]:
    """The statuses of the flood's sequences that ran and wait."""
    queues = h.scheduler._waiting.queues
    return {handle: status for status in (*DISPLACED, Status.STALLED) for handle in sorted(queues[status])}


def yields(h: Harness) -> list[int]:
    """The handles of waiting sequences that yielded their slots."""
    return sorted(s.handle for s in due(h.scheduler) if s.yields)


@pytest.mark.parametrize("flood", some([8, 64], usual=1))
def test_fairness_preempts_for_a_new_tenant_at_the_next_plan_when_another_holds_all_slots(flood: int) -> None:
    """The tenant's last arrival is the victim, and no tokens change."""
    h = flooded(flood)
    h.add(100, [40] * 4, greedy(3), tenant="victim")
    h.step()
    assert 100 in h.started
    assert yields(h) == [8]
    h.run_as_solo()


def test_fairness_gives_two_tenants_half_of_the_slots_each_and_no_slot_goes_back() -> None:
    h = flooded(16)
    for handle in range(100, 116):
        h.add(handle, [handle % 50] * 4, greedy(LONG), tenant="other")
    h.steps(30)
    assert holdings(h.scheduler).slots == {"flood": 4, "other": 4}
    assert len(yields(h)) == 4
    h.steps(50)
    assert h.scheduler.stats().preemptions == 4
    h.run_as_solo()


def test_fairness_counts_pages_like_slots() -> None:
    """One tenant has a long context that holds more than half of the pages."""
    h = Harness(slots=8, pages=40, step_tokens_max=200)
    h.add(1, [1] * 40, greedy(40), tenant="long")
    h.add(2, [2] * 72, greedy(40), tenant="long")
    h.steps(2)
    for handle in range(10, 14):
        h.add(handle, [handle % 50] * 12, greedy(12), tenant="short")
        h.step()
    assert yields(h) == [2]
    assert holdings(h.scheduler).slots["short"] == 4
    h.run_as_solo()


def test_fairness_never_preempts_the_oldest_sequence_of_a_tenant() -> None:
    h = Harness(slots=3, pages=1024, max_model_len=512)
    for handle, tenant in enumerate("abc", start=1):
        h.add(handle, [handle % 50] * 4, greedy(LONG), tenant=tenant)
    h.steps(2)
    h.add(9, [9] * 4, greedy(2), tenant="d")
    h.steps(20)
    assert 9 not in h.started
    assert not yields(h)


def test_fairness_preempts_no_higher_class_for_a_lower_one() -> None:
    h = Harness(slots=4, pages=1024, max_model_len=512)
    for handle in range(1, 5):
        h.add(handle, [handle % 50] * 4, greedy(LONG), tenant="flood", service_class=PRIORITY)
    h.steps(2)
    h.add(9, [9] * 4, greedy(2), tenant="victim")
    h.steps(20)
    assert 9 not in h.started


def test_fairness_preempts_protected_sequences_and_a_yield_protects_none() -> None:
    """Otherwise a tenant with only protected sequences could keep every slot."""
    h = flooded(2, slots=2, preemptions_max=1)
    for handle in range(10, 14):
        h.add(handle, [handle % 50] * 4, greedy(2), tenant="victim")
        h.steps(20)
        assert handle in h.finished
    h.add(20, [20] * 4, greedy(2), tenant="flood", service_class=PRIORITY)
    h.steps(4)  # the last of the flood is preempted once for a higher class, and is protected
    assert 20 in h.finished
    h.steps(20)
    h.add(30, [30] * 4, greedy(2), tenant="victim")
    h.steps(20)
    assert 30 in h.finished
    h.run_as_solo()
    assert h.finished[2].preemptions == 6


def test_a_decode_preempts_a_sequence_of_the_tenant_that_holds_most() -> None:
    """The last arrival is the other tenant's, and is spared."""
    h = Harness(slots=4, pages=12)
    for handle in range(1, 4):
        h.add(handle, [handle % 50] * 12, greedy(12), tenant="flood")
    h.step()
    h.add(9, [9] * 8, greedy(12), tenant="victim")
    while not h.scheduler.stats().preemptions:
        h.step()
    assert {s.tenant for s in due(h.scheduler)} == {"flood"}
    h.run_as_solo()
    assert h.finished[9].preemptions == 0


def test_yields_whose_pages_were_taken_are_paid_for_by_time_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None follows until the sequence could have been restored, but for what may be ahead."""
    monkeypatch.setattr("engine.core.step.allocator.YIELDS_AHEAD_S", 0.0)
    h = flooded(pages=36, answer_len=60)
    while h.scheduler.stats().pages_owned < 32:
        h.step()
    h.add(100, [40] * 24, greedy(60), tenant="b")
    h.now, at = 150.0, 150.0
    h.step()
    assert yields(h) == [8]
    assert statuses(h) == {8: Status.PREEMPTED}
    h.add(101, [41] * 4, greedy(60), tenant="c")
    h.now = at
    h.step()
    assert yields(h) == [8]
    h.now = at + 60.0
    assert h.plan() is not None
    assert yields(h) == [7, 8]


def test_pages_that_are_taken_from_several_at_once_are_paid_for_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.core.step.allocator.YIELDS_AHEAD_S", 0.0)
    monkeypatch.setattr(Allocator, "_restore_s", lambda self, victim: 10.0)
    h = flooded(3, slots=3, pages=64)
    h.steps(12)
    for handle, tenant in ((100, "b"), (101, "c")):
        h.add(handle, [handle % 50] * 4, greedy(2), tenant=tenant)
    h.step()
    assert statuses(h) == dict.fromkeys((2, 3), Status.YIELDED)
    h.pause(2, 3)
    h.steps(5)
    free = 64 - h.scheduler.stats().pages_owned
    h.now = 150.0
    h.add(102, [42] * 4 * (free + 6), greedy(2), tenant="d")  # 2 and 3 have 4 pages each
    h.step()
    assert statuses(h) == dict.fromkeys((2, 3), Status.PREEMPTED)
    h.resume(2, 3)
    h.steps(10)
    assert h.scheduler.stats().running == 3
    told = h.scheduler.stats().yields
    h.add(103, [43] * 4, greedy(2), tenant="e")
    h.now = 165.0
    h.step()
    assert h.scheduler.stats().yields == told
    h.now = 170.0
    h.step()
    assert h.scheduler.stats().yields == told + 1


@pytest.mark.parametrize("host_pages", [0, 1024])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_yield_for_a_slot_alone_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, host_pages: int, prefix_cache: bool
) -> None:
    """The sequence keeps its pages: none are copied, no token is computed again, no other yield waits."""
    monkeypatch.setattr("engine.core.step.allocator.YIELDS_AHEAD_S", 0.0)
    h = flooded(prefix_cache=prefix_cache, host_pages=host_pages)
    h.steps(20)
    for handle, tenant in ((100, "b"), (101, "c"), (102, "d")):
        h.add(handle, [handle % 50] * 4, greedy(3), tenant=tenant)
    h.step()
    assert statuses(h) == dict.fromkeys((6, 7, 8), Status.YIELDED)
    before = len(h.plans)
    h.run_as_solo()
    again = {start.slot: plan for plan in h.plans[before:] for start in plan.seated}
    assert len(again) == 3
    for slot, plan in again.items():
        assert plan.lengths[plan.slots.index(slot)] == 1
    assert not any(plan.swapped_out or plan.swapped_in for plan in h.plans)
    assert [h.finished[handle].preemptions for handle in (5, 6, 7, 8)] == [0, 1, 1, 1]
    assert h.finished[8].preempted_s > 0


@pytest.mark.parametrize("host_pages", [0, 64])
def test_what_yielded_loses_its_pages_before_any_that_runs_does(host_pages: int) -> None:
    h = flooded(3, slots=3, pages=20, answer_len=50, host_pages=host_pages)
    h.steps(12)
    h.add(100, [40] * 4, greedy(40), tenant="victim")
    h.step()
    assert statuses(h) == {3: Status.YIELDED}
    while statuses(h) == {3: Status.YIELDED}:
        h.step()
    assert statuses(h) == {3: Status.PREEMPTED}
    stats = h.scheduler.stats()
    assert (stats.preemptions, stats.yields) == (2, 1)
    h.run_as_solo()


def test_what_yielded_and_is_aborted_or_paused_holds_nothing_that_others_need() -> None:
    h = flooded(3, slots=3, pages=20, answer_len=50)
    h.steps(12)
    h.add(100, [40] * 4, greedy(2), tenant="b")
    h.add(101, [41] * 4, greedy(2), tenant="c")
    h.step()
    assert statuses(h) == dict.fromkeys((2, 3), Status.YIELDED)
    h.abort(3)
    h.pause(2)
    h.steps(10)
    assert statuses(h) == {2: Status.YIELDED}
    h.add(102, [42] * 40, greedy(2), tenant="d")
    h.steps(20)
    assert 102 in h.finished
    h.resume(2)
    h.run()
    assert h.reason(3) is FinishReason.ABORTED
    assert h.tokens[2] == h.solo(2).tokens


def test_newcomers_that_come_together_need_not_wait_for_each_others_yields() -> None:
    h = flooded()
    while h.scheduler.stats().running < 8:
        h.step()
    for handle, tenant in ((100, "b"), (101, "c"), (102, "d")):
        h.add(handle, [handle % 50] * 4, greedy(LONG), tenant=tenant)
    h.now = 150.0
    h.step()
    assert yields(h) == [6, 7, 8]


def test_a_sequence_that_waits_for_its_own_tenant_blocks_no_other_tenant() -> None:
    """In its turn as the oldest its own tenant's sequences keep pages for it, and the turn goes on to the
    next tenant."""
    h = Harness(pages=30, slots=8, step_tokens_max=128)
    h.add(1, [1] * 36, greedy(36), tenant="flood")
    h.step()
    h.add(2, [2] * 88, greedy(4), tenant="flood")  # does not fit beside the first
    for handle in range(10, 45):
        h.add(handle, [handle % 50] * 4, greedy(3), tenant="victim")
        h.steps(1)
        assert handle in h.started
    assert 2 not in h.started
    h.run_as_solo()


def test_sequences_that_wait_for_a_common_prefix_end_the_admissions_of_their_tenant_only() -> None:
    h = Harness(slots=64, pages=512, step_tokens_max=128, queue_len_max=100)
    prompt = list(range(40))
    for handle in range(1, PASSED_MAX + 20):
        h.add(handle, prompt, greedy(2), tenant="flood")
    for handle in range(100, 104):
        h.add(handle, [handle % 50] * 39, greedy(2), tenant="victim")
    h.step()
    assert [handle for handle in h.started if handle >= 100]


def test_a_sequence_yields_its_slot_only_when_no_step_is_in_flight() -> None:
    """With overlapped steps rule I holds for yields, too; the runner asserts it."""
    config = SimConfig(classes=2, tenants=3, pages=24, arrival_gap_s=0.002, requests=40)
    total = sum(
        OverlappedSimulation(random.Random(seed), config).run().yields for seed in range(drawn(1, whole=3))
    )
    assert total > drawn(3, whole=10)


# -- the choice of victims -----------------------------------------------------------------------------

running_of = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(ServiceClass), st.integers(1, 9)),
    min_size=1,
    max_size=8,
)


@given(running_of, st.sampled_from("abc"), st.sampled_from(ServiceClass))
def test_every_yield_brings_two_tenants_nearer(
    those: list[tuple[str, ServiceClass, int]], tenant: str, service_class: ServiceClass
) -> None:
    """However many of the list are preempted, the newcomer's tenant then holds less than the last victim's
    did before, and the oldest sequence of every tenant keeps running."""
    running = []
    holdings = TenantHoldings(slots=8, pages=80)
    for handle, (other, its_class, pages) in enumerate(those):
        running.append(seq := sequence(handle, float(handle), tenant=other, service_class=its_class))
        seq.admit(handle, list(range(pages)), 0, 10.0)
        holdings.add(other, slots=1, pages=pages)
    newcomer = sequence(99, 50.0, tenant=tenant, service_class=service_class)
    will_hold = holdings.share(tenant, slots=1, pages=3)
    ordered = victims.by_expendability(
        victims.may_yield(running, newcomer), lambda _: 0.1, holdings, above=will_hold
    )
    assert len(set(ordered)) == len(ordered)
    for victim in ordered:
        assert victim.tenant != tenant
        assert victim.service_class <= service_class
        assert holdings.share(victim.tenant) > will_hold
        holdings.add(victim.tenant, slots=-1, pages=-len(victim.pages))
    assert tenants_of(running) == tenants_of(seq for seq in running if seq not in ordered)


def tenants_of(sequences: object) -> set[str]:
    return {seq.tenant for seq in sequences}  # type: ignore[attr-defined]


def test_the_tenant_that_holds_most_slots_or_pages_is_preempted_first() -> None:
    holdings = TenantHoldings(slots=10, pages=100)
    running: list[Sequence] = []
    for handle, (tenant, pages) in enumerate([("slots", 1)] * 4 + [("pages", 30)] * 2 + [("little", 5)] * 2):
        running.append(seq := sequence(handle, float(handle), tenant=tenant))
        seq.admit(handle, list(range(pages)), 0, 10.0)
        holdings.add(tenant, slots=1, pages=pages)
    ordered = victims.by_expendability(running, lambda _: 0.1, holdings)
    assert [seq.tenant for seq in ordered[:4]] == ["pages", "slots", "pages", "slots"]
    assert Counter(seq.tenant for seq in ordered) == Counter(seq.tenant for seq in running)
