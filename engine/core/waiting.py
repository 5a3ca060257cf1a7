"""Those who wait for a slot: newcomers, the preempted, swapped or not, and those who stalled and keep their
pages.

Keeps the eldest's turn, on which the bound at the head of `engine.core.policy` rests: it counts the
admissions since the last that was the eldest's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from engine.core import policy
from engine.core.messages import ServiceClass
from engine.core.policy import Circumstances, Discipline
from engine.core.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Candidate:
    sequence: Sequence
    in_turn: bool
    """It is the eldest, and its turn: nobody may pass it."""


class WaitingRoom:
    def __init__(self, discipline: Discipline) -> None:
        self._discipline: Final = discipline
        self.queues: Final[dict[Status, dict[int, Sequence]]] = {
            Status.WAITING: {},
            Status.PREEMPTED: {},
            Status.SWAPPED: {},
            Status.STALLED: {},
        }
        """By status, by handle."""
        self.newcomer_tokens = 0
        """In the prompts of the newcomers."""
        self._admitted_since_eldest = 0

    @property
    def newcomers(self) -> int:
        """Never admitted yet, paused or not."""
        return len(self.queues[Status.WAITING])

    @property
    def stalled(self) -> dict[int, Sequence]:
        return self.queues[Status.STALLED]

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(queue.values() for queue in self.queues.values())

    @property
    def willing(self) -> list[Sequence]:
        """Those who are not paused."""
        return [
            sequence
            for queue in self.queues.values()
            for sequence in queue.values()
            if sequence.paused_at is None
        ]

    def enter(self, sequence: Sequence) -> None:
        self.queues[sequence.status][sequence.handle] = sequence
        if sequence.status is Status.WAITING:
            self.newcomer_tokens += sequence.prompt_len

    def leave(self, sequence: Sequence) -> None:
        """It ended, or a stalled one lost its pages. Call it before the status changes."""
        del self.queues[sequence.status][sequence.handle]
        if sequence.status is Status.WAITING:
            self.newcomer_tokens -= sequence.prompt_len

    def admit(self, sequence: Sequence) -> None:
        """It is seated. Call it before the status changes."""
        if sequence.status is not Status.STALLED:
            is_eldest = sequence is self._eldest()
            self._admitted_since_eldest = 0 if is_eldest else self._admitted_since_eldest + 1
        self.leave(sequence)

    def rank(self, sequences: Iterable[Sequence], circumstances: Circumstances) -> list[Sequence]:
        """The first goes first."""
        return self._discipline.order(sequences, circumstances)

    def candidates(self, prefilling: Iterable[Sequence], circumstances: Circumstances) -> Iterator[Candidate]:
        """Those who wait, and among them those who run and still compute their prompts, in the order in
        which they are served; each admission in between may give the eldest its turn."""
        running = set(prefilling)
        for sequence in self.rank([*self.willing, *running], circumstances):
            while (
                self._is_elders_turn and sequence.status is not Status.STALLED and (eldest := self._eldest())
            ):
                yield Candidate(eldest, in_turn=True)
            waits = sequence.status in self.queues  # else it was admitted in its turn
            if waits != (sequence in running):  # else it was preempted for one above it
                yield Candidate(sequence, in_turn=False)

    @property
    def _is_elders_turn(self) -> bool:
        return self._admitted_since_eldest >= self._discipline.elder_turn - 1

    def _eldest(self) -> Sequence | None:
        those = [
            sequence
            for status, queue in self.queues.items()
            for sequence in queue.values()
            if status is not Status.STALLED and sequence.paused_at is None
        ]
        return min(those, key=policy.age, default=None)

    def by_class(self, now: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Of the willing of each class, how many, and how long the eldest has been here."""
        arrivals: dict[ServiceClass, list[float]] = {each: [] for each in ServiceClass}
        for sequence in self.willing:
            arrivals[sequence.service_class].append(sequence.arrived_at)
        counts = tuple(len(those) for those in arrivals.values())
        return counts, tuple(max(0.0, now - min(those, default=now)) for those in arrivals.values())
