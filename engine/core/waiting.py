"""Those who wait for a slot: newcomers, the preempted, swapped or not, and those who stalled and keep their
pages.

Keeps the eldest's turn, on which the bound at the head of `engine.core.policy` rests: it counts the
admissions since the last that was the eldest's. An eldest that did not fit in its turn, while others of its
tenant ran, is *held*: the turn goes on to the eldest of the other tenants, and it is the first of its own in
every plan until it fits.
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
    """It is the eldest, and its turn: nobody of its tenant may pass it, and nobody at all while none of its
    tenant runs."""


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
        self._admissions = 0
        self._admitted_since_eldest = 0
        self._held: dict[str, Sequence] = {}  # by tenant

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
        if self._held.get(sequence.tenant) is sequence:
            del self._held[sequence.tenant]
        if sequence.status is Status.WAITING:
            self.newcomer_tokens -= sequence.prompt_len

    def admit(self, sequence: Sequence) -> None:
        """It is seated. Call it before the status changes."""
        if sequence.status is not Status.STALLED:
            not_held = (
                s for s in self._unseated() if s.tenant not in self._held or s.tenant == sequence.tenant
            )
            is_eldest = sequence is min(not_held, key=policy.age)
            self._admitted_since_eldest = 0 if is_eldest else self._admitted_since_eldest + 1
        self._admissions += 1
        self.leave(sequence)

    def rank(self, sequences: Iterable[Sequence], circumstances: Circumstances) -> list[Sequence]:
        """The first goes first."""
        return self._discipline.order(sequences, circumstances)

    def candidates(self, prefilling: Iterable[Sequence], circumstances: Circumstances) -> Iterator[Candidate]:
        """Those who wait, and among them those who run and still compute their prompts, in the order in
        which they are served; each admission in between may give the eldest its turn."""
        running = set(prefilling)
        self._held = {s.tenant: s for s in self._held.values() if not s.is_paused}
        turns, had_turn, admissions = list[Sequence](), set[int](), -1
        for sequence in self.rank([*self.willing, *running], circumstances):
            while sequence.status is not Status.STALLED:
                if admissions != self._admissions:
                    turns = [s for s in self._turns() if s.handle not in had_turn]
                    admissions = self._admissions
                if not turns:
                    break
                eldest = turns.pop(0)
                had_turn.add(eldest.handle)
                yield Candidate(eldest, in_turn=True)
                if eldest.status in self.queues:
                    self._held[eldest.tenant] = eldest
            waits = sequence.status in self.queues  # else it was admitted in its turn
            if waits != (sequence in running):  # else it was preempted for one above it
                yield Candidate(sequence, in_turn=False)

    def _turns(self) -> list[Sequence]:
        """Those whose turn it is, by age: of each tenant of whom somebody is held the eldest, and when it is
        the eldest's turn that of every tenant, so that it goes on from those who are held then."""
        is_elders_turn = self._admitted_since_eldest >= self._discipline.elder_turn - 1
        eldest: dict[str, Sequence] = {}
        if is_elders_turn or self._held:
            for sequence in policy.by_age(self._unseated()):
                if is_elders_turn or sequence.tenant in self._held:
                    eldest.setdefault(sequence.tenant, sequence)
        return list(eldest.values())

    def _unseated(self) -> Iterator[Sequence]:
        """The willing, but for those back from a stall."""
        for status, queue in self.queues.items():
            if status is not Status.STALLED:
                yield from (sequence for sequence in queue.values() if not sequence.is_paused)

    def by_class(self, now: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Of the willing of each class, how many, and how long the eldest has been here."""
        arrivals: dict[ServiceClass, list[float]] = {each: [] for each in ServiceClass}
        for sequence in self.willing:
            arrivals[sequence.service_class].append(sequence.arrived_at)
        counts = tuple(len(those) for those in arrivals.values())
        return counts, tuple(max(0.0, now - min(those, default=now)) for those in arrivals.values())
