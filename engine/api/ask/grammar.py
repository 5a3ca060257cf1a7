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
3. A schema that is not strict, and that cannot be held or makes the grammar too large, is held in part or
   not at all (`any object`), and what is left out is named.
4. What cannot be compiled is the caller's mistake, by the name of the field that it came in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.api.formats import lark
from engine.api.formats.arguments import Arguments
from engine.api.formats.format import AnswerFormat, CallFormat
from engine.api.formats.lark import Rules
from engine.api.formats.own_grammars import checked_grammar
from engine.contract.grammars import BadGrammar, Vocabulary, compiled
from shared.apis.patterns import check_pattern
from shared.apis.schemas import SIZE_MAX, HeldSchema, held_schema
from shared.apis.structure import Structure, StructureKind
from shared.apis.tools import NO_CALLS, FunctionSpec, ToolChoice, ToolMode
from shared.wire.errors import InvalidRequest, UnsupportedParameter


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request shapes its answer."""

    functions: tuple[FunctionSpec, ...] = ()
    choice: ToolChoice = NO_CALLS
    is_parallel: bool = True
    structure: Structure | None = None
    thinking_budget: int | None = None
    """The most tokens of reasoning. None for no bound."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """An answer's grammar."""

    text: str = ""
    """As llguidance reads it; empty where nothing is constrained."""
    ignored: tuple[str, ...] = ()
    """What of schemas that are not strict is left out, by its place in the request."""


def checked(vocabulary: Vocabulary, format_: AnswerFormat | None, asked: Asked, *, reasons: bool) -> Grammar:
    """The grammar of an answer, which was compiled once: a job for a thread. `reasons` says that the prompt's
    end opened reasoning. Raises InvalidRequest."""
    grammar = grammar_of(format_, asked, reasons=reasons)
    if not grammar.text:
        return grammar
    try:
        compiled(vocabulary, grammar.text)
    except BadGrammar as error:
        lax = grammar_of(format_, asked, reasons=reasons, is_lax=True)
        if lax.text == grammar.text:
            raise _refusal(asked, error) from None
        try:
            compiled(vocabulary, lax.text)
        except BadGrammar:
            raise _refusal(asked, error) from None
        return lax
    return grammar


def grammar_of(format_: AnswerFormat | None, asked: Asked, *, reasons: bool, is_lax: bool = False) -> Grammar:
    """The grammar of an answer. `is_lax`: no schema is held that is not strict, as one cannot be compiled.
    Raises InvalidRequest."""
    if not (asked.functions or asked.structure is not None or asked.thinking_budget is not None):
        return Grammar()
    return _Composer(format_ or AnswerFormat("plain"), asked, reasons, is_lax).compose()


