"""The form of an answer: how it is read into parts, and the grammar that it follows.

Rules

1. An answer has a form where its model marks reasoning, or its request has tools, a structure or a bound on
   reasoning. For all others nothing is done here, nor for any of their tokens.
2. A grammar is made and tried on a thread, in its tenant's share, before the request is queued, and within
   the request's deadlines.
3. What was made is kept by its content, as an agent sends the same tools with each turn: `KEPT_MAX` of them
   and `KEPT_LEN_MAX` bytes. The one that was asked for last is dropped last.
4. Tools are refused where nobody knows how the model writes calls. So is whatever needs a grammar where
   llguidance cannot read the tokenizer; calls that the model is free to make do not need one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from engine.api.answer.exchange import EngineExchange
from engine.api.ask.grammar import AskedForm, Grammar, checked
from engine.api.ask.model import ServedModel
from engine.api.formats.format import AnswerFormat, ArgumentsKind
from engine.api.formats.machine import AnswerMachine
from engine.api.formats.notations import schema_types
from engine.api.told.metrics import EngineMetrics
from shared.apis.generation import GenerationRequest
from shared.apis.prompt import ChatPrompt, PromptForm
from shared.apis.tools import FunctionSpec, FunctionTool, ToolMode
from shared.apis.validation import Parsed, named
from shared.fairness.fair_threads import FairThreads, Slices
from shared.wire.errors import InvalidRequest, UnsupportedParameter

KEPT_MAX: Final = 512
KEPT_LEN_MAX: Final = 16 * 1024 * 1024
KEYED_LEN_MAX: Final = 256 * 1024
"""Bytes of what is kept by its content, which is hashed on the event loop in half a millisecond."""
SCHEMA_LEN_MAX: Final = 128 * 1024
"""Bytes of the longest schema that is asked for the types of its arguments; those of a longer one are
texts."""
TAIL_TOKENS: Final = 64
"""The last tokens of a prompt, by which a machine knows where the answer begins."""
CONTINUED_TOKENS: Final = 4096
"""The last tokens of a prompt that the answer continues: the answer's beginning is in it."""
TYPED_BYTES: Final = 16
"""Bytes of the types of a function's arguments, for each of its schema."""

Types = Mapping[str, Mapping[str, Any]]
"""The types of each function's arguments, as a schema, by the function's name."""


@dataclass(frozen=True, slots=True)
class ReadingAs:
    """The way in which an answer is read into parts."""

    format: AnswerFormat
    prompt_tail: str
    types: Types | None
    """The types of arguments by function. None where no calls are looked for."""
    tells_calls: bool
    """True if the finish reason says that the answer ends with a call."""

    def machine(self) -> AnswerMachine:
        return AnswerMachine(self.format, self.prompt_tail, tools=self.types)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    reading: ReadingAs | None = None
    """The way to read the answer. None where all of it is text."""
    grammar: str = ""
    """The grammar as llguidance reads it. Empty where the answer is free."""
    kind: str = ""
    """The purpose of the grammar. Empty without one."""
    held_len: int = 0
    """Bytes that it holds until the answer's end."""


PLAIN: Final = AnswerForm()


@dataclass(frozen=True, slots=True)
class _Made:
    """The grammar and the types that threads make of what a request asks."""

    grammar: Grammar
    types: Types
    size: int


_NOTHING: Final = _Made(Grammar(), {}, 0)


class Forms:
    """The forms of an engine's answers."""

    def __init__(self, threads: FairThreads, metrics: EngineMetrics) -> None:
        self._threads: Final = threads
        self._metrics: Final = metrics
        self._kept: Final[OrderedDict[bytes, _Made]] = OrderedDict()
        self._kept_len = 0

    async def of(
        self,
        model: ServedModel,
        exchange: EngineExchange,
        parsed: Parsed[GenerationRequest],
        prompt: PromptForm,
        prompt_ids: list[int],
    ) -> AnswerForm:
        """The form of a request's answer; `prompt_ids` are its first prompt's. Notes what of its schemas is
        not held. Raises InvalidRequest and Overloaded."""
        request = parsed.request
        format_ = model.answer_format if isinstance(prompt, ChatPrompt) else None
        reasons = format_ is not None and format_.reasoning is not None
        if parsed.is_plain and not reasons and request.thinking_tokens_max is None:
            return PLAIN
        asked = _asked(request, format_)
        _check(model, format_, asked)
        looks = asked.choice.mode is not ToolMode.NONE
        reading = None
        if format_ is not None and (reasons or looks):
            tail = await self._tail(exchange.tenant, model, prompt, prompt_ids)
            reading = ReadingAs(format_, tail, None, tells_calls=looks and asked.choice.name is None)
        made = _NOTHING
        if asked.functions or asked.structure is not None or asked.thinking_budget is not None:
            opened = reading is not None and reading.machine().is_reasoning
            with exchange.enter("grammar"):
                made = await self._made(exchange.tenant, model, format_, asked, opened)
        if made.grammar.ignored:
            exchange.ignored_fields = named((*parsed.ignored, *made.grammar.ignored))
        if reading is not None and looks:
            reading = replace(reading, types=made.types)
        return AnswerForm(reading, made.grammar.text, _kind(asked) if made.grammar.text else "", made.size)

    async def _tail(self, tenant: str, model: ServedModel, prompt: PromptForm, ids: list[int]) -> str:
        """The text of a prompt's last tokens."""
        decode = model.tokenizer.decode
        if isinstance(prompt, ChatPrompt) and prompt.continues_final:
            last = ids[-CONTINUED_TOKENS:]
            return await self._threads.call(tenant, lambda: decode(last, skip_special_tokens=False))
        return decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)

    async def _made(
        self, tenant: str, model: ServedModel, format_: AnswerFormat | None, asked: AskedForm, opened: bool
    ) -> _Made:
        """The grammar and types of a request. `opened` says that its prompt opens reasoning."""
        key = b""
        if _asked_len(asked) <= KEYED_LEN_MAX:
            key = _key(asked, opened=opened, is_chat=format_ is not None)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        try:
            made = await self._threads.run(tenant, _slices(model, format_, asked, opened))
        except InvalidRequest:
            self._metrics.grammars_refused.inc()
            raise
        if key:
            self._keep(key, made)
        return made

    def _keep(self, key: bytes, made: _Made) -> None:
        if key in self._kept or made.size > KEPT_LEN_MAX:
            return
        self._kept[key] = made
        self._kept_len += made.size
        while len(self._kept) > KEPT_MAX or self._kept_len > KEPT_LEN_MAX:
            self._kept_len -= self._kept.popitem(last=False)[1].size


