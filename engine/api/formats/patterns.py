"""The patterns of a response template, as rows of texts and holes; none is ever matched as an expression.

A checkpoint's patterns are input. What formats say by them are markers with white space between them, and a
name that ends where a marker begins; so that is all that is understood: literals, white space (`\\s*`),
alternatives and optional parts that spell out to a few literals, and named groups around one repeated class.
Anything else is refused by its name. Reading costs what the pattern has of characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Final, NoReturn

PATTERN_LEN_MAX: Final = 1024
SPELLINGS_MAX: Final = 16
"""The most rows that one pattern may stand for."""
DEPTH_MAX: Final = 8
"""The most groups within each other."""
REPEATS_MAX: Final = 64
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_QUANTIFIER: Final = re.compile(r"([*+?]|\{(\d{0,4})(,?)(\d{0,4})\})[?+]?")
_GROUP: Final = re.compile(r"\((?:\?:|\?P<(\w+)>|(\?[^:P]|\?P[^<]))?")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_SPACE_CLASS: Final = re.compile(r"\[(?:\\[snrt]|\s)+\]")


class BadPattern(ValueError):
    """The pattern says more than a row of texts and holes. The message names what."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A named group: what the model fills in."""

    name: str


@dataclass(frozen=True, slots=True)
class _Space:
    """White space. `written` is how it is spelled where only one spelling was allowed."""

    written: str = ""


_Row = tuple["str | Hole | _Space", ...]
Row = tuple["str | Hole", ...]


def rows(pattern: str) -> tuple[Row, ...]:
    """The rows that a pattern stands for: texts, each followed by a hole or the end. Raises BadPattern."""
    if len(pattern) > PATTERN_LEN_MAX:
        raise BadPattern(f"has more than {PATTERN_LEN_MAX} characters")
    reader = _Reader(pattern)
    found = reader.alternatives(0)
    if reader.at < len(pattern):
        raise BadPattern("has a parenthesis that closes nothing")
    return tuple(dict.fromkeys(_joined(row) for row in found))


def _joined(row: _Row) -> Row:
    """The row with its neighbouring texts joined. White space becomes what a template would write there: a
    line break behind a tag, and a blank elsewhere."""
    joined: list[str | Hole] = []
    for item in row:
        before = joined[-1] if joined and isinstance(joined[-1], str) else ""
        if isinstance(item, _Space):
            item = item.written or ("\n" if before.endswith(">") or not before else " ")
        if isinstance(item, str) and item.isspace() and before[-1:].isspace():
            continue
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        elif item:
            joined.append(item)
    return tuple(joined)


class _Reader:
    """Reads a pattern from its beginning."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> list[_Row]:
        """The rows up to the end of the group or of the pattern."""
        if depth > DEPTH_MAX:
            raise BadPattern(f"has groups within groups, more than {DEPTH_MAX} deep")
        found: list[_Row] = []
        row: list[_Row] = [()]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.pattern[self.at] == "|":
                self.at += 1
                found, row = found + row, [()]
                continue
            item = self._repeated(self._item(depth))
            if len(row) * len(item) + len(found) > SPELLINGS_MAX:
                raise BadPattern(f"stands for more than {SPELLINGS_MAX} texts")
            row = [before + behind for before, behind in product(row, item)]
        return found + row

    def _item(self, depth: int) -> list[_Row]:
        char = self.pattern[self.at]
        if char == "(":
            return self._group(depth)
        if char == "[":
            return [(self._class(),)]
        if char == ".":
            self._refuse("any character (.)")
        if char in "^$":
            self._refuse(f"an anchor ({char})")
        if char in "*+?{":
            self._refuse(f"{char} with nothing to repeat")
        self.at += 1
        if char != "\\":
            return [(char,)]
        escaped = self.pattern[self.at : self.at + 1]
        self.at += 1
        if escaped == "s":
            return [(_Space(),)]
        if not escaped or (escaped.isalnum() and escaped not in _ESCAPED):
            self._refuse(f"\\{escaped} outside of a named group")
        return [(_ESCAPED.get(escaped, escaped),)]

    def _group(self, depth: int) -> list[_Row]:
        begun = _GROUP.match(self.pattern, self.at)
        assert begun is not None
        name, other = begun.groups()
        if other:
            self._refuse(f"a group that looks around or refers back (({other})")
        self.at = begun.end()
        if name is None:
            found = self.alternatives(depth + 1)
        else:
            self._filling(name)
            found = [(Hole(name),)]
        if self.pattern[self.at : self.at + 1] != ")":
            self._refuse("a group that is not closed, or a named one around more than one repeated class")
        self.at += 1
        return found

    def _filling(self, name: str) -> None:
        """Pass over what a named group holds: one class, repeated. Where the hole ends is said by the text
        behind it."""
        char = self.pattern[self.at : self.at + 1]
        if char == "[":
            filled = _CLASS.match(self.pattern, self.at)
            self.at = filled.end() if filled is not None else len(self.pattern)
        elif char == "." or (char == "\\" and self.pattern[self.at + 1 : self.at + 2] in tuple("wSdD")):
            self.at += 1 if char == "." else 2
        else:
            self._refuse(f"a group {name} that is not one repeated class")
        quantifier = _QUANTIFIER.match(self.pattern, self.at)
        self.at = self.at if quantifier is None else quantifier.end()

    def _class(self) -> _Space:
        found = _SPACE_CLASS.match(self.pattern, self.at)
        if found is None:
            self._refuse("a class of characters outside of a named group")
        self.at = found.end()
        return _Space()

    def _repeated(self, item: list[_Row]) -> list[_Row]:
        """An item with the quantifier that follows it, if one does."""
        quantifier = _QUANTIFIER.match(self.pattern, self.at)
        if quantifier is None:
            return item
        self.at = quantifier.end()
        if len(item) == 1 and all(
            isinstance(part, _Space) or part in _ESCAPED.values() or part == " " for part in item[0]
        ):
            [row] = item
            written = "".join(part.written if isinstance(part, _Space) else str(part) for part in row)
            return [(_Space(written),)]
        low, high = _bounds(quantifier)
        if high is None or high > REPEATS_MAX:
            self._refuse("a repeat without a small bound")
        if any(isinstance(part, Hole) for row in item for part in row):
            self._refuse("a repeat of a named group")
        if (high - low + 1) * len(item) > SPELLINGS_MAX or (high > 1 and len(item) > 1):
            self._refuse(f"a repeat that stands for more than {SPELLINGS_MAX} texts")
        return [row * count for count in range(high, low - 1, -1) for row in item]

    def _refuse(self, what: str) -> NoReturn:
        raise BadPattern(f"has {what} at character {self.at}, which is not supported")


def _bounds(quantifier: re.Match[str]) -> tuple[int, int | None]:
    """The least and the greatest number of repeats; None for one without end."""
    sign = quantifier.group(1)
    if sign[0] in "*+?":
        return (1 if sign == "+" else 0), (1 if sign == "?" else None)
    low, comma, high = quantifier.group(2, 3, 4)
    first = int(low or 0)
    return first, (int(high) if high else None) if comma else first