def _refusal(asked: Asked, error: BadGrammar) -> InvalidRequest:
    param = "tools" if asked.structure is None else asked.structure.param
    return InvalidRequest(f"{param} cannot be held: {error}", param=param)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Expressions of an answer behind its reasoning."""

    whole: str
    from_call: str = ""
    """Of one that begins with a call. Empty where none can."""
    is_text: bool = False
    """True if it begins with any text."""


_FREE: Final = _Answer(lark.TEXT, is_text=True)


@dataclass(slots=True)
class _Composer:
    format: AnswerFormat
    asked: Asked
    reasons: bool
    is_lax: bool
    rules: Rules = field(default_factory=Rules)
    ignored: list[str] = field(default_factory=list)
    own: str = ""
    """The grammar that the caller wrote."""
    size: int = 0
    """The size of all schemas so far."""

    def compose(self) -> Grammar:
        structure = "" if self.asked.structure is None else self._structure(self.asked.structure)
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
                return self.rules.add("structure", lark.schema(lark.ANY_OBJECT, strict=False))
            case StructureKind.JSON_SCHEMA:
                held = self._held(structure.source, structure.strict, structure.param)
                return self.rules.add("structure", lark.schema(held.text, strict=structure.strict))
            case StructureKind.REGEX:
                check_pattern(structure.source, structure.param)
                return self.rules.add("REGEX", lark.regex(structure.source))
            case StructureKind.CHOICE:
                return self.rules.add("CHOICE", lark.any_of(map(lark.literal, structure.choices)))
            case StructureKind.GRAMMAR:
                self.own = checked_grammar(structure.source, structure.param)
                return self.rules.add("structure", "@own")

    def _held(self, source: bytes | str, strict: bool, param: str) -> HeldSchema:
        """A schema, or that of any object where it is not to be held. Raises InvalidRequest."""
        held = None
        if strict or not self.is_lax:
            held = held_schema(source, strict=strict, param=param)
            if self.size + held.size > SIZE_MAX:
                if strict:
                    message = f"{param} is too large, with the other schemas of the request."
                    raise InvalidRequest(message, param=param)
                held = None
        if held is None:
            self.ignored.append(param)
            return HeldSchema(lark.ANY_OBJECT)
        self.size += held.size
        self.ignored += [f"{param}.{place}" for place in held.ignored]
        return held

    # -- reasoning ------------------------------------------------------------------------------------

    def _behind_reasoning(self, answer: _Answer) -> str:
        """The expression of the whole answer; empty where nothing is constrained."""
        reasoning, budget = self.format.reasoning, self.asked.thinking_budget
        if reasoning is None:
            return "" if answer is _FREE else answer.whole
        opens, closes = self.format.pieces(reasoning.opener), self.format.pieces(reasoning.closer)
        if budget is not None and not isinstance(closes[0], int):
            message = (
                "thinking_token_budget is not supported by this model: what ends its reasoning is no token."
            )
            raise UnsupportedParameter(message, param="thinking_token_budget")
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

    def _without_calls(self, calls: CallFormat) -> _Answer:
        """Any text without what triggers a call. A bare call has no trigger."""
        if calls.is_bare and not calls.triggers:
            return _FREE
        texts = [
            head for head in (self.format.pieces(one)[0] for one in calls.triggers) if isinstance(head, str)
        ]
        return _Answer(lark.text_without(self.rules, texts), is_text=True)


@dataclass(slots=True)
class _Calls:
    """The calls of an answer."""

    of: _Composer
    calls: CallFormat
    is_with_text: bool
    """True if the answer may be a structure instead."""

    @property
    def _opener(self) -> str:
        """What the first call begins with; white space before it is the text's."""
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
        if calls.is_bare and not calls.opener.strip():
            first = re.escape((calls.opener + calls.begin).lstrip()[0])
            text = rules.add("NO_CALL", rf"/[ \t\r\n]*([^ \t\r\n{first}](?s:.*))?/")
            every = self.every()
            return _Answer(lark.any_of([text, every]), every, is_text=True)
        several = self.of.asked.is_parallel and not calls.is_list
        trigger = self.of.format.pieces(self._head)[0]
        if isinstance(trigger, int):
            one = self._one()
            if not several:
                return _Answer(f"{lark.TEXT} ({one})?", one, is_text=True)
            more = f"({one} {lark.TEXT})*"
            return _Answer(f"{lark.TEXT} {more}", f"{one} {lark.TEXT} {more}", is_text=True)
        before = rules.add("before", f"{lark.TEXT} {lark.literal(trigger)}", "lazy")
        one = f"{before} {self._one(skipped=len(trigger))}"
        if several:
            return _Answer(f"({one})* {lark.TEXT}", is_text=True)
        return _Answer(lark.any_of([one, lark.TEXT]), is_text=True)

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
        param = f"tools[{of.asked.functions.index(spec)}].function.parameters"
        held = None
        if spec.schema and (strict or of.asked.choice.mode is ToolMode.REQUIRED):
            held = json.loads(of._held(spec.schema, strict, param).text)
        if calls.is_bare and calls.envelope is not None and self.is_with_text:
            return self._as_schema(spec.name, held, strict, param)
        arguments = Arguments(of.rules, of.format, calls, held, strict, param)
        expression = arguments.expression()
        of.ignored += [f"{param}.{keyword}" for keyword in arguments.ignored]
        name = json.dumps(spec.name)[1:-1] if calls.envelope is not None else spec.name
        head = (before + calls.begin + name + calls.middle)[skipped:]
        return lark.row([*of.format.pieces(head), (expression,), *of.format.pieces(calls.end + behind)])

    def _as_schema(self, name: str, held: dict[str, object] | None, strict: bool, param: str) -> str:
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
        return lark.schema(json.dumps(call), strict=strict)
