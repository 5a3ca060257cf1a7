from __future__ import annotations

from array import array

import pytest

from engine.core import policy
from engine.core.block_manager import PageChain
from engine.core.sequence import Sequence
from tests.engine.core.harness import greedy


def sequence(handle: int, arrived_at: float, *, preempted: bool = False) -> Sequence:
    seq = Sequence(handle, greedy(4), 1, array("I", [1]), PageChain(b"", 4), arrived_at)
    if preempted:
        seq.admit(0, [0], 0, arrived_at)
        seq.preempt(arrived_at)
    return seq


def handles(sequences: list[Sequence]) -> list[int]:
    return [seq.handle for seq in sequences]


def stalled(handle: int, paused_at: float, *, resumed: bool = False) -> Sequence:
    seq = Sequence(handle, greedy(4), 1, array("I", [1]), PageChain(b"", 4), 0.0)
    seq.admit(0, [0], 0, 0.0)
    seq.pause(paused_at)
    seq.stall(paused_at)
    if resumed:
        seq.resume(paused_at)
    return seq


def test_first_come_first_served_and_who_has_been_here_before_newcomers() -> None:
    waiting = [
        sequence(3, 5.0),
        sequence(2, 1.0),
        sequence(9, 4.0, preempted=True),
        sequence(1, 5.0),
        sequence(8, 2.0, preempted=True),
        stalled(4, 6.0, resumed=True),
    ]
    assert handles(policy.by_rank(waiting, now=9.0)) == [4, 8, 9, 2, 1, 3]


@pytest.mark.parametrize(("pending", "budget", "length"), [(5, 9, 5), (9, 5, 5), (9, 0, 0)])
def test_chunk_len(pending: int, budget: int, length: int) -> None:
    assert policy.chunk_len(pending, budget) == length


@pytest.mark.parametrize(
    ("freed", "needed", "victims"),
    [
        ({1: 3, 2: 3, 3: 3}, 1, [3]),  # the latest arrival
        ({1: 3, 2: 3, 3: 3}, 4, [3, 2]),  # as many as needed
        ({1: 3, 2: 3, 3: 0}, 1, [2]),  # who would free nothing is left alone
        ({1: 1, 2: 1, 3: 1}, 4, []),  # not feasible: nobody suffers
        ({1: 0, 2: 0, 3: 0}, 1, []),
    ],
)
def test_victims(freed: dict[int, int], needed: int, victims: list[int]) -> None:
    running = [sequence(2, 2.0), sequence(3, 3.0), sequence(1, 1.0)]
    assert handles(policy.choose_victims(running, needed, lambda seq: freed[seq.handle])) == victims


@pytest.mark.parametrize(
    ("freed", "victim"),
    [
        ({1: 1, 2: 1, 3: 9, 4: 9}, 2),  # the longest away
        ({1: 1, 2: 0, 3: 9, 4: 9}, 1),  # of those who free something
        ({1: 0, 2: 0, 3: 0, 4: 1}, 4),  # even of one that was resumed
        ({1: 0, 2: 0, 3: 0, 4: 0}, 2),
    ],
)
def test_of_the_stalled_the_longest_away_goes_first(freed: dict[int, int], victim: int) -> None:
    seqs = [stalled(4, 1.0, resumed=True), stalled(1, 3.0), stalled(2, 2.0), stalled(3, 3.0)]
    assert policy.choose_stalled(seqs, lambda seq: freed[seq.handle]).handle == victim
