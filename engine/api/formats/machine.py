"""The machine that reads an answer: tokens in, parts out.

One rule decides what a call is. *A call begins where its name is whole and its arguments begin (or its end is
reached); it ends with its closing marker, or at the first thing that cannot be read as part of it.* Before
that beginning everything is text, word for word, its marker too. Behind that end everything is text again,
but a closing marker that comes late is left out. It does not matter whether the request has such a function.

What is left out of an answer is therefore: markers that were recognised, the white space between them and the
text beside them, and what a call is written with around its name and its arguments (members of its object
that mean neither, too). Everything else comes out, in its order, whatever the model wrote. Where the answer
ends within a call's arguments, they are the beginning of a JSON text.

Rules

1. The parts are the same however the answer was cut into tokens, joined where their kind is the same.
2. Text waits only while it may be the beginning of a marker, or white space before one, where markers are
   looked for; a call waits for its name, or for the end of a value (see `source`). All of this is bounded.
3. A token of plain text costs a look-up and a look at its last character.
4. A call that may come without a marker is looked for at the beginning of the answer alone.
5. `prompt_tail` is text that the model did not write in this answer: only reasoning that it leaves open
   counts, and whether the answer's text has begun.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final

import msgspec

from engine.api.answer.parts import Part, PartKind
from engine.api.formats import notations
from engine.api.formats.format import AnswerFormat, ArgumentsKind, CallFormat
from engine.api.formats.notations import Tags
from engine.api.formats.source import (
    MARKS,
    PARTIAL,
    Broken,
    MarkedSource,
    Marker,
    Reading,
    Spelling,
    markers,
    match,
)

SPACE_HELD_MAX: Final = 1024
"""The most characters of white space that wait for a marker."""
NAME_LEN_MAX: Final = 256
"""The most characters of a function's name."""
CALL_ID_LEN: Final = 9
"""The length of an id that every family's template takes."""
_ID_LETTERS: Final = string.ascii_letters + string.digits
_NAME: Final = re.compile(rf"[^\s<>{{}}\[\]()\"'=,;{MARKS}]{{1,{NAME_LEN_MAX}}}")


def mint_call_id() -> str:
    return "".join([secrets.choice(_ID_LETTERS) for _ in range(CALL_ID_LEN)])


class _Meaning(Enum):
    CALL = "call"
    REASONING = "reasoning"
    ANSWER = "answer"
    """The end of reasoning."""
    CLOSER = "closer"
    """The closing marker of a call that ended before it."""
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class _Watch:
    """The markers that are looked for in one kind of prose."""

    markers: tuple[tuple[_Meaning, Marker], ...]
    firsts: re.Pattern[str]
    """The characters that a marker can begin with."""

    @staticmethod
    def of(*found: tuple[_Meaning, Sequence[Marker]]) -> _Watch:
        pairs = tuple((meaning, marker) for meaning, all_ in found for marker in all_ if marker)
        firsts = "".join(sorted({re.escape(marker[0][0]) for _, marker in pairs}))
        return _Watch(pairs, re.compile(f"[{firsts}]" if firsts else "(?!)"))

    def look(self, text: str, *, is_whole: bool) -> tuple[int, _Meaning | None, int]:
        """The first marker: where it begins, what it means and where it ends. Without one, or if it may
        still become another, no meaning and up to where there is none."""
        for first in self.firsts.finditer(text):
            at = first.start()
            ends = [(match(marker, text, at), meaning) for meaning, marker in self.markers]
            if not is_whole and any(end == PARTIAL for end, _ in ends):
                return at, None, at
            whole = [(end, meaning) for end, meaning in ends if end >= 0]
            if whole:
                end, meaning = max(whole, key=lambda pair: pair[0])
                return at, meaning, end
        return len(text), None, len(text)


@dataclass(frozen=True, slots=True)
class _Tables:
    """A format as the machine uses it; made once."""

    spelling: Spelling
    text: _Watch
    unclosed: _Watch
    """For text behind a call whose closing marker did not come."""
    reasoning: _Watch
    is_looking: bool
    """True if calls are looked for."""
    bare: str
    """The character that a call without a marker begins with. Empty where there is none."""
    bare_len: int
    """How many characters are passed before such a call is read."""
    middles: tuple[Marker, ...]
    begin: Marker
    end: Marker
    separator: Marker
    closer: Marker
    delimiter: Marker
    tags: Tags | None


