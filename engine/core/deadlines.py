"""When the core gives up on a sequence: in the queue too long, or too long altogether.

A heap of (when, who, why). Who ended before its time stays in it until its turn comes, or until such
entries are most of the heap, which is then built anew: so it holds a bounded multiple of the living.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterator
from typing import Final

from engine.core.messages import FinishReason

SLACK: Final = 64
ENTRIES_EACH: Final = 2


class Deadlines:
    def __init__(self, living: Container[int]) -> None:
        """`living` are the handles whose deadlines count; it changes outside."""
        self._living = living
        self._heap: list[tuple[float, int, FinishReason]] = []
        self._rebuilt_len = 0

    def add(self, at: float, handle: int, reason: FinishReason) -> None:
        heapq.heappush(self._heap, (at, handle, reason))
        if len(self._heap) > ENTRIES_EACH * self._rebuilt_len + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._living]
            heapq.heapify(self._heap)
            self._rebuilt_len = len(self._heap)

    @property
    def next_at(self) -> float:
        """Infinity when there is none."""
        while self._heap and self._heap[0][1] not in self._living:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def passed(self, now: float) -> Iterator[tuple[int, FinishReason]]:
        """Take out those that have come, of those who live."""
        while self.next_at <= now:
            _, handle, reason = heapq.heappop(self._heap)
            yield handle, reason
