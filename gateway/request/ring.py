"""A ring of records in which every party has a part: who sends the most loses the oldest of its own.

Rules:

1. A ring is bounded in number and in bytes. Where there is no room for one more, the oldest record goes of a
   party that has as many as the mean of all, or more: first of the one that brings the new one.
2. So a party that has fewer than the mean loses nothing, whatever others bring, and one that has more loses
   to parties that have fewer alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar


class Numbered(Protocol):
    """What a ring keeps."""

    @property
    def number(self) -> int:
        """Orders the records by time."""
        ...

    @property
    def bytes_len(self) -> int: ...


R = TypeVar("R", bound=Numbered)


class Ring(Generic[R]):
    """Records of parties."""

    __slots__ = ("_bytes_max", "_parts", "_records_max", "_turns", "bytes_len", "lost", "records")

    def __init__(self, records_max: int, bytes_max: int) -> None:
        self._records_max: Final = records_max
        self._bytes_max: Final = bytes_max
        self._parts: Final[dict[str, deque[R]]] = {}
        """The records of each party that has one, the oldest first."""
        self._turns: Final[deque[deque[R]]] = deque()
        """The parts, in the order in which they are looked at for one that is large."""
        self.records = 0
        self.bytes_len = 0
        """Bytes of all records."""
        self.lost = 0
        """The number of the latest record that is not kept any more. 0 while all are."""

    def __iter__(self) -> Iterator[R]:
        for part in self._parts.values():
            yield from part

    def newest_first(self) -> Iterator[Iterator[R]]:
        """The records of each party."""
        return map(reversed, self._parts.values())

    def add(self, record: R, party: str) -> None:
        """Keep a record, which is newer than all others."""
        part = self._parts.get(party)
        if part is None:
            part = self._parts[party] = deque()
            self._turns.append(part)
        part.append(record)
        self.records += 1
        self.bytes_len += record.bytes_len
        while self.records > self._records_max or self.bytes_len > self._bytes_max:
            own = len(part)
            large = part if own > 1 and own * len(self._parts) >= self.records else self._large()
            gone = large.popleft()
            self.records -= 1
            self.bytes_len -= gone.bytes_len
            if gone.number > self.lost:
                self.lost = gone.number
            if not large:
                self._forget(large)

    def _large(self) -> deque[R]:
        """A part that has as many records as the mean: the first of the parts as long as it has."""
        while len(self._turns[0]) * len(self._parts) < self.records:
            self._turns.rotate(-1)
        return self._turns[0]

    def _forget(self, empty: deque[R]) -> None:
        """Drop a part without records. There is one at most, and others with more than none."""
        at = next(at for at, part in enumerate(self._turns) if part is empty)
        del self._turns[at]
        del self._parts[next(party for party, part in self._parts.items() if part is empty)]
