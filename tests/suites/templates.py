"""The chat templates that TRL and llama.cpp ship, of most families of models, against transformers, to the
letter. llama.cpp's are as their makers published them.

Every template renders every chat of `tests.suites.chats`, with and without what begins an answer, in place
and as the process for long chats does it. A rendering counts as

- *equal*, where both give the same text;
- *refused by both*, where the template refuses, or cannot render the chat;
- *equal in the template's form*, where they do once the chat has the one form that a meaning has for us:
  content in parts is one text, and a text is one part for a template that takes nothing else; arguments are
  spelled as Python spells JSON; an effort says whether to think;
- *equal once it is taken*, where the template takes the chat, or all of it, only as
  `shared.text.template_takes` changes it: transformers fails there, or the template leaves out a message, or
  moves it;
- *refused by name*, where transformers leaves out in silence what the template does not read: tools, calls,
  or a variable of the request;
- *different* else.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import tokenizers

from shared.apis.chat_messages import ChatMessage
from shared.apis.prompt import ChatPrompt
from shared.apis.tools import Tool
from shared.fairness.fair_threads import Slices, at_once
from shared.process.clock import SYSTEM_CLOCK
from shared.text.bounded_template import SOURCE_LEN_MAX, Unbounded
from shared.text.chat_template import (
    BoundedEnvironment,
    ChatTemplate,
    CompiledTemplate,
    TemplateInput,
    variables_read,
)
from shared.text.rendering import Chat as Rendering
from shared.text.rendering import Renderer, encoded, told
from shared.text.rendering_child import rendered
from shared.text.template_takes import Takes
from shared.wire.errors import InvalidRequest
from tests.bench.figures import Figure, at_least, at_most, figure
from tests.suites.cache import SuiteFailed, sdist, wheel
from tests.suites.chats import CHATS, Chat

SUMMARY: Final = "the chat templates that TRL and llama.cpp ship, against transformers"
TRL: Final = ("trl", "1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396")
LLAMA_CPP: Final = (
    "llama-cpp-python",
    "0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
)
TEMPLATES: Final = 72
PUBLISHED: Final = 70
SPECIAL: Final = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
EQUAL: Final = ("equal", "equal in the template's form", "equal once it is taken")
KINDS: Final = (*EQUAL, "refused by both", "refused by name")
NAMED: Final = ("tools", "chat_template_kwargs.", "reasoning_effort")
"""What a refusal names that transformers does not have: these, and calls."""


def run(cache: Path) -> list[Figure]:
    return [*_judged("", shipped(cache), TEMPLATES), *_judged("published ", published(cache), PUBLISHED)]


def _judged(which: str, sources: dict[str, str], expected: int) -> list[Figure]:
    counts: Counter[str] = Counter()
    in_place = 0
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
        figure(f"{which}templates", len(sources), "templates", at_least(expected)),
        figure(f"{which}templates rendered in place", in_place, "templates"),
        *(figure(f"{which}{kind}", counts[kind], "renderings") for kind in KINDS),
        figure(f"{which}different", different, "renderings", at_most(0)),
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


def published(cache: Path) -> dict[str, str]:
    """Those of llama.cpp, by their names. Raises SuiteFailed."""
    folder = sdist(cache, *LLAMA_CPP) / "vendor/llama.cpp/models/templates"
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    if not sources:
        raise SuiteFailed("there are no templates in it")
    return sources


class Refusal(NamedTuple):
    """What came instead of a text."""

    param: str
    message: str


class InProcess(Renderer):
    """What the process for long chats does, in this one."""

    def slices(self, chat: Rendering, length: int) -> Slices[str]:
        yield
        return told(rendered(encoded(chat)))


class Judge:
    """One template, rendered by us and by transformers."""

    def __init__(self, source: str) -> None:
        arguments = variables_read(source, SPECIAL)
        self._ours = ChatTemplate(source, SPECIAL, SYSTEM_CLOCK, arguments)
        takes = self._ours.takes
        self._apart = ChatTemplate(
            source + "{# " + "-" * SOURCE_LEN_MAX + " #}", SPECIAL, SYSTEM_CLOCK, arguments, takes=takes
        )
        self._taken = TemplateInput.of(source, takes, arguments)
        form = {name: getattr(takes, name) for name in ("text", "developer", "no_text", "objects")}
        self._formed = TemplateInput.of(source, Takes(**form), arguments)
        """The form of each message by itself."""
        from transformers import PreTrainedTokenizerFast

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
        ours = tried(lambda: at_once(self._ours.slices(prompt)))
        apart = tried(lambda: at_once(self._apart.slices(prompt, InProcess())))
        if ours != apart:
            return f"in place {ours!r}, apart {apart!r}"
        theirs = tried(lambda: self._theirs(chat, chat["messages"], opens=opens))
        if isinstance(ours, str) and ours == theirs:
            return KINDS[0]
        usual = {**chat, "messages": [*map(_respelled, chat["messages"])]}
        forms = [
            tried(partial(self._in_form, given, usual, opens=opens)) for given in (self._formed, self._taken)
        ]
        if isinstance(ours, str):
            ours = tried(lambda: at_once(self._ours.slices(prompt_of(usual, opens=opens))))
            return KINDS[1 + forms.index(ours)] if ours in forms else f"ours {ours!r}, theirs {theirs!r}"
        if not any(isinstance(text, str) for text in (theirs, *forms)):
            return KINDS[3]
        return KINDS[4] if is_named(ours.param) else f"ours {ours!r}, theirs {theirs!r}"

    def _in_form(self, given: TemplateInput, chat: Chat, *, opens: bool) -> str:
        """The text of a chat whose messages and arguments are as we give them to a template."""
        prompt = prompt_of({**chat, "continues": False})
        messages = given.formed(at_once(given.message_slices(prompt)), prompt)
        known = given.variables(prompt)
        arguments = {name: value for name, value in known.items() if name in given.arguments}
        return self._theirs({**chat, "arguments": arguments}, messages, opens=opens)

    def _theirs(self, chat: Chat, messages: list[dict[str, Any]], *, opens: bool) -> str:
        text: str = self._oracle.apply_chat_template(
            [self._as_theirs(message) for message in messages],
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
        if message["role"] == "developer" and not self._ours.takes.developer:
            message["role"] = "system"
        if "tool_calls" in message and self._ours.takes.objects:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": _object(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        return message


def _respelled(message: dict[str, Any]) -> dict[str, Any]:
    """The message, with arguments as clients spell JSON that they have read."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _usual(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _usual(arguments: str) -> str:
    return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))


def prompt_of(chat: Chat, *, opens: bool = True) -> ChatPrompt:
    return ChatPrompt(
        msgspec.convert(chat["messages"], list[ChatMessage]),
        tools=tuple(_decode_tools(msgspec.json.encode(chat.get("tools", [])))),
        arguments=chat.get("arguments", {}),
        continues_final=bool(chat.get("continues")),
        opens_answer=opens,
    )


_decode_tools: Final = msgspec.json.Decoder(list[Tool]).decode
_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode


def _object(arguments: Any) -> Any:
    return _decode_object(arguments) if isinstance(arguments, str) else arguments


def tried(render: Callable[[], str]) -> str | Refusal:
    try:
        return render()
    except InvalidRequest as error:
        return Refusal(error.param or "", error.message)
    except Exception as error:  # transformers lets a template's own pass
        return Refusal("", f"{type(error).__name__}: {error}")


def is_named(param: str) -> bool:
    return param.startswith(NAMED) or param.endswith(".tool_calls")
