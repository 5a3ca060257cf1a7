"""The choice of victims."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from engine.core.queue.tenants import TenantHoldings
from engine.core.sequence import Sequence
from engine.core.step.victims import choose_victims, choose_waiting
from tests.engine.core.sequences import FLEX, PRIORITY, handles, sequence, stalled


def holdings_of(running: Iterable[Sequence]) -> TenantHoldings:
    holdings = TenantHoldings(slots=8, pages=100)
    for seq in running:
        holdings.add(seq.tenant, slots=1, pages=len(seq.pages))
    return holdings


@pytest.mark.parametrize(
    ("freed", "needed", "chosen"),
    [
        ({1: 3, 2: 3, 3: 3, 4: 9}, 1, [4]),  # the lowest class, whatever it costs
        ({1: 3, 2: 3, 3: 3, 4: 0}, 1, [3]),  # the latest arrival
        ({1: 3, 2: 2, 3: 3, 4: 0}, 1, [2]),  # the cheapest to restore
        ({1: 3, 2: 3, 3: 3, 4: 0}, 4, [3, 2]),  # as many as needed
        ({1: 3, 2: 3, 3: 0, 4: 0}, 1, [2]),  # one that would free no page is passed over
        ({1: 1, 2: 1, 3: 1, 4: 0}, 4, []),  # all together are not enough: none is chosen
        ({1: 0, 2: 0, 3: 0, 4: 0}, 1, []),
    ],
)
def test_victims_are_as_few_as_are_enough_the_most_expendable_first(
    freed: dict[int, int], needed: int, chosen: list[int]
) -> None:
    flex = sequence(4, 0.0, service_class=FLEX)
    running = [sequence(2, 2.0), sequence(3, 3.0), sequence(1, 1.0), flex]
    victims = choose_victims(
        running,
        needed,
        lambda seq: freed[seq.handle],
        lambda seq: 0.1 * freed[seq.handle],
        holdings_of(running),
    )
    assert handles(victims) == chosen


@pytest.mark.parametrize(
    ("freed", "victim"),
    [
        ({1: 1, 2: 1, 3: 9, 4: 9}, 2),  # the one paused for longest
        ({1: 1, 2: 0, 3: 9, 4: 9}, 1),  # among those that free a page
        ({1: 0, 2: 0, 3: 0, 4: 1}, 4),  # even a resumed one
        ({1: 0, 2: 0, 3: 0, 4: 0}, 2),
    ],
)
def test_the_stalled_sequence_paused_for_longest_is_preempted_first(
    freed: dict[int, int], victim: int
) -> None:
    seqs = [stalled(4, 1.0, resumed=True), stalled(1, 3.0), stalled(2, 2.0), stalled(3, 3.0)]
    assert choose_waiting(seqs, lambda seq: freed[seq.handle]).handle == victim


def test_of_those_that_yielded_the_last_that_came_loses_its_pages_first() -> None:
    seqs = [sequence(handle, float(handle)) for handle in (1, 3, 2)]
    for seq in seqs:
        seq.admit(0, [0], 0, 5.0)
        seq.step_aside(6.0)
    assert choose_waiting(seqs, lambda _: 1).handle == 3
    assert choose_waiting([*seqs, stalled(9, 8.0)], lambda _: 1).handle == 9
    assert choose_waiting(seqs, lambda seq: seq.handle != 3).handle == 2


def test_a_stalled_sequence_of_the_lowest_class_is_preempted_first() -> None:
    seqs = [stalled(1, 1.0), stalled(2, 5.0, service_class=FLEX), stalled(3, 0.0, service_class=PRIORITY)]
    assert choose_waiting(seqs, lambda _: 1).handle == 2
