"""What the next turn of an agent's session computes again, over the chat templates that TRL ships.

Two tables, in tokens of the demo's tokenizer, to which the marks of each template are added:

- *again*: the share of the prompts' tokens, without what begins an answer, that the next turn's prompt does
  not begin with, over the turns of five agents (`tests.sessions`). None is the law. Where the template leaves
  out past reasoning: without any, with it, and with the variable that keeps it, if there is one.
- *survives*: the share of an answer's tokens that the next turn's prompt has. The answer is one as the
  family's template writes it, is read by the family's format, and is sent back by a client: with a call's
  arguments *as sent*, or *spelled anew*, as clients do that have read them. An *odd* call has spellings of
  JSON that are not the template's, a *dense* one no space in its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers

from engine.demo import MODEL_DIR
from shared.fairness.fair_threads import at_once
from shared.process.clock import SYSTEM_CLOCK
from shared.text.chat_template import NO_DEFAULTS, ChatTemplate, variables_read
from shared.text.template_probes import common
from shared.wire.errors import InvalidRequest
from tests.answer_texts import FORMATS, Answer, answer_of, read
from tests.bench.figures import Figure, at_most, figure
from tests.sessions import AGENTS, Message, Session
from tests.shared.text.chat_templates import MISTRAL_TOOLS
from tests.suites.bfcl import ENDS, TEMPLATES
from tests.suites.templates import SPECIAL, prompt_of, shipped

SUMMARY: Final = "what agents' next turns compute again, over the chat templates that TRL ships"
SCALE: Final = 0.2
"""The length of the sessions' texts beside those that agents were seen to send."""
_MARKS: Final = re.compile(r"<[^<>{}\s]{1,32}>|\[/?[A-Z_]{3,24}\]")
"""What families have tokens of their own for: all that looks like it."""
AGAIN_MAX: Final = 0.02
"""What templates write at the end of a prompt alone, in percent."""
PLACE: Final = "größe/é.txt"
ARGUMENTS: Final[dict[str, Any]] = {
    "path": PLACE,
    "price": 19.5,
    "items": [{"sku": "a1", "count": 2}],
    "force": True,
    "text": 'x = "1"\n\tif a < 2: 🌊\n',
}
SPELLINGS: Final = {
    "odd": (
        ("19.5", "19.50"),
        ('[{"sku": "a1", "count": 2}]', '[{"sku":"a1" ,"count": 2}]'),
        ('{"path": ', '{ "path":'),
        (f'"{PLACE}"', '"gr\\u00f6\\u00dfe/\\u00e9.txt"'),
    ),
    "dense": tuple(
        (json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        for value in (ARGUMENTS, ARGUMENTS["items"])
    ),
}
"""Texts of an answer, and what a model may write in their place."""
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "place_order",
            "description": "Place an order.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "price": {"type": "number"},
                    "items": {"type": "array", "items": {"type": "object"}},
                    "force": {"type": "boolean"},
                    "text": {"type": "string"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
SCHEMAS: Final = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]


def run(cache: Path) -> list[Figure]:
    sources = {name: source for name, source in shipped(cache).items() if not name.endswith("_training")}
    figures: list[Figure] = []
    for name, source in sources.items():
        figures += _again(name, source)
    for name, family in TEMPLATES.items():
        figures += _survivals(name, family, sources[name])
    figures += _survivals("mistral, of these tests", "mistral-list", MISTRAL_TOOLS)
    return figures


@dataclass(frozen=True, slots=True)
class _Model:
    """A template, and a tokenizer with its marks."""

    template: ChatTemplate
    tokenizer: tokenizers.Tokenizer

    @classmethod
    def of(cls, source: str, defaults: dict[str, bool] | None = None) -> _Model:
        arguments = variables_read(source, SPECIAL)
        template = ChatTemplate(source, SPECIAL, SYSTEM_CLOCK, arguments, defaults or NO_DEFAULTS)
        tokenizer = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        tokenizer.add_special_tokens([*SPECIAL.values(), *dict.fromkeys(_MARKS.findall(source))])
        return cls(template, tokenizer)

    def text(self, messages: Sequence[Message], tools: Sequence[Any], *, opens: bool) -> str:
        chat = {"messages": messages, "tools": tools}
        return at_once(self.template.slices(prompt_of(chat, opens=opens)))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _shared(first: list[int], second: list[int]) -> int:
    """The number of tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


# -- kept -------------------------------------------------------------------------------------------------


def _again(name: str, source: str) -> Iterator[Figure]:
    sessions = [make(SCALE) for make in AGENTS.values()]
    model = _Model.of(source)
    takes = model.template.takes
    if takes.past_reasoning:
        yield figure(f"{name}: again", again(model, source, sessions), "%", at_most(AGAIN_MAX))
        return
    plain = [each.without_reasoning for each in sessions]
    yield figure(f"{name}: again, without reasoning", again(model, source, plain), "%")
    yield figure(f"{name}: again, reasoning left out", again(model, source, sessions), "%")
    for variable, value in takes.reasoning_kept_by.items():
        share = again(_Model.of(source, takes.reasoning_kept_by), source, sessions)
        yield figure(f"{name}: again, {variable} {json.dumps(value)}", share, "%", at_most(AGAIN_MAX))


def again(model: _Model, source: str, sessions: Sequence[Session]) -> float:
    """The share of the prompts' tokens that the next turn's prompt does not begin with, in percent."""
    lost = total = 0
    for session in sessions:
        tools = session.tools if "tools" in source else []
        before: list[int] = []
        for turn in session.turns:
            messages = turn if "tool_calls" in source else [*map(_said, turn)]
            closed, open_ = (model.text(messages, tools, opens=opens) for opens in (False, True))
            ids = model.ids(closed)
            lost += len(before) - _shared(before, ids)
            total += len(before)
            before = ids[: _shared(ids, model.ids(common(closed, open_)))]
    return 100 * lost / total


def _said(message: Message) -> Message:
    """The message for a template that knows no calls: results are the user's."""
    calls = message.get("tool_calls", ())
    role = "user" if message["role"] == "tool" else message["role"]
    text = message.get("content") or "".join(call["function"]["name"] for call in calls)
    return {"role": role, "content": text}


# -- survives ---------------------------------------------------------------------------------------------

_NEXT: Final = {"role": "user", "content": "Go on."}
_THOUGHT: Final = {"reasoning_content": "Let me see: größer?"}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": "abcdefghi", "type": "function", "function": function}


def _answers() -> Iterator[tuple[str, Message]]:
    order, now = _call("place_order", ARGUMENTS), _call("now", {})
    yield "text", {"content": "Größer is `x < 2`.\n\n- one"}
    yield "reasoning, text", {"content": "Done.", **_THOUGHT}
    yield "call", {"content": None, "tool_calls": [order]}
    for spelling in SPELLINGS:
        yield f"reasoning, {spelling} call", {"content": None, "tool_calls": [order], **_THOUGHT}
    yield "text, call", {"content": "I look it up.", "tool_calls": [order]}
    yield "reasoning, call", {"content": None, "tool_calls": [order], **_THOUGHT}
    yield "calls", {"content": None, "tool_calls": [order, now | {"id": "jklmnopqr"}]}


def _survivals(name: str, family: str, source: str) -> Iterator[Figure]:
    model = _Model.of(source)
    for title, answer in _answers():
        clients = ("as sent", "spelled anew") if "tool_calls" in answer else ("as sent",)
        for client in clients:
            spellings = [pair for word, pairs in SPELLINGS.items() if word in title for pair in pairs]
            share = _survives(model, family, answer, spellings, is_anew=client != "as sent")
            if share is not None:
                yield figure(f"{name}: {title}, {client}: survives", share, "%")


def _survives(
    model: _Model, family: str, answer: Message, spellings: Sequence[tuple[str, str]], *, is_anew: bool
) -> float | None:
    """The share of an answer's tokens that are in the next turn's prompt, in percent. None where the template
    does not write it."""
    question = {"role": "user", "content": "?"}
    try:
        prompt = model.text([question], TOOLS, opens=True)
        whole = model.text([question, {"role": "assistant", **answer}], TOOLS, opens=False)
    except InvalidRequest:
        return None
    prompt = common(prompt, whole)
    text = whole[len(prompt) :]
    text = text[: min((text.find(end) for end in ENDS if end in text), default=len(text))]
    written = text
    for usual, odd in spellings:
        written = written.replace(usual, odd)
    said = answer_of(read(FORMATS[family], [written], prompt[-256:], SCHEMAS))
    if len(said.calls) != len(answer.get("tool_calls", ())):
        return None
    sent = _sent(said, is_anew=is_anew)
    more = [_result(call) for call in sent.get("tool_calls", ())] or [_NEXT]
    following = model.ids(model.text([question, sent, *more], TOOLS, opens=True))
    before = len(model.ids(prompt))
    after = model.ids(prompt + written)
    return 100 * max(0, _shared(after, following) - before) / (len(after) - before)


def _sent(said: Answer, *, is_anew: bool) -> Message:
    """The answer as a client sends it back."""
    message: Message = {"role": "assistant", "content": said.text or None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    calls = []
    for at, (name, arguments) in enumerate(said.calls):
        if is_anew:
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))
        calls.append(
            {"id": f"abcdefg{at:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
        )
    return {**message, "tool_calls": calls} if calls else message


def _result(call: dict[str, Any]) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