@lru_cache(maxsize=64)
def _tables(format_: AnswerFormat, is_looking: bool) -> _Tables:
    calls = format_.calls if is_looking else None
    own = list(format_.texts(with_calls=calls is not None))
    spelling = Spelling({t: i for t, i in format_.token_ids.items() if any(t in text for text in own)})
    reasoning = format_.reasoning
    opens = markers(spelling, format_, () if reasoning is None else reasoning.openers)
    closes = markers(spelling, format_, () if reasoning is None else reasoning.closers)
    ignored = markers(spelling, format_, format_.ignored)
    heads = () if calls is None else markers(spelling, format_, _heads(calls))
    text = (_Meaning.CALL, heads), (_Meaning.REASONING, opens), (_Meaning.IGNORED, ignored)
    closer = () if calls is None else spelling.marker(format_, calls.closer)
    late = (closer,) if len("".join(closer)) > 1 else ()  # a lone bracket may be anything
    tags_end = () if calls is None or calls.argument is None else markers(spelling, format_, (calls.end,))
    interrupting = heads if format_.call_ends_reasoning else ()

    def marker(text: str) -> Marker:
        return spelling.marker(format_, text)

    return _Tables(
        spelling=spelling,
        text=_Watch.of(*text),
        unclosed=_Watch.of(*text, (_Meaning.IGNORED, tags_end), (_Meaning.CLOSER, late)),
        reasoning=_Watch.of((_Meaning.ANSWER, closes), (_Meaning.CALL, interrupting)),
        is_looking=calls is not None,
        bare="" if calls is None or calls.bare_opener is None else calls.bare_opener or "{",
        bare_len=0 if calls is None else len(calls.bare_opener or ""),
        middles=() if calls is None else tuple(marker(middle) for middle in calls.middles),
        begin=() if calls is None else marker(calls.begin),
        end=() if calls is None else marker(calls.end),
        separator=() if calls is None else marker(calls.separator),
        closer=closer,
        delimiter=() if calls is None else marker(calls.delimiter),
        tags=None if calls is None else _tags(calls, marker),
    )


def _heads(calls: CallFormat) -> list[str]:
    """The texts that are looked for: each opener that is a marker, with what follows it always."""
    behind = calls.begin if calls.envelope is None else ""
    return [opener + behind for opener in calls.openers if opener != calls.bare_opener]


def _tags(calls: CallFormat, marker: Callable[[str], Marker]) -> Tags | None:
    tags = calls.argument
    if tags is None:
        return None
    return Tags(
        marker(tags.begin),
        marker(tags.middle),
        marker(tags.end),
        skips_break=tags.middle[-1:].isspace(),
        drops_break=tags.end[:1].isspace(),
    )


class AnswerMachine:
    """Reads one answer."""

    __slots__ = ("_mark_of", "_reader", "_run", "reasoning_tokens")

    def __init__(
        self,
        format_: AnswerFormat,
        prompt_tail: str,
        *,
        tools: Mapping[str, Any] | None,
        mint: Callable[[], str] = mint_call_id,
    ) -> None:
        """`tools` has the schema of each function's parameters by its name; None if calls are not looked
        for. `mint` makes the id of a call."""
        self._reader = reader = _Reader(format_, _begun(format_, prompt_tail), tools, mint)
        self._mark_of = reader.tables.spelling.mark_of
        self._run: Final = reader.read()
        self.reasoning_tokens = 0
        """The number of tokens of the reasoning, its markers among them."""
        next(self._run)

    @property
    def is_reasoning(self) -> bool:
        return self._reader.is_reasoning

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._reader.calls

    def feed(self, token_id: int, text: str) -> list[Part]:
        """Take a token, and the text that the decoder released with it. Returns the parts that are certain
        now, which may be none."""
        mark, reader = self._mark_of.get(token_id), self._reader
        if mark is not None:
            text = text.removesuffix(mark[1]) + mark[0]
        elif reader.free is not None and not text[-1:].isspace() and reader.firsts.search(text) is None:
            self.reasoning_tokens += reader.is_reasoning
            return [Part(text, reader.free)] if text else []
        was_reasoning = reader.is_reasoning
        parts = self._take(text) if text else []
        self.reasoning_tokens += was_reasoning or reader.is_reasoning
        return parts

    def finish(self) -> list[Part]:
        """The parts that were held back, once nothing more comes."""
        self._reader.source.is_whole = True
        return self._take("")

    def _take(self, text: str) -> list[Part]:
        reader = self._reader
        reader.source.text += text
        next(self._run, None)
        parts, reader.parts = reader.parts, []
        return parts


