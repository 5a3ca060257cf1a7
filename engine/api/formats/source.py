"""The text of an answer that is still to be read, and the waiting for more of it.

The readers of an answer are generators: one that needs more text than there is yields, and goes on where it
was when more has come. So they read as if the whole text were there, nothing is scanned twice, and how the
text was cut cannot matter: every decision is made on text alone, never on where it ends for the moment.

A marker that is one token is one character here: a lone surrogate, which no decoder ever makes. It is spelled
out again (`Spelling`) wherever it turns out to be text.

What has been read is kept while it may still have to be given back as text (`holds`), and dropped otherwise.
Either way `HELD_LEN_MAX` bounds what waits: Broken is raised beyond.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Final, TypeVar

from engine.api.formats.format import AnswerFormat

HELD_LEN_MAX: Final = 64 * 1024
"""The most characters of a call that wait for something, such as its name or the end of a value."""
GAP_LEN_MAX: Final = 64
"""The most characters of white space within a marker."""
_MARKS_BEGIN: Final = 0xDC00
MARKS_MAX: Final = 256
MARKS: Final = f"{chr(_MARKS_BEGIN)}-{chr(_MARKS_BEGIN + MARKS_MAX - 1)}"
"""The marks, as they stand in a class of a regular expression."""
NONE: Final = -1
"""The text is not there."""
PARTIAL: Final = -2
"""The text may be there: its beginning is, and then the source ends for now."""

_SPACE: Final = re.compile(r"\s*")

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader: it yields where it needs more text."""
Marker = tuple[str, ...]
"""The texts of a marker, between which white space may stand."""


class Broken(Exception):
    """The text that comes next cannot be read as the part that was expected."""


class Spelling:
    """The marks of a format's tokens, and their texts."""

    __slots__ = ("_of_text", "_texts", "mark_of")

    def __init__(self, tokens: Mapping[str, int]) -> None:
        names = list(tokens)[:MARKS_MAX]
        marks = {text: chr(_MARKS_BEGIN + number) for number, text in enumerate(names)}
        self._of_text = {tokens[text]: mark for text, mark in marks.items()}
        self._texts = {ord(mark): text for text, mark in marks.items()}
        self.mark_of: Mapping[int, tuple[str, str]] = {
            tokens[text]: (mark, text) for text, mark in marks.items()
        }
        """The mark of a token, and its text, by its id."""

    def marker(self, format_: AnswerFormat, text: str) -> Marker:
        """A text of the format as a marker to look for."""
        pieces = format_.pieces(text)
        return tuple("".join(self._of_text.get(p, "") if isinstance(p, int) else p for p in pieces).split())

    def plain(self, text: str) -> str:
        """The text with its marks spelled out."""
        return text if text.isascii() or not self._texts else text.translate(self._texts)


def match(marker: Marker, text: str, at: int) -> int:
    """Where the marker ends, if it stands at this place; else NONE or PARTIAL."""
    for number, literal in enumerate(marker):
        if number:
            began, at = at, space_end(text, at)
            if at - began > GAP_LEN_MAX:
                return NONE
        if not text.startswith(literal, at):
            rest = len(text) - at
            return PARTIAL if rest < len(literal) and literal.startswith(text[at:]) else NONE
        at += len(literal)
    return at


def space_end(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


class MarkedSource:
    """The text that has come and is not read yet."""

    __slots__ = ("at", "holds", "is_whole", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """Where reading goes on."""
        self.holds = False
        """True while what was read may have to be given back."""
        self.is_whole = False
        """True if no more text comes."""

    def drop(self) -> None:
        """Forget what was read."""
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Reading[bool]:
        """Wait for more text. False if there is none. Raises Broken where too much waits already."""
        if self.is_whole:
            return False
        if not self.holds:
            self.drop()
        if len(self.text) > HELD_LEN_MAX:
            raise Broken
        yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, which is not passed. Empty at the end."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def space(self) -> Reading[str]:
        """Pass white space. The next character, as `peek` has it."""
        while True:
            self.at = space_end(self.text, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if not (yield from self.more()):
                return ""

    def accepts(self, *markers: Marker, at_end: bool = False) -> Reading[bool]:
        """Pass the longest of the markers that is here. False if none is. `at_end` says that the beginning of
        one counts where the answer ends."""
        while True:
            ends = [match(marker, self.text, self.at) for marker in markers]
            if PARTIAL in ends:
                if (yield from self.more()):
                    continue
                if at_end:
                    self.at = len(self.text)
                    return True
            end = max(ends, default=NONE)
            if end >= 0:
                self.at = end
            return end >= 0

    def matched(self, whole: re.Pattern[str], partial: re.Pattern[str]) -> Reading[re.Match[str] | None]:
        """The match of `whole` here, which is not passed. None if there is none. More text is waited for
        while all there is matches `partial`."""
        while True:
            if partial.fullmatch(self.text, self.at) is None or not (yield from self.more()):
                return whole.match(self.text, self.at)


def markers(spelling: Spelling, format_: AnswerFormat, texts: Sequence[str]) -> tuple[Marker, ...]:
    return tuple(spelling.marker(format_, text) for text in texts)
