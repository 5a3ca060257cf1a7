"""A dict of bounded length, for what can be worked out again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(Generic[K, V]):
    """A dict in which the entry that was put in first makes room for a new one."""

    __slots__ = ("_entries", "_len_max", "get")

    def __init__(self, len_max: int) -> None:
        self._entries: Final[OrderedDict[K, V]] = OrderedDict()  # a dict walks over what was removed
        self._len_max = len_max
        self.get: Final = self._entries.get
        """The value, as `dict.get` has it. A hit changes nothing."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V) -> None:
        """Add an entry, or replace it where it is."""
        if key not in self._entries and len(self._entries) >= self._len_max:
            self._entries.popitem(last=False)
        self._entries[key] = value
