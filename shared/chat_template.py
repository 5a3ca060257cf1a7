"""A model's chat template, rendered in a sandbox, to the letter as transformers renders it.

Templates come from the model directory alone, never from a client. Still they are code of another author, so
they run in Jinja's immutable sandbox, they see nothing but plain data, and the rendered chat is bounded, as
is any string or list made by multiplication. Long chats are rendered by a process of their own
(`shared.rendering`), where time and memory are bounded, too. A short one is rendered in place, and nothing
stops a template that was written never to end: a model's author is trusted with that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.apis.messages import ChatMessage
from shared.apis.shapes import BODY_LEN_MAX
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import InvalidRequest
from shared.fair_threads import Slices
from shared.rendering import APART_LEN, RENDERER, Chat, Renderer

RENDERED_LEN_MAX: Final = 2 * BODY_LEN_MAX
"""Characters of a rendered chat: a body at its limit, and as much again for what the template adds."""
MESSAGE_LEN_MAX: Final = 200
"""Characters of a template's own error message that reach the client."""

_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The exceptions that a template's code can raise, beside Jinja's own, on messages that it does not
expect."""


class ChatTemplate:
    """A compiled template. Raises ValueError when it is not valid Jinja."""

    def __init__(self, source: str, special_tokens: dict[str, str], clock: Clock = SYSTEM_CLOCK) -> None:
        """`special_tokens` maps names as templates know them (`bos_token`) to their text."""
        self._source, self._special_tokens, self._clock = source, special_tokens, clock
        try:
            self._template = _environment(clock).from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._given = {
            **self._template.globals,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **special_tokens,
        }
        """The variables of every rendering, beside the messages. The template's own `generate` would collect
        them from two dicts each time, and pass every block through a generator of its own; its `new_context`
        would note for each rendering which of them are globals, which `include` alone asks."""
        self._knows_developer = "developer" in source

    def render(self, messages: list[ChatMessage]) -> str:
        """The prompt, up to where the assistant's turn begins. Raises InvalidRequest where the template
        refuses."""
        return self.render_plain(self._all_plain(messages))

    def slices(self, messages: list[ChatMessage], renderer: Renderer = RENDERER) -> Slices[str]:
        """The same, as a job: a long chat is rendered by another process. Raises Overloaded, too."""
        plain = self._all_plain(messages)
        if sum(len(text) for message in plain for text in message.values()) <= APART_LEN:
            return self.render_plain(plain)
        return (
            yield from renderer.slices(Chat(self._source, self._special_tokens, plain, self._clock.wall()))
        )

    def render_plain(self, messages: list[dict[str, str]]) -> str:
        """The prompt of messages as templates expect them. Raises as `render` does."""
        blocks: list[str] = []
        room = RENDERED_LEN_MAX
        try:
            seen = {**self._given, "messages": messages}
            context = Context(self._template.environment, seen, self._template.name, self._template.blocks)
            for block in self._template.root_render_func(context):
                blocks.append(block)
                room -= len(block)
                if room < 0:
                    raise InvalidRequest("The chat is too long.", param="messages")
        except _Refused as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise InvalidRequest(message[:MESSAGE_LEN_MAX], param="messages") from None
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise InvalidRequest(
                "The model's chat template cannot render these messages.",
                param="messages",
                detail=f"the chat template raised {type(error).__name__}",
            ) from None
        return "".join(blocks)

    def _all_plain(self, messages: list[ChatMessage]) -> list[dict[str, str]]:
        return [self._plain(message) for message in messages]

    def _plain(self, message: ChatMessage) -> dict[str, str]:
        """The message as templates expect it, keys in the order that they have in transformers, which gives
        reasoning a second name, `thinking`. For a template that does not know the role `developer`, it is
        `system`."""
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        reasoning = message.reasoning_content
        plain = {} if reasoning is None else {"thinking": reasoning}
        plain |= {"role": role, "content": message.text}
        if message.name is not None:
            plain["name"] = message.name
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        return plain


class _Refused(jinja2.TemplateError):
    """The error of a template that called `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("powers are not for chat templates")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and len(sequence) * times > RENDERED_LEN_MAX:
                raise OverflowError("a product that is larger than any chat")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(clock: Clock) -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now(clock)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`, without the escapes of HTML that Jinja's own writes and no model has seen in
    training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(clock: Clock) -> Callable[[str], str]:
    """The global function `strftime_now`: local time, as in transformers."""
    return lambda format_: datetime.fromtimestamp(clock.wall()).strftime(format_)
