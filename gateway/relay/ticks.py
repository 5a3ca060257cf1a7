"""The times at which an answer's events were passed on, as the waterfall shows them.

Rules:

1. There are `TICKS_MAX` at most. When they are full, every second one is dropped, and from then on twice as
   many events lie between two of them: an answer of any length has its ticks over all of its length.
2. There is one for a read from the engine at most, however many events it brought. As long as no tick is due,
   a read costs the comparison of two ints, and no look at the clock.
"""

from __future__ import annotations

from array import array
from typing import Final

from msgspec import Struct, field

TICKS_MAX: Final = 64
"""Ticks of one answer."""
TICK_LEN: Final = 16
"""Bytes that a tick takes."""


def _floats() -> array[float]:
    return array("d")


def _ints() -> array[int]:
    return array("q")


class Ticks(Struct, eq=False):
    """When events were passed on, and how many there were by then."""

    at_s: array[float] = field(default_factory=_floats)
    """The times, in seconds on the clock."""
    events: array[int] = field(default_factory=_ints)
    """The events that were passed on by then, this read's included."""
    stride: int = 1
    """The least number of events between two ticks."""
    due: int = 1
    """The number of events at which the next tick is due."""

    def __len__(self) -> int:
        return len(self.events)

    def note(self, events: int, now_s: float) -> None:
        """Note that so many events were passed on by now, `due` of them or more."""
        if len(self.events) == TICKS_MAX:
            self.at_s, self.events, self.stride = self.at_s[::2], self.events[::2], self.stride * 2
        self.at_s.append(now_s)
        self.events.append(events)
        self.due = events + self.stride

    def since(self, began_s: float) -> list[tuple[float, int]]:
        """Each tick in milliseconds from then on, with its events."""
        return [
            (round((at_s - began_s) * 1e3, 3), events)
            for at_s, events in zip(self.at_s, self.events, strict=True)
        ]
