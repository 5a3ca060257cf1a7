"""Stop strings, found in a text that comes in pieces, at a cost per character that does not grow with their
number.

The automaton is that of Aho and Corasick, "Efficient String Matching: An Aid to Bibliographic Search" (1975).
A state is the longest suffix of the text so far that is the beginning of a stop string: exactly what must be
held back. State 0 is the empty one. A character that continues it leads to a state that is one character
longer; where none does, the longest shorter suffix that is a beginning (`fails`) is tried, and so on.

The states of a stop string are numbered in a row, behind those that it shares with the stop string before it:

    stop strings "ab", "ad", "b":     state      0        1        2    3    4
                                      it is      (empty)  a        ab   ad   b
                                      nexts      a        b        -    -    -     leads to the next number
                                      branches   b to 4   d to 3

So what continues a state is nearly always one character. A request of the largest stop strings takes 40 KB,
which all of its choices share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

_NONE: Final = "\ud800"
"""Half a character, which no text has."""


class StopStrings:
    """The stop strings of a request, with what every choice needs to find them, which is made once."""

    __slots__ = ("_branches", "_fails", "_nexts", "depths", "first_chars", "longest")

    def __init__(self, stops: Sequence[str]) -> None:
        assert stops
        assert all(stops)
        self.first_chars: Final = frozenset(stop[0] for stop in stops)
        self.depths: Final = array("H", [0])
        """The number of characters of each state."""
        self._branches: Final[dict[int, dict[str, int]]] = {}
        nexts, ends, before, path = [_NONE], dict[int, int](), "", [0]
        for stop in sorted(set(stops)):
            shared_len = _shared_len(before, stop)
            state, new = path[shared_len], len(self.depths)
            if state == new - 1:  # the stop string before, whole
                nexts[state] = stop[shared_len]
            else:
                self._branches.setdefault(state, {})[stop[shared_len]] = new
            nexts += (*stop[shared_len + 1 :], _NONE)
            self.depths.extend(range(shared_len + 1, len(stop) + 1))
            path[shared_len + 1 :] = range(new, len(self.depths))
            ends[path[-1]] = len(stop)
            before = stop
        self._nexts: Final = "".join(nexts)
        self._fails: Final = array("H", [0]) * len(nexts)
        self.longest: Final = array("H", [0]) * len(nexts)
        """The length of the longest stop string that ends where a state does; 0 where none does."""
        states = [0]
        for state in states:  # the shortest first: it grows meanwhile
            others = self._branches.get(state)
            for char, longer in ((nexts[state], state + 1), *(others.items() if others else ())):
                if char != _NONE:
                    fail = self._fails[longer] = self.step(self._fails[state], char) if state else 0
                    self.longest[longer] = ends.get(longer) or self.longest[fail]
                    states.append(longer)

    def step(self, state: int, char: str) -> int:
        """The state behind one more character."""
        while self._nexts[state] != char:
            if state in self._branches and (longer := self._branches[state].get(char)) is not None:
                return longer
            if not state:
                return 0
            state = self._fails[state]
        return state + 1


def _shared_len(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (own, others) in pairs if own != others), min(len(one), len(other)))


class StopMatcher:
    """The search for a request's stop strings in the text of one choice."""

    __slots__ = ("_state", "_strings")

    def __init__(self, strings: StopStrings) -> None:
        self._strings: Final = strings
        self._state = 0

    @property
    def held_len(self) -> int:
        """Length of the longest suffix of the text so far that is the beginning of a stop string."""
        return self._strings.depths[self._state]

    def feed(self, text: str) -> tuple[int, int] | None:
        """Take the next piece of text. Returns None unless a stop string completes in it, else (number of
        characters of `text` up to its end, length of the longest that completes there); after that the
        matcher must not be used."""
        state, first_chars = self._state, self._strings.first_chars
        if not state and first_chars.isdisjoint(text):
            return None  # nearly always: no stop string has begun, and none begins here
        step, longest = self._strings.step, self._strings.longest
        for taken, char in enumerate(text, 1):
            if state or char in first_chars:
                state = step(state, char)
                if longest[state]:
                    return taken, longest[state]
        self._state = state
        return None
