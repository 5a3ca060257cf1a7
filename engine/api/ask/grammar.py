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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.api.formats import lark
from engine.api.formats.arguments import Arguments
from engine.api.formats.format import AnswerFormat, ArgumentsKind, CallFormat
from engine.api.formats.lark import Atom, Rules
from engine.api.formats.own_grammars import checked_grammar
from engine.contract.grammars import BadGrammar, Vocabulary, compiled
from shared.apis.patterns import check_pattern
from shared.apis.schemas import SIZE_MAX, HeldSchema, held_schema
from shared.apis.structure import Structure, StructureKind
from shared.apis.tools import FunctionSpec, ToolChoice, ToolMode
from shared.wire.errors import InvalidRequest, UnsupportedParameter

_NOT_HELD: Final = "the whole schema"


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request shapes its answer."""

    functions: tuple[FunctionSpec, ...] = ()
    choice: ToolChoice = ToolChoice(ToolMode.NONE)
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
    """The grammar of an answer, which was compiled once: a job for a thread. `reasons`: the prompt's end opened
    reasoning. Raises InvalidRequest."""
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


def grammar_of(
    format_: AnswerFormat | None, asked: Asked, *, reasons: bool, is_lax: bool = False
) -> Grammar:
    """The grammar of an answer. `is_lax`: no schema is held that is not strict, as one cannot be compiled.
    Raises InvalidRequest."""
    if not (asked.functions or asked.structure is not None or asked.thinking_budget is not None):
        return Grammar()
    return _Composer(format_ or AnswerFormat("plain"), asked, reasons, is_lax).compose()


def _refusal(asked: Asked, error: BadGrammar) -> InvalidRequest:
    param = "tools" if asked.structure is None else asked.structure.param
    return InvalidRequest(f"{param} cannot be held: {error}", param=param)


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
        asked = self.asked
        calls = self.format.calls
        if asked.functions and asked.choice.mode is not ToolMode.NONE and calls is None:
            message = "tools are not supported by this model: no format of its calls is known."
            raise UnsupportedParameter(message, param="tools")
        if asked.structure is not None:
            text = self._structure(asked.structure)
        elif asked.choice.mode is ToolMode.NONE and not (asked.functions and calls is not None):
            text = lark.TEXT
        else:
            text = ""
        answer = self._answer(calls, text) if calls is not None and asked.functions else _Answer(text)
        start = self._behind_reasoning(answer)
        if not start:
            return Grammar()
        rules = f"start: {start}\n{self.rules}"
        if self.own:
            named = [("answer", rules), ("own", self.own)]
            rules = json.dumps({"grammars": [{"name": name, "lark_grammar": one} for name, one in named]})
        return Grammar(rules, tuple(dict.fromkeys(self.ignored)))

    # -- structure ------------------------------------------------------------------------------------

    def _structure(self, structure: Structure) -> str:
        """The expression of a structure. Raises InvalidRequest."""
        match structure.kind:
            case StructureKind.JSON_OBJECT:
                return lark.schema(lark.ANY_OBJECT, strict=False)
            case StructureKind.JSON_SCHEMA:
                held = self._held(structure.source, structure.strict, structure.param)
                return lark.schema(held.text, strict=structure.strict)
            case StructureKind.REGEX:
                check_pattern(structure.source, structure.param)
                return self.rules.add("REGEX", lark.regex(structure.source))
            case StructureKind.CHOICE:
                return self.rules.add("CHOICE", lark.any_of(map(lark.literal, structure.choices)))
            case StructureKind.GRAMMAR:
                self.own = checked_grammar(structure.source, structure.param)
                return "@own"

    def _held(self, source: bytes | str, strict: bool, param: str) -> HeldSchema:
        """A schema, or that of any object where it is not to be held. Raises InvalidRequest."""
        held = HeldSchema(lark.ANY_OBJECT, (_NOT_HELD,))
        if strict or not self.is_lax:
            held = held_schema(source, strict=strict, param=param)
            if self.size + held.size > SIZE_MAX:
                if strict:
                    message = f"{param} and the other schemas together are too large."
                    raise InvalidRequest(message, param=param)
                held = HeldSchema(lark.ANY_OBJECT, (_NOT_HELD,))
            self.size += held.size
        self.ignored += [param if place is _NOT_HELD else f"{param}.{place}" for place in held.ignored]
        return held

    # -- reasoning ------------------------------------------------------------------------------------

    def _behind_reasoning(self, answer: _Answer) -> str:
        """The whole answer; empty where nothing is constrained."""
        reasoning = self.format.reasoning
        budget = self.asked.thinking_budget
        if not (answer.text or answer.calls):  # nothing but a budget, or not even that
            answer = _Answer(lark.TEXT)
        if reasoning is None or not (opens := self.format.pieces(reasoning.opener)):
            return "" if answer.is_free else answer.expression
        if answer.is_free and budget is None:
            return ""
        closes = self.format.pieces(reasoning.closer)
        if budget is not None and not isinstance(closes[0], int):
            message = "thinking_token_budget is not supported by this model, whose mark is no token."
            raise UnsupportedParameter(message, param="thinking_token_budget")
        end = answer.expression if answer.is_text else f"{lark.SPACE}? {answer.expression}"
        if not isinstance(closes[0], int):
            thought = f"{lark.text_before(self.rules, closes)} {end}"
        else:
            bound = () if budget is None else (f"max_tokens={budget}",)
            thought = self.rules.add("thought", lark.TEXT, *bound)
            ways = [lark.row([*closes, (end,)])]
            if self.format.call_ends_reasoning and answer.calls:
                ways.append(answer.calls)
            thought = f"{thought} {lark.any_of(ways)}"
        if self.reasons:
            return thought
        if not isinstance(opens[0], int):
            return answer.expression
        return lark.any_of([lark.row([*opens, (thought,)]), answer.expression])

    # -- calls ----------------------------------------------------------------------------------------

    def _answer(self, calls: CallFormat, structure: str) -> _Answer:
        """The answer of a request with functions. `structure`: of its text, empty for any text."""
        choice = self.asked.choice
        if choice.mode is ToolMode.NONE:
            return _Answer(structure or self._text_without(calls))
        wanted = [spec for spec in self.asked.functions if choice.name in (None, spec.name)]
        is_forced = choice.mode is ToolMode.REQUIRED
        one = [self._call(calls, spec, is_forced) for spec in wanted]
        call = self.rules.add("call", lark.any_of(one))
        every = self._calls(calls, call)
        if is_forced:
            return _Answer("", every)
        if structure:
            return _Answer(structure, every)
        return self._in_text(calls, every)

    def _call(self, calls: CallFormat, spec: FunctionSpec, is_forced: bool) -> str:
        """One call of a function, without what opens and closes it."""
        strict = spec.strict is True
        index = self.asked.functions.index(spec)
        param = f"tools[{index}].function.parameters"
        held = None
        if spec.schema and (strict or is_forced):
            held = self._held(spec.schema, strict, param)
        schema = None if held is None else json.loads(held.text)
        writer = Arguments(self.rules, self.format, calls, schema, strict, param)
        arguments = writer.expression()
        self.ignored += [f"{param}.{keyword}" for keyword in writer.ignored]
        name = json.dumps(spec.name)[1:-1] if calls.envelope is not None else spec.name
        return lark.row([*self._pieces(calls.begin + name + calls.middle), (arguments,), *self._pieces(calls.end)])

    def _calls(self, calls: CallFormat, call: str) -> str:
        """All calls of an answer, or the one that it may have, with what opens and closes them."""
        opener, closer, separator = map(self._pieces, (calls.opener, calls.closer, calls.separator))
        if calls.is_list:
            more = f"({lark.row([*separator, (call,)])})*" if self.asked.is_parallel else ""
            return self.rules.add("calls", lark.row([*opener, (f"{call} {more}",), *closer]))
        whole = self.rules.add("whole", lark.row([*opener, (call,), *closer]))
        if not self.asked.is_parallel:
            return whole
        return self.rules.add("calls", f"{whole} ({lark.row([*separator, (whole,)])})*")

    def _in_text(self, calls: CallFormat, every: str) -> _Answer:
        """Any text, with calls from where one is triggered."""
        head = self._head(calls)
        if not head:
            return _Answer(self._bare_text(calls), every)
        again = "*" if self.asked.is_parallel and not calls.is_list else ""
        if isinstance(head[0], int):
            more = f"({every} {lark.TEXT}){again or '?'}"
            return _Answer(f"{lark.TEXT} {more}", "", is_text=True, ends=f"{every} {lark.TEXT} {more}")
        return _Answer(self._triggered(calls, head[0]), "", is_text=True)

    def _triggered(self, calls: CallFormat, trigger: str) -> str:
        """Any text, with calls that are triggered by a text."""
        raise AssertionError

    def _pieces(self, text: str) -> Sequence[Atom]:
        return self.format.pieces(text)

    def _head(self, calls: CallFormat) -> Sequence[str | int]:
        """What triggers a call. Empty where nothing does: a bare one."""
        return () if calls.is_bare and not calls.opener else self.format.pieces(calls.opener or calls.begin)
