from __future__ import annotations

import math

import pytest

from engine.core.deadlines import SLACK, Deadlines
from engine.core.messages import FinishReason, ServiceClass
from tests.engine.core.harness import STEP_S, Harness, greedy

QUEUE, TOTAL = FinishReason.QUEUE_TIMEOUT, FinishReason.TIMEOUT


def test_they_come_in_order_and_only_for_those_who_live() -> None:
    living = {1, 2, 3}
    deadlines = Deadlines(living)
    for at, handle in ((5.0, 1), (3.0, 2), (4.0, 3)):
        deadlines.add(at, handle, TOTAL)
    assert deadlines.next_at == 3.0
    living.discard(2)
    assert deadlines.next_at == 4.0
    assert list(deadlines.passed(4.0)) == [(3, TOTAL)]
    assert list(deadlines.passed(4.9)) == []
    assert list(deadlines.passed(5.0)) == [(1, TOTAL)]
    assert deadlines.next_at == math.inf


def test_the_dead_do_not_pile_up() -> None:
    living = {0}
    deadlines = Deadlines(living)
    deadlines.add(1e9, 0, TOTAL)
    for handle in range(1, 10_000):
        deadlines.add(1e6, handle, TOTAL)
    assert len(deadlines._heap) <= SLACK + 3


def test_who_waits_too_long_for_its_admission_ends_and_who_was_admitted_does_not() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(20), queue_timeout_s=3 * STEP_S)
    h.add(2, [2] * 4, greedy(20), queue_timeout_s=3 * STEP_S)
    h.run()
    assert (h.reason(1), h.reason(2)) == (FinishReason.LENGTH, QUEUE)
    assert h.finished[2].queue_s == pytest.approx(3 * STEP_S)
    assert h.tokens[2] == []


@pytest.mark.parametrize("pauses", [False, True])
def test_whatever_it_does_it_ends_at_its_own_bound(pauses: bool) -> None:
    h = Harness()
    h.add(1, [1] * 4, greedy(50), timeout_s=5 * STEP_S)
    h.steps(3)
    if pauses:
        h.pause(1)
        assert h.scheduler.idle_s(h.now) == pytest.approx(2 * STEP_S)
        h.now += 2 * STEP_S
        h.step()
    h.run()
    assert h.reason(1) is TOTAL
    assert h.tokens[1] == h.solo(1).tokens[: len(h.tokens[1])]
    assert h.scheduler.stats().pages_owned == 0


def test_a_preempted_sequence_is_not_in_the_queue_for_the_first_time() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(6), queue_timeout_s=2 * STEP_S, service_class=ServiceClass.FLEX)
    h.step()
    h.add(2, [2] * 4, greedy(6), service_class=ServiceClass.PRIORITY)
    h.run()
    h.assert_all_as_solo()
    assert h.finished[1].preemptions == 1


def test_the_queue_is_told_by_class() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(9), service_class=ServiceClass.PRIORITY)
    h.add(2, [2] * 4, greedy(9), service_class=ServiceClass.FLEX)
    h.add(3, [3] * 4, greedy(9), service_class=ServiceClass.FLEX)
    h.steps(2)
    stats = h.scheduler.stats()
    assert stats.class_waiting == (2, 0, 0)
    assert stats.class_waited_s == pytest.approx((2 * STEP_S, 0.0, 0.0))
