"""The format of a model's answers: how it marks reasoning, and how it writes calls of functions.

An `AnswerFormat` is one value for the two that need it: the machine that reads answers, and the grammar that
makes the model write them. A call is a row of texts around two holes, the name and the arguments:

    opener  begin NAME middle ARGUMENTS end  [separator  begin NAME middle ARGUMENTS end ...]  closer

In a list, as above, opener and closer stand around all calls of the answer. Otherwise each call has its own,
and the separator stands between one's closer and the next one's opener.

Rules

1. Every text is as the model's own template writes it. Reading is lenient in one way only: where a text has
   white space, and wherever two of them meet, any white space may stand, or none.
2. Where a call is a JSON object with name and arguments as members (`envelope`), `begin`, `middle` and `end`
   are its usual spelling. It is read as JSON, with its members in any order.
3. A marker that is one token of the tokenizer is known by its id alone: the same characters made by other
   tokens are text. `AnswerFormat.pieces` says which of them are tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class ArgumentsKind(Enum):
    """The notation of a call's arguments."""

    JSON = "json"
    """A JSON object."""
    TAGGED = "tagged"
    """One element per argument (`CallFormat.argument`). A value is raw text if the argument's schema says
    that it is a string, or says nothing; else it is JSON."""
    PYTHON = "python"
    """Python's keyword arguments, with literals as values: `a=1, b='x'`."""
    RELAXED = "relaxed"
    """A JSON object with bare keys and strings between `CallFormat.delimiter`: `{a:1,b:<|"|>x<|"|>}`."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The members of a JSON object that is a call."""

    name: str = "name"
    arguments: str = "arguments"


@dataclass(frozen=True, slots=True)
class TaggedArgument:
    """One argument of a call in TAGGED notation: begin KEY middle VALUE end. White space at the end of
    `middle` and at the beginning of `end` is at most one line break, which is not part of the value."""

    begin: str
    middle: str
    end: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The notation of calls. The first of `openers` and `middles` is what the model writes by its template;
    the others are read, too."""

    openers: tuple[str, ...]
    """The texts that announce a call (or a list of them). An empty one announces nothing: see `is_bare`."""
    begin: str
    middles: tuple[str, ...]
    arguments: ArgumentsKind
    end: str
    closer: str
    separator: str
    is_list: bool
    envelope: Envelope | None = None
    argument: TaggedArgument | None = None
    """The notation of one argument. None unless it is TAGGED."""
    delimiter: str = ""
    """The text before and behind a string in RELAXED notation."""

    @property
    def opener(self) -> str:
        return self.openers[0]

    @property
    def middle(self) -> str:
        return self.middles[0]

    @property
    def bare_opener(self) -> str | None:
        """The opener that is no marker: nothing, or a bracket. None if every call has a marker."""
        if self.envelope is None and self.arguments is not ArgumentsKind.PYTHON:
            return None
        return next((opener for opener in self.openers if opener.strip() in ("", "[")), None)

    @property
    def is_bare(self) -> bool:
        """True if a call may come without any marker. It is looked for at the beginning of the text alone,
        and what it begins with (`{` or `[`) may begin other text as well."""
        return self.bare_opener is not None

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts from each of which on a call can be expected. Empty where calls are only bare: such a
        format has no trigger, and a call is the whole answer or none of it."""
        heads = [
            opener.strip() or self.begin.strip() for opener in self.openers if opener != self.bare_opener
        ]
        return tuple(heads)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of reasoning; the first of each is what the model writes."""

    openers: tuple[str, ...]
    closers: tuple[str, ...]

    @property
    def opener(self) -> str:
        return self.openers[0]

    @property
    def closer(self) -> str:
        return self.closers[0]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers, with the ids of its markers."""

    name: str
    reasoning: ReasoningFormat | None = None
    """The marks of reasoning. None for a model that has none."""
    calls: CallFormat | None = None
    """The format of calls. None for a model that has none."""
    call_ends_reasoning: bool = False
    """True if a call's marker within reasoning ends it. Otherwise it is part of the reasoning."""
    anchors: tuple[str, ...] = ()
    """The texts that begin an answer in the prompt. What stands behind the last of them was answered
    already, by the template or by a prefill."""
    ignored: tuple[str, ...] = ()
    """Other markers, which are left out of the text."""
    token_ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The ids of those markers, or parts of markers, that are one token each."""

    def pieces(self, text: str) -> tuple[str | int, ...]:
        """One of the format's texts as it is generated: token ids for the markers that are tokens, text for
        what is between them."""
        return tuple(_pieces(text, self.token_ids))

    def texts(self, *, with_calls: bool = True) -> Iterator[str]:
        """Every text of the format that may hold a marker."""
        yield from self.ignored
        if self.reasoning is not None:
            yield from (*self.reasoning.openers, *self.reasoning.closers)
        calls = self.calls
        if calls is not None and with_calls:
            yield from (*calls.openers, calls.begin, *calls.middles, calls.end, calls.closer)
            yield from (calls.separator, calls.delimiter)
            if calls.argument is not None:
                yield from (calls.argument.begin, calls.argument.middle, calls.argument.end)


def _pieces(text: str, token_ids: Mapping[str, int]) -> Iterator[str | int]:
    if not token_ids:
        if text:
            yield text
        return
    longest_first = sorted(token_ids, key=len, reverse=True)
    for piece in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text):
        if piece:
            yield token_ids.get(piece, piece)
