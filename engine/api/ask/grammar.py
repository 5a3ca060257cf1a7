"""The one grammar that a whole answer follows: its reasoning, its text or structure, and its calls.

    [reasoning  close]  text or structure, or calls, or text with calls in it

What it looks like depends on what the request asks:

- **structure alone**: the structure, and then the end.
- **`required`, or a function by name**: the calls and nothing else, in the family's own format, their
  arguments by their schemas.
- **`auto`**: any text up to what triggers a call; from there on a function's name and all that stands around
  its arguments hold, and the arguments by their schema if it is strict. A format without a mark of its own
  for calls (a bare JSON object, a list of Python's calls) has its first character for a trigger, at the
  beginning of the answer alone. With a structure, the text is the structure.
- **`none`**: no trigger anywhere.
- **`parallel_tool_calls: false`**: one call, and then the end.
- **reasoning**: any text up to its closing mark, where the prompt's end opened it; where it did not, the
  model may open it itself. A thinking budget cuts it off, and the mark is all that can follow. In a family
  whose calls end reasoning, a call may come from within.

Rules

1. Nothing that is not constrained has a grammar, which would cost each of its tokens a mask.
2. An answer that follows a grammar has the tokens of the format's marks in their places alone, and no other
   special token. Its end is one of the model's own ends.
3. Of a schema that is not strict, what cannot be held is left out and named. Where the rest cannot be held
   either, or makes the grammar too large, a function's arguments are any object, and that is named.
4. A function is called with the arguments that it lists, unless its schema says more of others; one without
   a schema with none.
5. What cannot be compiled is the caller's mistake, by the name of the field that it came in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from engine.api.formats import lark
from engine.api.formats.arguments import Arguments
from engine.api.formats.format import AnswerFormat, CallFormat
from engine.api.formats.lark import Rules
from engine.api.formats.own_grammars import checked_grammar
from engine.contract.grammars import BadGrammar, Vocabulary, compiled
from shared.apis.patterns import check_pattern
from shared.apis.schemas import SIZE_MAX, HeldSchema, held_schema
from shared.apis.structure import Structure, StructureKind
from shared.apis.tools import NO_CALLS, AskedFunction, FunctionSpec, ToolChoice, ToolMode
from shared.wire.errors import InvalidRequest, UnsupportedParameter


@dataclass(frozen=True, slots=True)
class AskedForm:
    """The part of a request that shapes its answer."""

    functions: tuple[FunctionSpec, ...] = ()
    choice: ToolChoice = NO_CALLS
    is_parallel: bool = True
    structure: Structure | None = None
    thinking_budget: int | None = None
    """The most tokens of reasoning. None for no bound."""
    thinking_param: str = "thinking_token_budget"
    """The name of the field with the budget."""
    places: tuple[str, ...] = ()
    """The places in the request of the functions' schemas. Empty for those of chats."""

    def place_of(self, spec: FunctionSpec) -> str:
        """The place of a function's schema."""
        index = self.functions.index(spec)
        return self.places[index] if self.places else f"tools[{index}].function.parameters"


@dataclass(frozen=True, slots=True)
class Grammar:
    """An answer's grammar."""

    text: str = ""
    """The grammar as llguidance reads it; empty where nothing is constrained."""
    ignored: tuple[str, ...] = ()
    """The parts of schemas that are not strict which are left out, by their places in the request."""


class SchemaHold(Enum):
    """The ways to hold schemas that are not strict. What cannot be compiled one way is tried the next."""

    WHOLE = "whole"
    COERCED = "coerced"
    """A schema in which each `oneOf` was read as `anyOf`."""
    LAX = "lax"
    """A schema of a function's arguments that was read as any object."""


def checked(
    vocabulary: Vocabulary, format_: AnswerFormat | None, asked: AskedForm, *, reasons: bool
) -> Grammar:
    """The grammar of an answer, which was compiled once: a job for a thread. `reasons` says that the prompt's
    end opened reasoning. Raises InvalidRequest."""
    tried: dict[str, str] = {}
    for hold in SchemaHold:
        grammar = grammar_of(format_, asked, reasons=reasons, hold=hold)
        if not grammar.text:
            return grammar
        if grammar.text in tried:
            continue
        try:
            compiled(vocabulary, grammar.text)
        except BadGrammar as error:
            tried[grammar.text] = str(error)
        else:
            return grammar
    param = "tools" if asked.structure is None else asked.structure.param
    raise InvalidRequest(f"{param} cannot be held: {next(iter(tried.values()))}", param=param)


