"""The waiting queue: sequences that wait for a slot, which are newcomers (never admitted yet), preempted
ones, and ones that keep their pages: stalled ones, and those that yielded their slots.

It keeps the turn of the oldest, on which the bound at the head of `engine.core.queue.policy` rests: it counts
the admissions since the last that was the oldest's. An oldest sequence that did not fit in its turn, while
others of its tenant ran, is *held*: the turn goes on to the oldest of the other tenants, and the held one is
the first of its own tenant in every plan until it fits. If it ends before, the next of its tenant is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from engine.contract.messages import ServiceClass
from engine.core.pages.block_manager import PageIdentity
from engine.core.queue import policy
from engine.core.queue.policy import Circumstances, Discipline
from engine.core.sequence import Sequence, Status, due_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may be admitted or get a chunk now."""

    sequence: Sequence
    in_turn: bool
    """True if it is the oldest in its turn: no other of its tenant may pass it, and none of any tenant while
    its own tenant runs nothing."""


class WaitingQueue:
    """The sequences that wait for a slot, and the order in which they get it."""

    def __init__(self, discipline: Discipline) -> None:
        self._discipline: Final = discipline
        self.queues: Final[dict[Status, dict[int, Sequence]]] = {
            Status.WAITING: {},
            Status.PREEMPTED: {},
            Status.STALLED: {},
            Status.YIELDED: {},
        }
        """The waiting sequences by status, then by handle."""
        self.newcomer_tokens = 0
        """Prompt tokens of all newcomers."""
        self._admissions = 0
        self._admitted_since_oldest = 0
        self._held: dict[str, Sequence] = {}  # by tenant
        self.computed: set[PageIdentity | None] = set()
        """The prompts that running sequences compute, for which others wait (rule D of
        `engine.core.step.planner`)."""

    @property
    def newcomers(self) -> int:
        """The number of sequences that were never admitted yet, paused ones included."""
        return len(self.queues[Status.WAITING])

    @property
    def with_pages(self) -> list[Sequence]:
        """The sequences that keep their pages until others need them."""
        return [*self.queues[Status.STALLED].values(), *self.queues[Status.YIELDED].values()]

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(map(dict.values, self.queues.values()))

    @property
    def due(self) -> list[Sequence]:
        """The waiting sequences that nothing holds back."""
        return due_of(self)

    def enter(self, sequence: Sequence) -> None:
        self.queues[sequence.status][sequence.handle] = sequence
        if sequence.status is Status.WAITING:
            self.newcomer_tokens += sequence.prompt_len

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that ends or is admitted, before its status changes."""
        self.displace(sequence)
        if sequence.status is Status.WAITING:
            self.newcomer_tokens -= sequence.prompt_len

    def displace(self, sequence: Sequence) -> None:
        """Remove a sequence that loses its pages, before its status changes; `enter` follows."""
        del self.queues[sequence.status][sequence.handle]

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a slot, before its status changes."""
        if sequence.status is not Status.STALLED:
            self._admitted_since_oldest = self._admitted_since_oldest + 1 if self._has_older(sequence) else 0
        self._admissions += 1
        if self._held.get(sequence.tenant) is sequence:
            del self._held[sequence.tenant]
        self.leave(sequence)

    def _has_older(self, sequence: Sequence) -> bool:
        """True if an older one has its turn before `sequence`: of its own tenant, or of one that has no held
        one."""
        own_age, tenant, held = policy.age(sequence), sequence.tenant, self._held
        for status, queue in self.queues.items():
            if status is Status.STALLED:
                continue
            for other in queue.values():
                if status is Status.WAITING and other.arrived_at > sequence.arrived_at:
                    break  # newcomers are in the order of their arrival
                is_rival = other.tenant == tenant or other.tenant not in held
                if is_rival and policy.age(other) < own_age and self._takes_turns(other):
                    return True
        return False

    def is_following(self, sequence: Sequence) -> bool:
        """True if a waiting sequence lacks the prompt that another computes."""
        takes_prompt = sequence.reusable_len == sequence.prompt_len - 1
        return bool(self.computed) and takes_prompt and sequence.prompt_identity in self.computed

    def rank(self, sequences: Iterable[Sequence], circumstances: Circumstances) -> list[Sequence]:
        """These sequences in the order of the discipline; the first goes first."""
        return self._discipline.order(sequences, circumstances)

    def candidates(self, prefilling: Iterable[Sequence], circumstances: Circumstances) -> Iterator[Candidate]:
        """Waiting sequences, and the running ones in `prefilling` among them, in the order in which they are
        served. The caller admits candidates in between; after each admission the oldest may have its turn."""
        running = set(prefilling)
        self._held = self._still_held()
        turns, had_turn, admissions = list[Sequence](), set[int](), -1
        for sequence in self.rank([*self.due, *running], circumstances):
            while sequence.status is not Status.STALLED:
                if admissions != self._admissions:
                    turns = [s for s in self._turns() if s.handle not in had_turn]
                    admissions = self._admissions
                if not turns:
                    break
                oldest = turns.pop(0)
                had_turn.add(oldest.handle)
                yield Candidate(oldest, in_turn=True)
                if oldest.status in self.queues:
                    self._held[oldest.tenant] = oldest
            waits = sequence.status in self.queues  # else it was admitted in its turn
            if waits != (sequence in running):  # else it was preempted for one above it
                yield Candidate(sequence, in_turn=False)

    def _still_held(self) -> dict[str, Sequence]:
        """The held ones. Where one has ended, or takes no turns for now, the oldest of its tenant's others is
        held in its place, which had waited for that turn as long."""
        held = dict[str, Sequence]()
        for tenant, sequence in self._held.items():
            is_here = sequence.handle in self.queues.get(sequence.status, ())
            if is_here and self._takes_turns(sequence):
                held[tenant] = sequence
            elif others := [other for other in self._taking_turns() if other.tenant == tenant]:
                held[tenant] = min(others, key=policy.age)
        return held

    def _turns(self) -> list[Sequence]:
        """The sequences whose turn it is, the oldest first: the oldest of each tenant that has a held one,
        and when the oldest of all has its turn the oldest of every tenant, to which the turn goes on from
        held ones.
        """
        is_oldests_turn = self._admitted_since_oldest >= self._discipline.oldest_every - 1
        oldest: dict[str, Sequence] = {}
        if is_oldests_turn or self._held:
            for sequence in self._taking_turns():
                tenant = sequence.tenant
                if is_oldests_turn or tenant in self._held:
                    first = oldest.setdefault(tenant, sequence)
                    if policy.age(sequence) < policy.age(first):
                        oldest[tenant] = sequence
        return policy.by_age(oldest.values())

    def _taking_turns(self) -> Iterator[Sequence]:
        """The sequences that take turns, but for those that resume after a stall with their pages."""
        for status, queue in self.queues.items():
            if status is not Status.STALLED:
                yield from filter(self._takes_turns, queue.values())

    def _takes_turns(self, sequence: Sequence) -> bool:
        """True if a waiting sequence is due, and follows no other."""
        return sequence.hold is None and not self.is_following(sequence)

    def by_class(self, now: float) -> tuple[tuple[int, ...], tuple[float, ...], list[int]]:
        """For each class the number of waiting sequences that are due, the age of the oldest in seconds (0.0
        where there is none), and the tokens that they lack."""
        arrivals: dict[ServiceClass, list[float]] = {each: [] for each in ServiceClass}
        tokens = [0] * len(arrivals)
        for sequence in self.due:
            arrivals[sequence.service_class].append(sequence.arrived_at)
            tokens[sequence.service_class] += sequence.lacking_len
        counts = tuple(len(those) for those in arrivals.values())
        return counts, tuple(max(0.0, now - min(those, default=now)) for those in arrivals.values()), tokens
