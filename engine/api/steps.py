"""The steps that the core has made lately, and the longest ones of all: where a request looks up what its
tokens waited for.

A ring has the newest `STEPS_MAX` records. A sequence may be far older than that, and what it remembers is its
longest gap: so steps that are long are kept beyond the ring, each until `GAPS_MAX` later ones were as long.
A query asks for the longest since a given step, and a step that so many later ones exceed is in no answer.
These are few: of n steps in random order about `GAPS_MAX` x ln n.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

from engine.core.messages import Lack, ServiceClass, StepRecord, StepSums

STEPS_MAX: Final = 1024
"""Records in the ring: some 600 bytes each."""
GAPS_MAX: Final = 3
"""The longest steps that a query finds at most."""
LONG_MAX: Final = 64
"""Long steps that are kept. Only where ever shorter ones follow each other are there so many."""
NEWEST: Final = 8
"""The newest of them, which are kept in any case."""

NO_STEP: Final = StepRecord(0, 0.0, 0.0, 0.0, 0, 0, (0, 0, 0), 0, Lack.NOTHING, 0, 0, StepSums())
"""The record before the first."""


class StepRing:
    """The newest steps and the longest, and the sequences that were admitted."""

    __slots__ = ("_beaten", "_long", "_ring", "admitted", "last")

    def __init__(self) -> None:
        self.last = NO_STEP
        """The step that was committed last."""
        self.admitted = [0] * len(ServiceClass)
        """Sequences that were admitted for the first time, for each class, FLEX first."""
        self._ring: deque[StepRecord] = deque(maxlen=STEPS_MAX)
        self._long: list[StepRecord] = []
        """Long steps in which sequences decoded, in order."""
        self._beaten: list[int] = []
        """For each of them, the later steps that were as long."""

    def push(self, step: StepRecord) -> None:
        """Add the next step."""
        self.last = step
        self._ring.append(step)
        if any(step.decodes):
            self._keep_long(step)

    def _keep_long(self, step: StepRecord) -> None:
        interval_s, beaten, long = step.interval_s, self._beaten, self._long
        for at in range(len(long) - 1, -1, -1):
            if long[at].interval_s <= interval_s:
                beaten[at] += 1
                if beaten[at] == GAPS_MAX:
                    del long[at], beaten[at]
        long.append(step)
        beaten.append(0)
        if len(long) > LONG_MAX:
            shortest = min(range(LONG_MAX - NEWEST), key=lambda at: long[at].interval_s)
            del long[shortest], beaten[shortest]

    def longest_since(self, number: int) -> list[StepRecord]:
        """The steps after this number in which sequences decoded, the longest first. The first `GAPS_MAX` are
        the longest of all; further ones may follow."""
        since = [step for step in self._long if step.number > number]
        return sorted(since, key=lambda step: step.interval_s, reverse=True)

    def between(self, after: int, last: int) -> Iterator[StepRecord]:
        """The steps in the ring with numbers above `after` up to `last`, the newest first."""
        for step in islice(reversed(self._ring), STEPS_MAX):
            if step.number <= after:
                return
            if step.number <= last:
                yield step