def grammar_of(
    format_: AnswerFormat | None, asked: AskedForm, *, reasons: bool, hold: SchemaHold = SchemaHold.WHOLE
) -> Grammar:
    """The grammar of an answer, not yet compiled. Raises InvalidRequest."""
    if not (asked.functions or asked.structure is not None or asked.thinking_budget is not None):
        return Grammar()
    return _Composer(format_ or AnswerFormat("plain"), asked, reasons, hold).compose()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Expressions of an answer behind its reasoning."""

    whole: str
    from_call: str = ""
    """The grammar of an answer that begins with a call. Empty where none can."""
    is_text: bool = False
    """True if it begins with any text."""


NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of the arguments of a function that has no `parameters`."""
OPEN: Final = frozenset(
    (
        *("additionalProperties", "patternProperties", "minProperties", "dependentSchemas"),
        *("allOf", "anyOf", "oneOf", "$ref", "if"),
    )
)
"""The keywords by which a schema says itself what other properties there may be."""
_FREE: Final = _Answer(lark.TEXT, is_text=True)


@dataclass(slots=True)
class _Composer:
    format: AnswerFormat
    asked: AskedForm
    reasons: bool
    hold: SchemaHold
    rules: Rules = field(default_factory=Rules)
    ignored: list[str] = field(default_factory=list)
    own: str = ""
    """The grammar that the caller wrote."""
    size: int = 0
    """The size of all schemas so far."""

    def compose(self) -> Grammar:
        structure = "" if self.asked.structure is None else self._structure(self.asked.structure)
        if structure and (frame := self._frame()):
            structure = f"{frame}? {structure} {frame}?"
        answer = _Answer(structure) if structure else _FREE
        if self.asked.functions:
            answer = self._with_functions(structure)
        start = self._behind_reasoning(answer)
        if not start:
            return Grammar()
        text = f"start: {start}\n{self.rules}"
        if self.own:
            named = [("answer", text), ("own", self.own)]
            text = json.dumps({"grammars": [{"name": name, "lark_grammar": one} for name, one in named]})
        return Grammar(text, tuple(dict.fromkeys(self.ignored)))

    # -- structure ------------------------------------------------------------------------------------

    def _structure(self, structure: Structure) -> str:
        """The name of a structure's rule. Raises InvalidRequest."""
        match structure.kind:
            case StructureKind.JSON_OBJECT:
                return self.rules.add("structure", lark.schema(lark.ANY_OBJECT))
            case StructureKind.JSON_SCHEMA:
                held = self._held(structure.source, structure.strict, structure.param)
                return self.rules.add(
                    "structure", lark.schema(held.text, coerced=self.coerces(structure.strict))
                )
            case StructureKind.REGEX:
                check_pattern(structure.source, structure.param)
                return self.rules.add("REGEX", lark.regex(structure.source))
            case StructureKind.CHOICE:
                return self.rules.add("CHOICE", lark.any_of(map(lark.literal, structure.choices)))
            case StructureKind.GRAMMAR:
                self.own = checked_grammar(structure.source, structure.param)
                return self.rules.add("structure", "@own")

    def _held(self, source: bytes | str, strict: bool, param: str) -> HeldSchema:
        """A schema, as far as it can be held. Raises InvalidRequest."""
        held = held_schema(source, strict=strict, param=param)
        self.size += held.size
        if self.size > SIZE_MAX:
            raise InvalidRequest(f"{param} is too large, with the other schemas of the request.", param=param)
        left_out = (*held.ignored, *(held.one_of if self.coerces(strict) else ()))
        self.ignored += [f"{param}.{place}" for place in left_out]
        return held

    def coerces(self, strict: bool) -> bool:
        """True if `oneOf` is held as `anyOf`."""
        return self.hold is SchemaHold.COERCED and not strict

    def held_arguments(self, source: bytes, strict: bool, param: str) -> dict[str, Any] | None:
        """The schema of a function's arguments. None, and named, where it can only be that of any object."""
        try:
            if strict or self.hold is not SchemaHold.LAX:
                return _closed(json.loads(self._held(source, strict, param).text))
        except InvalidRequest:
            if strict:
                raise
        self.ignored.append(param)
        return None

    def held_if_strict(self, source: bytes, param: str) -> dict[str, Any] | None:
        """The schema of a function's arguments, where it is one that strict mode takes, and all such schemas
        of the request can be held. None otherwise."""
        if self.hold is not SchemaHold.WHOLE:
            return None
        try:
            return _closed(json.loads(self._held(source, True, param).text))
        except InvalidRequest:
            return None

    # -- reasoning ------------------------------------------------------------------------------------

    def _behind_reasoning(self, answer: _Answer) -> str:
        """The expression of the whole answer; empty where nothing is constrained."""
        reasoning, budget = self.format.reasoning, self.asked.thinking_budget
        if reasoning is None:
            return "" if answer is _FREE else answer.whole
        opens, closes = map(self.format.pieces, (reasoning.opener.strip(), reasoning.closer.strip()))
        if budget is not None and not isinstance(closes[0], int):
            param = self.asked.thinking_param
            message = f"{param} is not supported by this model: what ends its reasoning is no token."
            raise UnsupportedParameter(message, param=param)
        may_open = bool(opens) and isinstance(opens[0], int)
        if answer is _FREE and (budget is None or not (self.reasons or may_open)):
            return ""
        if not (self.reasons or may_open):
            return answer.whole
        thought = self._thought(closes, answer)
        return thought if self.reasons else lark.any_of([lark.row([*opens, (thought,)]), answer.whole])

    def _thought(self, closes: Sequence[str | int], answer: _Answer) -> str:
        """Reasoning whose opening mark is there, and what follows it."""
        behind = answer.whole if answer.is_text else f"{lark.SPACE}? {answer.whole}"
        if not isinstance(closes[0], int):
            return f"{lark.text_before(self.rules, closes)} {behind}"
        budget = self.asked.thinking_budget
        thought = self.rules.add("thought", lark.TEXT, *(() if budget is None else (f"max_tokens={budget}",)))
        ways = [lark.row([*closes, (behind,)])]
        if self.format.call_ends_reasoning and answer.from_call:
            ways.append(answer.from_call)
        return f"{thought} {lark.any_of(ways)}"

    # -- calls ----------------------------------------------------------------------------------------

    def _with_functions(self, structure: str) -> _Answer:
        """The answer of a request with functions. `structure`: of its text, empty for any text."""
        calls, choice = self.format.calls, self.asked.choice
        if choice.mode is ToolMode.NONE:
            self._check_strict()
        if calls is None:
            if choice.mode is ToolMode.NONE:
                return _Answer(structure) if structure else _FREE
            message = "tools are not supported by this model: the format of its calls is not known."
            raise UnsupportedParameter(message, param="tools")
        if choice.mode is ToolMode.NONE:
            return _Answer(structure) if structure else self._without_calls(calls)
        writer = _Calls(self, calls, is_with_text=bool(structure))
        if choice.mode is ToolMode.REQUIRED:
            every = writer.every()
            return _Answer(every, every)
        if structure:
            every = writer.every()
            return _Answer(lark.any_of([structure, every]), every)
        return writer.in_text()

    def _check_strict(self) -> None:
        """Check schemas of functions that are not called: a mistake is one all the same. Raises
        InvalidRequest."""
        for index, spec in enumerate(self.asked.functions):
            if spec.strict and spec.schema:
                self._held(spec.schema, True, f"tools[{index}].function.parameters")

    def _without_calls(self, calls: CallFormat) -> _Answer:
        """Any text without what triggers a call. A bare call has no trigger."""
        return _Answer(self.text(calls.triggers), is_text=True)

    def text(self, never: Iterable[str]) -> str:
        """Any text without the texts `never`, in the frames that the format has for it."""
        text, frame = self.terminal(never), self._frame()
        return self.rules.add("prose", f"{text} ({frame} {text})*") if frame else text

    def terminal(self, never: Iterable[str]) -> str:
        """Any text without the texts `never`. Marks that are tokens are in no text."""
        heads = [self.format.pieces(one)[0] for one in never]
        return lark.text_without(self.rules, [head for head in heads if isinstance(head, str)])

    def _frame(self) -> str:
        """The marks around text. Empty where there are none, or they are no tokens."""
        marks = [self.format.pieces(mark.strip()) for mark in self.format.ignored]
        framed = [lark.row(mark) for mark in marks if isinstance(mark[0], int)]
        return self.rules.add("frame", lark.any_of(framed)) if framed else ""


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which has no others than it lists, if it lists any."""
    names = schema.get("properties")
    if names is None or schema.keys() & OPEN or not names.keys() >= set(schema.get("required", ())):
        return schema
    return {**schema, "additionalProperties": False}


@dataclass(slots=True)
class _Calls:
    """The calls of an answer."""

    of: _Composer
    calls: CallFormat
    is_with_text: bool
    """True if the answer may be a structure instead."""

    @property
    def _opener(self) -> str:
        """The beginning of the first call; white space before it is the text's."""
        return (self.calls.opener + self.calls.begin).lstrip()[: len(self.calls.opener)]

    def every(self) -> str:
        """The name of a rule for nothing but calls: all of an answer's, or the one that it may have."""
        rules, calls = self.of.rules, self.calls
        one = self._one()
        if calls.is_list or not self.of.asked.is_parallel:
            return one
        return rules.add("calls", f"{one} ({lark.row([*self.of.format.pieces(calls.separator), (one,)])})*")

    def in_text(self) -> _Answer:
        """Any text, with calls from where one is triggered."""
        rules, calls = self.of.rules, self.calls
        if calls.opener == calls.bare_opener:
            first = re.escape((calls.opener + calls.begin).lstrip()[0])
            text = rules.add("NO_CALL", rf"/[ \t\r\n]*([^ \t\r\n{first}](?s:.*))?/")
            every = self.every()
            return _Answer(lark.any_of([text, every]), every, is_text=True)
        several = self.of.asked.is_parallel and not calls.is_list
        trigger = self.of.format.pieces(self._head)[0]
        others = [one for one in calls.triggers if one != self._head.strip()]
        text = self.of.text(others)
        if isinstance(trigger, int):
            one = self._one()
            if not several:
                return _Answer(f"{text} ({one})?", one, is_text=True)
            more = f"({one} {text})*"
            return _Answer(f"{text} {more}", f"{one} {text} {more}", is_text=True)
        before = rules.add("before", f"{self.of.terminal(others)} {lark.literal(trigger)}", "lazy")
        one = f"{before} {self._one(skipped=len(trigger))}"
        if several:
            return _Answer(f"({one})* {text}", is_text=True)
        return _Answer(lark.any_of([one, text]), is_text=True)

    @property
    def _head(self) -> str:
        """The text that stands before each name, and triggers what follows."""
        return self._opener if self.calls.opener.strip() else self.calls.begin

    def _one(self, skipped: int = 0) -> str:
        """The name of a rule for one call with what opens and closes it, or for a list of calls, without the
        first `skipped` characters."""
        of, calls = self.of, self.calls
        choice = of.asked.choice
        wanted = [spec for spec in of.asked.functions if choice.name in (None, spec.name)]
        if calls.is_list:
            call = of.rules.add("call", lark.any_of(self._call(spec, "", "") for spec in wanted))
            separator = of.format.pieces(calls.separator)
            more = f"({lark.row([*separator, (call,)])})*" if of.asked.is_parallel else ""
            around = of.format.pieces(self._opener[skipped:]), of.format.pieces(calls.closer)
            return of.rules.add("one", lark.row([*around[0], (f"{call} {more}",), *around[1]]))
        one = [self._call(spec, self._opener, calls.closer, skipped) for spec in wanted]
        return of.rules.add("one", lark.any_of(one))

    def _call(self, spec: FunctionSpec, before: str, behind: str, skipped: int = 0) -> str:
        """One call of a function."""
        of, calls = self.of, self.calls
        strict = spec.strict is True
        param = of.asked.place_of(spec)
        held = None if spec.schema else NO_ARGUMENTS
        if isinstance(spec, AskedFunction) and spec.schema and spec.strict is None:
            held = of.held_if_strict(spec.schema, param)
        if spec.schema and held is None and (strict or of.asked.choice.mode is ToolMode.REQUIRED):
            held = of.held_arguments(spec.schema, strict, param)
        if calls.is_bare and calls.envelope is not None and self.is_with_text:
            return self._as_schema(spec.name, held, strict, param)
        arguments = Arguments(of.rules, of.format, calls, held, strict, of.coerces(strict), param)
        expression = arguments.expression()
        of.ignored += [f"{param}.{keyword}" for keyword in arguments.ignored]
        name = json.dumps(spec.name)[1:-1] if calls.envelope is not None else spec.name
        head = (before + calls.begin + name + calls.middle)[skipped:]
        return lark.row([*of.format.pieces(head), (expression,), *of.format.pieces(calls.end + behind)])

    def _as_schema(self, name: str, held: dict[str, Any] | None, strict: bool, param: str) -> str:
        """A bare call beside a structure. Both may begin with the same words, which only schemas can tell
        apart."""
        envelope = self.calls.envelope
        assert envelope is not None
        if held is not None and '"$ref"' in json.dumps(held):
            if strict:
                message = f"{param} cannot have a $ref beside response_format, with this model."
                raise InvalidRequest(message, param=param)
            self.of.ignored.append(param)
            held = None
        members = {envelope.name: {"const": name}, envelope.arguments: held or {"type": "object"}}
        call = {
            "type": "object",
            "properties": members,
            "required": [*members],
            "additionalProperties": False,
        }
        return lark.schema(json.dumps(call), coerced=self.of.coerces(strict))
