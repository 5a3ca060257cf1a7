"""The steps that the core has made lately, the longest ones of all, and sums over all: where a request looks
up what its tokens waited for.

A ring has the newest `STEPS_MAX` records. A sequence may be far older than that, and what it remembers is its
longest gap: so steps that are long are kept beyond the ring, each until `GAPS_MAX` later ones were as long.
A query asks for the longest since a given step, and a step that so many later ones exceed is in no answer.
These are few: of n steps in random order about `GAPS_MAX` x ln n.

Records come with every step, and requests ask some times in their lives. So a record is only put down as it
comes. What is new is added up when a mark is set, and searched for long steps when a request ends, or when
`UNREAD_MAX` are new: in one pass from the newest to the oldest, in which a step is long while fewer than
`GAPS_MAX` that were seen before it are as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from engine.contract.messages import ServiceClass
from engine.contract.records import Lack, StepRecord

STEPS_MAX: Final = 1024
"""Records in the ring: some 300 bytes each."""
UNREAD_MAX: Final = 512
"""New records that are added up and searched at once."""
GAPS_MAX: Final = 3
"""The longest steps that a query finds at most."""
LONG_MAX: Final = 64
"""Long steps that are kept. Only where ever shorter ones follow each other are there so many."""
NEWEST: Final = 8
"""The newest of them, which are kept in any case."""

NO_STEP: Final = StepRecord(0, 0.0, 0.0, 0.0, 0, 0, (0, 0, 0), 0, Lack.NOTHING, 0, 0)
"""The record before the first."""


class StepSums(NamedTuple):
    """Sums over all steps since the start. The difference of two readings tells what the steps between them
    did together."""

    prompt_tokens: int = 0
    decodes: int = 0
    """Rows that computed the token of a sequence that decodes."""
    lacking_s: tuple[float, ...] = (0.0,) * len(Lack)
    """Time in which sequences waited, for each `Lack`."""


class StepMark(NamedTuple):
    """A step, and the sums up to it, itself included."""

    step: StepRecord = NO_STEP
    sums: StepSums = StepSums()

    @property
    def number(self) -> int:
        return self.step.number


BEGINNING: Final = StepMark()
"""The mark before the first step."""


class StepRing:
    """The newest steps and the longest, and the sequences that were admitted."""

    __slots__ = ("_long", "_ring", "_sums", "_unadded", "_unread", "admitted", "last")

    def __init__(self) -> None:
        self.last = NO_STEP
        """The step that was committed last."""
        self.admitted = [0] * len(ServiceClass)
        """Sequences that were admitted for the first time, for each class, FLEX first."""
        self._ring: deque[StepRecord] = deque(maxlen=STEPS_MAX)
        self._unread: list[StepRecord] = []
        """The steps that were not searched for long ones yet, in order."""
        self._unadded = 0
        """The index of the first of them that the sums lack."""
        self._sums = StepSums()
        self._long: list[StepRecord] = []
        """Long steps in which sequences decoded, in order."""

    def push(self, step: StepRecord) -> None:
        """Add the next step."""
        self.last = step
        self._ring.append(step)
        self._unread.append(step)
        if len(self._unread) == UNREAD_MAX:
            self._search()

    @property
    def sums(self) -> StepSums:
        """The sums over all steps."""
        if new := self._unread[self._unadded :]:
            before, lacking_s = self._sums, list(self._sums.lacking_s)
            for step in new:
                lacking_s[step.lack] += step.interval_s
            self._unadded += len(new)
            self._sums = StepSums(
                before.prompt_tokens + sum([step.prompt_tokens for step in new]),
                before.decodes + sum([sum(step.decodes) for step in new]),
                tuple(lacking_s),
            )
        return self._sums

    def mark(self) -> StepMark:
        """A mark at the step that was committed last."""
        return StepMark(self.last, self.sums)

    def _search(self) -> None:
        """Search the new steps for long ones, and drop those that are long no more."""
        self._sums = self.sums
        found: list[StepRecord] = []
        longest_s = [-1.0] * GAPS_MAX  # of the steps that were seen so far, the shortest first
        for step in (*reversed(self._unread), *reversed(self._long)):
            if step.interval_s > longest_s[0] and any(step.decodes):
                found.append(step)
                longest_s[0] = step.interval_s
                longest_s.sort()
        if len(found) > LONG_MAX:
            older = sorted(found[NEWEST:], key=lambda step: step.interval_s)
            shortest = {step.number for step in older[: len(found) - LONG_MAX]}
            found = [step for step in found if step.number not in shortest]
        self._unread, self._unadded, self._long = [], 0, found[::-1]

    def longest_since(self, number: int) -> list[StepRecord]:
        """The steps after this number in which sequences decoded, the longest first. The first `GAPS_MAX` are
        the longest of all; further ones may follow."""
        self._search()
        since = [step for step in self._long if step.number > number]
        return sorted(since, key=lambda step: step.interval_s, reverse=True)

    def between(self, after: int, last: int) -> Iterator[StepRecord]:
        """The steps in the ring with numbers above `after` up to `last`, the newest first."""
        for step in islice(reversed(self._ring), STEPS_MAX):
            if step.number <= after:
                return
            if step.number <= last:
                yield step
