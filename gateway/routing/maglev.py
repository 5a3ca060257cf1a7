"""Maglev hashing (Eisenbud et al., 2016): which replicas a key belongs to, so that many gateways agree
without talking.

Every member prefers the slots of a table in an order of its own; members take turns to take the first free
one that they prefer. So all have the same number of slots, to one, where a hash ring with 64 points each
gives some members 1.3 times the mean. A member that leaves hands on its own slots, and few others change.

A key belongs to the member of its slot; where several are wanted, to those of the slots that follow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

SLOTS_PER_MEMBER: Final = 100
"""At least. The more slots, the fewer change that need not: about 1 in as many."""
_SIZES: Final = (1_009, 4_001, 16_001, 64_007)
"""Primes, so that any step visits every slot."""
MEMBERS_MAX: Final = _SIZES[-1] // SLOTS_PER_MEMBER
STEP_LEN: Final = 4096
"""Taken slots that one step of filling a table looks at, within a millisecond or so. The last free ones are
found after many."""


def key_of(*parts: bytes) -> int:
    """A 64-bit key. Parts are told apart: ("ab", "c") is not ("a", "bc")."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return int.from_bytes(digest.digest())


class Table:
    """Members by index, in the order in which their names were given. Immutable once it is filled: a change
    builds another, in about 0.2 ms per member. Raises ValueError for more than `MEMBERS_MAX`."""

    __slots__ = ("_slots", "ids")

    def __init__(self, names: Sequence[str], *, is_filled: bool = True) -> None:
        """`is_filled` is False for a table that its maker fills step by step."""
        if len(names) > MEMBERS_MAX:
            raise ValueError(f"a pool has at most {MEMBERS_MAX} replicas")
        self.ids: Final = tuple(key_of(name.encode()) for name in names)
        """A key of each member."""
        size = next(size for size in _SIZES if size >= SLOTS_PER_MEMBER * len(names))
        self._slots: Final = array("l", [-1]) * size
        if is_filled:
            for _ in self.fill():
                pass

    def fill(self) -> Iterator[None]:
        """Fill the slots, in steps between which others may run. The order of names plays no part: members
        take turns by their ids."""
        slots, ids, size = self._slots, self.ids, len(self._slots)
        free = size if ids else 0
        turns = sorted(range(len(ids)), key=ids.__getitem__)
        at = [id_ % size for id_ in ids]
        steps = [id_ // size % (size - 1) + 1 for id_ in ids]
        looks = 0
        while free:
            for member in turns[:free]:
                slot, step = at[member], steps[member]
                while slots[slot] >= 0:
                    slot = (slot + step) % size
                    if (looks := looks + 1) >= STEP_LEN:
                        looks = 0
                        yield
                slots[slot] = member
                at[member] = slot
                free -= 1

    def walk(self, key: int) -> Iterator[int]:
        """All members, each once, in the order of the slots from the key's."""
        slots, seen = self._slots, set[int]()
        start = key % len(slots)
        for at in range(start - len(slots), start):
            if (member := slots[at]) not in seen:
                seen.add(member)
                yield member
                if len(seen) == len(self.ids):
                    return