def _asked(request: GenerationRequest, format_: AnswerFormat | None) -> AskedForm:
    functions = (tool.function for tool in request.tools_asked if isinstance(tool, FunctionTool))
    budget = request.thinking_tokens_max
    if format_ is None and not request.needs_reasoning:
        budget = None
    return AskedForm(
        tuple(functions),
        request.tool_choice_asked,
        request.calls_in_parallel,
        request.structure,
        budget,
        request.thinking_param,
        tuple(request.tool_places),
    )


def _check(model: ServedModel, format_: AnswerFormat | None, asked: AskedForm) -> None:
    """Refuse what nothing is known of. Raises UnsupportedParameter."""
    choice = asked.choice
    if choice.mode is not ToolMode.NONE and (format_ is None or format_.calls is None):
        raise UnsupportedParameter(
            "tools are not supported by this model: it is not known how it writes calls. "
            "The engine's --answer-format can say so.",
            param="tools",
        )
    if asked.thinking_budget is not None and format_ is None:
        raise UnsupportedParameter(
            f"{asked.thinking_param} is not supported by this model: it is not known how it marks reasoning. "
            "The engine's --answer-format can say so.",
            param=asked.thinking_param,
        )
    if model.vocabulary is not None:
        return
    param = None if asked.structure is None else asked.structure.param
    if choice.mode is ToolMode.REQUIRED:
        param = "tool_choice"
    elif choice.mode is ToolMode.AUTO and any(spec.strict for spec in asked.functions):
        param = "tools"
    elif asked.thinking_budget is not None:
        param = asked.thinking_param
    if param is not None:
        message = f"{param} is not supported by this model: no grammar can be made of its tokenizer."
        raise UnsupportedParameter(message, param=param)


def _kind(asked: AskedForm) -> str:
    if asked.structure is not None:
        return asked.structure.kind.value
    return "tools" if asked.functions else "reasoning"


def _asked_len(asked: AskedForm) -> int:
    """The bytes of what can be long."""
    length = sum([len(spec.schema) + len(spec.description or "") for spec in asked.functions])
    if (structure := asked.structure) is not None:
        length += len(structure.source) + sum(map(len, structure.choices))
    return length


def _key(asked: AskedForm, *, opened: bool, is_chat: bool) -> bytes:
    parts = [
        *(asked.functions, asked.choice, asked.is_parallel, asked.structure, asked.thinking_budget),
        *(opened, is_chat, asked.places),
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


def _slices(
    model: ServedModel, format_: AnswerFormat | None, asked: AskedForm, opened: bool
) -> Slices[_Made]:
    types: dict[str, Mapping[str, Any]] = {}
    calls = None if format_ is None else format_.calls
    is_typed = calls is not None and calls.arguments is ArgumentsKind.TAGGED
    for spec in asked.functions:
        types[spec.name] = _typed(spec) if is_typed else {}
        if is_typed:
            yield
    grammar = Grammar()
    if model.vocabulary is not None:
        grammar = checked(model.vocabulary, format_, asked, reasons=opened)
    told = sum(len(spec.schema) + len(spec.name) for spec in asked.functions)
    return _Made(grammar, types, len(grammar.text) + TYPED_BYTES * told)


def _typed(spec: FunctionSpec) -> Mapping[str, Any]:
    """The types of a function's arguments, as its schema states them. An answer's tokens are read on the
    event loop, where no schema of a caller's is walked."""
    if not spec.schema or len(spec.schema) > SCHEMA_LEN_MAX:
        return {}
    schema = msgspec.json.decode(spec.schema)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    followed: dict[str, tuple[str, ...]] = {}
    found = {key: schema_types(value, schema, followed) for key, value in properties.items()}
    return {"properties": {key: {"type": [*types]} for key, types in found.items() if types}}