class _Reader:
    """The state of an answer's reader, apart from the generator that runs it: they would refer to each
    other."""

    def __init__(
        self,
        format_: AnswerFormat,
        begun: PartKind | None,
        tools: Mapping[str, Any] | None,
        mint: Callable[[], str],
    ) -> None:
        self.tables = _tables(format_, tools is not None)
        self.source = MarkedSource()
        self.parts: list[Part] = []
        """The parts that are certain and were not taken."""
        self.is_reasoning = begun is PartKind.REASONING
        self.calls = 0
        self.free: PartKind | None = None
        """The kind of text that passes without being looked at, unless it holds one of `firsts`. None where
        none does."""
        self.firsts = self.tables.text.firsts
        self._calls_format = format_.calls
        self._tools = tools or {}
        self._mint = mint
        self._at_start = begun is None
        """True until the answer's text begins: a bare call can only come now."""
        self._is_trimming = self.is_reasoning
        """True while white space is left out, behind a marker."""
        self._is_unclosed = False
        """True if the closing marker of a call did not come."""

    def _emit(self, text: str, kind: PartKind) -> None:
        if text:
            text = self.tables.spelling.plain(text)
            last = self.parts[-1] if self.parts else None
            if last is not None and last.kind is kind and kind is not PartKind.CALL:
                self.parts[-1] = last._replace(text=last.text + text)
            else:
                number = self.calls - 1 if kind is PartKind.ARGUMENTS else -1
                self.parts.append(Part(text, kind, number))

    # -- prose ------------------------------------------------------------------------------------

    def read(self) -> Reading[None]:
        """Read the whole answer."""
        while True:
            meaning, lead_len = yield from self._prose()
            if meaning is None:
                return
            if meaning is _Meaning.CALL:
                yield from self._attempt(lead_len)
                continue
            self.source.drop()
            self._is_trimming = True
            if meaning is _Meaning.CLOSER:
                self._is_unclosed = False
            elif meaning is not _Meaning.IGNORED:
                self.is_reasoning = meaning is _Meaning.REASONING

    def _prose(self) -> Reading[tuple[_Meaning | None, int]]:
        """Release prose up to a marker, and pass that. White space before it is neither passed nor released
        where a call may begin, which may turn out to be text: then its length is returned, too. No meaning
        at the end of the answer."""
        source = self.source
        while True:
            if self._is_trimming:
                source.text = source.text.lstrip()
                self._is_trimming = not source.text
            watch = self._watch()
            at, meaning, end = self._bare() or watch.look(source.text, is_whole=source.is_whole)
            if meaning is None and source.is_whole:
                self._release(len(source.text))
                return None, 0
            kept = len(source.text[:at].rstrip()) if self.tables.is_looking or self.is_reasoning else at
            self._release(max(kept, at - SPACE_HELD_MAX))
            if meaning is not None:
                lead_len = at - kept if at - kept <= SPACE_HELD_MAX else SPACE_HELD_MAX
                source.at = lead_len + end - at
                return meaning, lead_len
            waits_for_bare = self._at_start and bool(self.tables.bare) and not self.is_reasoning
            if not (source.text or self._is_trimming or waits_for_bare):
                self.free = PartKind.REASONING if self.is_reasoning else PartKind.TEXT
                self.firsts = watch.firsts
            yield
            self.free = None

    def _watch(self) -> _Watch:
        if self.is_reasoning:
            return self.tables.reasoning
        return self.tables.unclosed if self._is_unclosed else self.tables.text

    def _bare(self) -> tuple[int, _Meaning | None, int] | None:
        """The place, meaning and length of what is next (`_Watch.look`): a call without a marker, or white
        space before what may be one. None if there can be none."""
        text, bare = self.source.text, self.tables.bare
        if not (bare and self._at_start) or self.is_reasoning:
            return None
        at = len(text) - len(text.lstrip())
        if at == len(text):
            return (at, None, at) if at <= SPACE_HELD_MAX else None
        if text[at] != bare or at > SPACE_HELD_MAX:
            return None
        return at, _Meaning.CALL, at + self.tables.bare_len

    def _release(self, length: int) -> None:
        """Release what the source begins with."""
        source = self.source
        if length:
            self._emit(source.text[:length], PartKind.REASONING if self.is_reasoning else PartKind.TEXT)
            source.text = source.text[length:]
            self._at_start = self._at_start and self.is_reasoning

    # -- calls ------------------------------------------------------------------------------------

    def _attempt(self, lead_len: int) -> Reading[None]:
        """Read one or more calls, whose marker was passed. What turns out to be none is given back: its first
        character is text, and what follows it is looked at again."""
        source, calls_before = self.source, self.calls
        source.holds = True
        with suppress(Broken):
            yield from self._calls()
        if source.holds:
            source.holds, source.at = False, 0
            self._release((lead_len if self.calls == calls_before else 0) + 1)
        else:
            source.drop()
            self._is_trimming = True

    def _calls(self) -> Reading[None]:
        calls, tables, source = self._calls_format, self.tables, self.source
        assert calls is not None
        while True:
            if calls.envelope is not None:
                yield from self._envelope(calls)
            else:
                yield from self._named(calls)
            yield from source.space()
            if tables.end and calls.envelope is None:
                yield from source.accepts(tables.end, at_end=True)
                yield from source.space()
            if not calls.is_list:
                break
            source.drop()
            source.holds = True
            if not (yield from source.accepts(tables.separator)):
                source.holds = False
                break
            yield from source.space()
            if tables.begin and calls.envelope is None and not (yield from source.accepts(tables.begin)):
                raise Broken
        self._is_unclosed = not (yield from source.accepts(tables.closer, at_end=True))

    def _begin(self, name: str) -> None:
        """Begin a call: from here on it is one."""
        self.source.holds = False
        self.is_reasoning = self._at_start = False
        self._is_unclosed = True
        self.calls += 1
        name = self.tables.spelling.plain(name)
        self.parts.append(Part(name, PartKind.CALL, self.calls - 1, self._mint()))

    def _arguments(self, text: str) -> None:
        self._emit(text, PartKind.ARGUMENTS)

    def _named(self, calls: CallFormat) -> Reading[None]:
        """A call whose name stands before its arguments."""
        source, tables, plain = self.source, self.tables, self.tables.spelling.plain
        yield from source.space()
        found = yield from source.matched(_NAME, _NAME)
        if found is None:
            raise Broken
        name, source.at = found.group(), found.end()
        yield from source.space()
        if not (yield from source.accepts(*tables.middles)):
            raise Broken
        emit = self._arguments
        if calls.arguments is ArgumentsKind.PYTHON:
            yield from notations.keywords(source, emit, lambda: self._begin_once(name), plain)
            return
        if calls.arguments is ArgumentsKind.TAGGED:
            self._begin(name)
            assert tables.tags is not None
            yield from notations.tagged(source, emit, tables.tags, self._schema(name), plain)
            return
        if (yield from source.space()) != "{":
            raise Broken
        self._begin(name)
        if calls.arguments is ArgumentsKind.RELAXED:
            yield from notations.relaxed(source, emit, tables.delimiter, plain)
        else:
            yield from notations.json_value(source, emit)

    def _begin_once(self, name: str) -> None:
        if self.source.holds:
            self._begin(name)

    def _schema(self, name: str) -> Mapping[str, Any]:
        schema = self._tools.get(name)
        return schema if isinstance(schema, Mapping) else {}

    def _envelope(self, calls: CallFormat) -> Reading[None]:
        """A call that is a JSON object with name and arguments as members, in any order."""
        source, envelope = self.source, calls.envelope
        assert envelope is not None
        if (yield from source.space()) != "{":
            raise Broken
        source.at += 1
        name, held = "", ""
        char = yield from source.space()
        while char != "}":
            key = yield from self._key()
            if key == envelope.name and not name and source.holds:
                name = yield from self._name()
            elif key in (envelope.arguments, "arguments", "parameters") and not held and source.holds:
                if name and (yield from source.peek()) == "{":
                    self._begin(name)
                    yield from notations.json_value(source, self._arguments)
                else:
                    held = _object_text((yield from self._held_value()))
            else:
                yield from self._held_value()
            char = yield from source.space()
            if char == ",":
                source.at += 1
                char = yield from source.space()
                if char == "}":
                    raise Broken
            elif char != "}":
                raise Broken
        source.at += 1
        if source.holds:
            if not name or (not held and self._is_bare_here(calls)):
                raise Broken
            self._begin(name)
            self._arguments(held or "{}")

    def _is_bare_here(self, calls: CallFormat) -> bool:
        return calls.is_bare and self.source.text.lstrip()[:1] == self.tables.bare

    def _key(self) -> Reading[str]:
        if (yield from self.source.peek()) != '"':
            raise Broken
        key = yield from notations.json_string(self.source)
        if (yield from self.source.space()) != ":":
            raise Broken
        self.source.at += 1
        if not (yield from self.source.space()):
            raise Broken
        return key[1:-1]

    def _name(self) -> Reading[str]:
        if (yield from self.source.peek()) != '"':
            raise Broken
        name = _decoded((yield from notations.json_string(self.source)))
        if _NAME.fullmatch(name) is None:
            raise Broken
        return name

    def _held_value(self) -> Reading[str]:
        """Pass a JSON value, and return its text, if it may still have to be given back."""
        source, pieces = self.source, list[str]()
        char = yield from source.peek()
        if char == '"':
            return (yield from notations.json_string(source))
        if char in ("{", "["):
            holds = source.holds
            yield from notations.json_value(source, pieces.append if holds else _forget)
            if source.is_whole and source.at == len(source.text):
                raise Broken
            return "".join(pieces)
        scalar = notations.scalar_json((yield from notations.json_scalar(source)))
        if scalar is None:
            raise Broken
        return scalar


