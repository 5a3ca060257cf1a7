"""Who goes first, who goes last, how much at a time: pure functions, so that each can be replaced,
simulated and compared alone. They read sequences and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.sequence import Sequence, Status

Rank = tuple[float, ...]
"""Compared as tuples; the least goes first."""


def rank(sequence: Sequence, now: float) -> Rank:  # noqa: ARG001  rules that weigh waiting time need `now`
    """Place in the waiting queue: first come, first served, and preempted work before newcomers.

    Arrivals within one clock reading keep the order of their handles, which count up.
    """
    return (sequence.status is not Status.PREEMPTED, sequence.arrived_at, sequence.handle)


def by_rank(waiting: Iterable[Sequence], now: float) -> list[Sequence]:
    return sorted(waiting, key=lambda sequence: rank(sequence, now))


def chunk_len(pending_len: int, budget_left: int) -> int:
    """Tokens of one sequence to compute in this step: at least one, while any budget is left."""
    return min(pending_len, budget_left)


def choose_victims(
    running: Iterable[Sequence], pages_needed: int, pages_freed: Callable[[Sequence], int]
) -> list[Sequence]:
    """Whom to preempt so that `pages_needed` become available: the latest arrivals, as few as do.

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
