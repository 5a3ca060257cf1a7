"""Who goes first, who goes last, how much at a time: pure functions, so that each can be replaced,
simulated and compared alone. They read sequences and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from engine.core.sequence import Sequence, Status

Rank = tuple[float, ...]
"""Compared as tuples; the least goes first."""


def rank(sequence: Sequence, now: float) -> Rank:  # noqa: ARG001  rules that weigh waiting time need `now`
    """Place in the waiting queue: first those who hold pages already, then preempted work, then
    newcomers; among equals, first come, first served.

    Arrivals within one clock reading keep the order of their handles, which count up.
    """
    return (_STANDING[sequence.status], sequence.arrived_at, sequence.handle)


_STANDING: Final = {Status.STALLED: 0, Status.PREEMPTED: 1, Status.WAITING: 2}


def by_rank(waiting: Iterable[Sequence], now: float) -> list[Sequence]:
    return sorted(waiting, key=lambda sequence: rank(sequence, now))


def chunk_len(pending_len: int, budget_left: int) -> int:
    """Tokens of one sequence to compute in this step: at least one, while any budget is left."""
    return min(pending_len, budget_left)


def choose_stalled(stalled: Iterable[Sequence], pages_freed: Callable[[Sequence], int]) -> Sequence:
    """Which stalled sequence gives its pages back first: one that frees some at once, and of those the
    one whose reader has been away longest. Who is resumed already comes last.

    Somebody is chosen even when none frees a page alone, because two who share it do so one by one.
    """

    def cost(sequence: Sequence) -> tuple[bool, float, int]:
        since = math.inf if sequence.paused_at is None else sequence.paused_at
        return (not pages_freed(sequence), since, sequence.handle)

    return min(stalled, key=cost)


def choose_victims(
    running: Iterable[Sequence], pages_needed: int, pages_freed: Callable[[Sequence], int]
) -> list[Sequence]:
    """Whom to preempt so that `pages_needed` become available, when no stalled sequence can help: of
    those who run the latest arrivals, as few as do.

    `pages_freed` says what preempting a sequence would bring at once; whoever would bring nothing is
    passed over, since hurting it helps nobody. Feasibility first: when all together would not bring
    enough, nobody is chosen.
    """
    victims, pages = [], 0
    for sequence in sorted(running, key=lambda s: (s.arrived_at, s.handle), reverse=True):
        if pages >= pages_needed:
            break
        if freed := pages_freed(sequence):
            victims.append(sequence)
            pages += freed
    return victims if pages >= pages_needed else []