def _forget(_: str) -> None:
    pass


def _object_text(value: str) -> str:
    """The arguments of a call, which were not passed on as they came, as an object: null is an empty one, and
    a string that holds an object's JSON is that object. Raises Broken for anything else."""
    if value == "null":
        return "{}"
    inner = _decoded(value).strip() if value.startswith('"') else value
    try:
        msgspec.json.decode(inner.encode(), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise Broken from None
    return inner


def _decoded(text: str) -> str:
    """A JSON string's value. Empty where it is none that a name or an object can be."""
    try:
        return msgspec.json.decode(text.encode(), type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return ""


def _begun(format_: AnswerFormat, prompt_tail: str) -> PartKind | None:
    """The part of the answer that the end of the prompt has begun: reasoning that is open, or text. None for
    nothing."""
    found = [(prompt_tail.rfind(anchor), anchor) for anchor in format_.anchors if anchor in prompt_tail]
    if found:
        at, anchor = max(found, key=lambda pair: pair[0] + len(pair[1]))
        begun = prompt_tail[at + len(anchor) :]
    else:
        begun = ""
    reasoning = format_.reasoning
    if reasoning is not None:
        openers = tuple(opener.strip() for opener in reasoning.openers)
        opened = max(map(begun.rfind, openers))
        closers = [closer.strip() for closer in reasoning.closers]
        closed = max((begun.rfind(text) + len(text) for text in closers if text in begun), default=0)
        if (opened >= 0 and opened >= closed) or prompt_tail.rstrip().endswith(openers):
            return PartKind.REASONING
        begun = begun[closed:]
    return PartKind.TEXT if begun.strip() else None
