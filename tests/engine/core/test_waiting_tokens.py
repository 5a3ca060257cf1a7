"""The waiting tokens that the core reports are those that its sequences lack, class by class."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.contract.messages import CoreStats, ServiceClass
from engine.core.scheduler import Scheduler
from engine.core.sequence import Status
from tests.effort import some
from tests.engine.core.harness import Harness, greedy
from tests.engine.core.test_simulation import WORLDS
from tests.overlapped import OverlappedSimulation
from tests.simulator import simulate

SEEN = some(
    ("preempted into host memory", "classes and tenants", "no client reads steadily", "usual", "tight"), 3
)
HELD = (Status.RUNNING, Status.STALLED, Status.YIELDED)


def lacking(scheduler: Scheduler) -> tuple[int, ...]:
    """What all sequences lack, counted position by position."""
    tokens = Counter[ServiceClass]()
    for sequence in scheduler._sequences.values():
        if sequence.is_paused or (sequence.status is not Status.RUNNING and sequence.hold is not None):
            continue  # neither paused ones count, nor those that wait for a mask before a slot
        if sequence.status is Status.WAITING:
            assert 1 <= sequence.expected_len <= sequence.prompt_len
            lacks = sequence.expected_len
        else:
            kept = sequence.computed_len if sequence.status in HELD else 0
            lacks = sum(1 for position in range(len(sequence.tokens)) if position >= kept)
        if sequence.status is not Status.RUNNING or lacks > 1:
            tokens[sequence.service_class] += lacks
    return tuple(tokens[each] for each in ServiceClass)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Check every reading of every scheduler, and count those that had tokens waiting."""
    seen = Counter[str]()
    read = Scheduler.stats

    def stats(scheduler: Scheduler) -> CoreStats:
        reading = read(scheduler)
        assert reading.class_tokens == lacking(scheduler)
        assert reading.newest >= max(scheduler._sequences, default=0)
        seen["readings"] += 1
        seen["waiting"] += any(reading.class_tokens)
        seen["several classes"] += sum(map(bool, reading.class_tokens)) > 1
        return reading

    monkeypatch.setattr(Scheduler, "stats", stats)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("world", SEEN)
def test_every_reading_has_what_the_sequences_lack(world: str, checked: Counter[str]) -> None:
    simulate(7, WORLDS[world])
    OverlappedSimulation(random.Random(7), WORLDS[world]).run()
    assert checked["waiting"] > 20
    assert world != "classes and tenants" or checked["several classes"] > 20


def test_a_prompt_is_counted_until_it_is_computed_and_a_decode_is_not() -> None:
    h = Harness(slots=2, step_tokens_max=16, prefix_cache=False)
    h.add(1, [1] * 40, greedy(9))
    h.add(2, [2] * 10, greedy(9), service_class=ServiceClass.PRIORITY)
    h.add(3, [3] * 30, greedy(9), service_class=ServiceClass.FLEX)
    assert h.scheduler.stats().class_tokens == (30, 40, 10)
    seen = []
    while any(waiting := h.scheduler.stats().class_tokens):
        seen.append(sum(waiting))
        h.step()
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 80
    assert h.scheduler.stats().running == 2, "decodes go on, and nothing waits"


def test_what_the_cache_has_is_not_counted() -> None:
    h = Harness(page_size=4)
    h.add(1, [5] * 40, greedy(1))
    h.run()
    h.add(2, [5] * 40, greedy(1))
    assert h.scheduler.stats().class_tokens == (0, 1, 0)
    h.add(3, [5] * 39 + [6, 6], greedy(1))
    assert h.scheduler.stats().class_tokens == (0, 1 + 5, 0)


def test_a_paused_sequence_waits_for_its_reader_and_is_not_counted() -> None:
    h = Harness()
    h.add(1, [5] * 40, greedy(1))
    h.pause(1)
    assert h.scheduler.stats().class_tokens == (0, 0, 0)
    h.resume(1)
    assert h.scheduler.stats().class_tokens == (0, 40, 0)
