"""The chat templates that TRL ships, of most families of models, against transformers, to the letter.

Every template renders every chat of `tests.suites.chats`, with and without what begins an answer, in place
and as the process for long chats does it. A rendering counts as

- *equal*, where both give the same text;
- *refused by both*, where the template refuses, or cannot render the chat;
- *equal in the template's form*, where content in parts is one text for a template that takes no parts, and a
  text is one part for a template that takes nothing else: transformers fails there, or loses the text;
- *refused by name*, where transformers leaves out in silence what the template does not read: tools, calls,
  or a variable of the request;
- *different* else.
"""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import tokenizers
from transformers import PreTrainedTokenizerFast

from shared.apis.chat_messages import ChatMessage
from shared.apis.prompt import ChatPrompt
from shared.apis.tools import Tool
from shared.fairness.fair_threads import at_once
from shared.process.clock import SYSTEM_CLOCK
from shared.text.bounded_template import Unbounded
from shared.text.chat_template import (
    BoundedEnvironment,
    ChatTemplate,
    CompiledTemplate,
    Environment,
    variables_read,
)
from shared.text.template_input import TemplateInput, continued
from shared.text.template_reads import reads_of
from shared.wire.errors import InvalidRequest
from tests.bench.figures import Figure, at_least, at_most, figure
from tests.suites.cache import SuiteFailed, wheel
from tests.suites.chats import CHATS, Chat

SUMMARY: Final = "the chat templates that TRL ships, against transformers"
TRL: Final = ("trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396")
TEMPLATES: Final = 72
SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
KINDS: Final = ("equal", "equal in the template's form", "refused by both", "refused by name")
NAMED: Final = ("tools", "chat_template_kwargs.", "reasoning_effort")
"""What a refusal names that transformers does not have: these, and calls."""


def run(cache: Path) -> list[Figure]:
    counts: Counter[str] = Counter()
    in_place = 0
    sources = shipped(cache)
    for name, source in sources.items():
        judge = Judge(source)
        in_place += judge.is_in_place
        for title, chat in CHATS.items():
            for opens in (True, False) if not chat.get("continues") else (False,):
                kind = judge.kind(chat, opens=opens)
                counts[kind] += 1
                if kind not in KINDS:
                    sys.stderr.write(f"{name}, {title}, opens_answer={opens}: {kind}\n")
    different = sum(count for kind, count in counts.items() if kind not in KINDS)
    return [
        figure("templates", len(sources), "templates", at_least(TEMPLATES)),
        figure("templates rendered in place", in_place, "templates"),
        *(figure(kind, counts[kind], "renderings") for kind in KINDS),
        figure("different", different, "renderings", at_most(0)),
    ]


def shipped(cache: Path) -> dict[str, str]:
    """The templates' sources by their names. Raises SuiteFailed."""
    with zipfile.ZipFile(wheel(cache, *TRL)) as files:
        sources = {
            Path(name).stem: files.read(name).decode() for name in files.namelist() if name.endswith(".jinja")
        }
    if not sources:
        raise SuiteFailed("there are no templates in it")
    return sources


class Refusal(NamedTuple):
    """What came instead of a text."""

    param: str
    message: str


class Judge:
    """One template, rendered by us and by transformers."""

    def __init__(self, source: str) -> None:
        arguments = variables_read(source, SPECIAL)
        self._ours = ChatTemplate(source, SPECIAL, SYSTEM_CLOCK, arguments)
        self._reads = reads_of(Environment(SYSTEM_CLOCK).parse(source))
        self._input = TemplateInput.of(source, self._reads, arguments)
        self._free = CompiledTemplate(source, SPECIAL, Environment(SYSTEM_CLOCK))
        """What the process for long chats renders with."""
        self._oracle: Any = PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=source, **SPECIAL
        )
        self.is_in_place = True
        try:
            CompiledTemplate(source, SPECIAL, BoundedEnvironment(SYSTEM_CLOCK, SPECIAL))
        except Unbounded:
            self.is_in_place = False

    def kind(self, chat: Chat, *, opens: bool) -> str:
        """What a rendering counts as: one of `KINDS`, or how it is different."""
        prompt = prompt_of(chat, opens=opens)
        ours, apart = tried(lambda: at_once(self._ours.slices(prompt))), tried(lambda: self._apart(prompt))
        if ours != apart:
            return f"in place {ours!r}, apart {apart!r}"
        theirs = tried(lambda: self._theirs(chat, opens=opens))
        if isinstance(ours, str) and ours == theirs:
            return KINDS[0]
        in_form = tried(lambda: self._theirs(self._formed(chat), opens=opens))
        if isinstance(ours, str):
            return KINDS[1] if ours == in_form else f"ours {ours!r}, theirs {theirs!r}"
        if not isinstance(theirs, str) and not isinstance(in_form, str):
            return KINDS[2]
        return KINDS[3] if is_named(ours.param) else f"ours {ours!r}, theirs {theirs!r}"

    def _apart(self, prompt: ChatPrompt) -> str:
        messages, variables = self._input.messages(prompt), self._input.variables(prompt)
        text = self._free.render(messages, variables=variables)
        return continued(text, messages[-1]) if prompt.continues_final else text

    def _theirs(self, chat: Chat, *, opens: bool) -> str:
        text: str = self._oracle.apply_chat_template(
            [self._as_theirs(message) for message in chat["messages"]],
            tools=chat.get("tools"),
            add_generation_prompt=opens,
            continue_final_message=bool(chat.get("continues")),
            tokenize=False,
            **chat.get("arguments", {}),
        )
        return text

    def _as_theirs(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as transformers asks for it: arguments are objects, and no list of calls is empty."""
        message = {name: value for name, value in message.items() if value or name != "tool_calls"}
        if message["role"] == "developer" and "developer" not in self._oracle.chat_template:
            message["role"] = "system"
        if "tool_calls" in message:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": _object(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        return message

    def _formed(self, chat: Chat) -> Chat:
        """The chat with its content in the form that the template takes."""
        return {**chat, "messages": [self._formed_message(message) for message in chat["messages"]]}

    def _formed_message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list) and not self._reads.takes_parts:
            return {**message, "content": "".join(part["text"] for part in content)}
        if isinstance(content, str) and not self._reads.takes_text:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


def prompt_of(chat: Chat, *, opens: bool = True) -> ChatPrompt:
    return ChatPrompt(
        msgspec.convert(chat["messages"], list[ChatMessage]),
        tools=tuple(_decode_tools(msgspec.json.encode(chat.get("tools", [])))),
        arguments=chat.get("arguments", {}),
        continues_final=bool(chat.get("continues")),
        opens_answer=opens,
    )


_decode_tools: Final = msgspec.json.Decoder(list[Tool]).decode
_object: Final = msgspec.json.Decoder(dict[str, Any]).decode


def tried(render: Callable[[], str]) -> str | Refusal:
    try:
        return render()
    except InvalidRequest as error:
        return Refusal(error.param or "", error.message)
    except Exception as error:  # transformers lets a template's own pass
        return Refusal("", f"{type(error).__name__}: {error}")


def is_named(param: str) -> bool:
    return param.startswith(NAMED) or param.endswith(".tool_calls")
