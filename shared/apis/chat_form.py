"""The fields by which a chat becomes a prompt, as chats and `/tokenize` have them: tools, the template's
variables, and how the prompt ends. What our engines ask of them, and of the calls in a chat's history, is
checked here.

`continue_final_message` and `add_generation_prompt` are vLLM's. With the first the answer goes on where the
last message ends, so nothing may stand between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from msgspec import Raw

from shared.apis.chat_messages import ChatMessage, FunctionToolCall
from shared.apis.holding import DEPTH_MAX, SURE_LEN, Census, census_slices
from shared.apis.prompt import ChatPrompt
from shared.apis.tools import Tool, check_tools
from shared.fairness.fair_threads import Slices
from shared.wire.errors import InvalidRequest

ARGUMENTS_LEN_MAX: Final = 16 * 1024
"""Bytes of `chat_template_kwargs`."""
ARGUMENTS_DEPTH_MAX: Final = 16
"""The most arrays and objects within each other in it."""


class ChatFields(Protocol):
    """A request that has these fields."""

    tools: list[Tool] | None
    chat_template_kwargs: dict[str, Any] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None


def chat_prompt(
    asked: ChatFields, messages: list[ChatMessage], reasoning_effort: str | None = None
) -> ChatPrompt:
    """The prompt of a chat that sets any of the fields."""
    arguments = asked.chat_template_kwargs or {}
    if reasoning_effort is not None:
        arguments = {"reasoning_effort": reasoning_effort, **arguments}
    continues, opens = bool(asked.continue_final_message), asked.add_generation_prompt
    return ChatPrompt(
        messages,
        tools=tuple(asked.tools or ()),
        arguments=arguments,
        continues_final=continues,
        opens_answer=not continues if opens is None else opens,
    )


def check_chat(asked: ChatFields, messages: Sequence[ChatMessage], arguments: Raw | None) -> None:
    """Check the fields for our engines; `arguments` are those of the template as they were sent. Raises
    InvalidRequest."""
    if asked.tools:
        check_tools(asked.tools)
    if asked.chat_template_kwargs:
        _check_arguments(asked.chat_template_kwargs, len(arguments or b""))
    if asked.continue_final_message:
        _check_final(asked, messages[-1])
    for index, message in enumerate(messages):
        if message.role == "tool" and not message.tool_call_id:
            where = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"{where} is required.", param=where)


def _check_arguments(arguments: dict[str, Any], length: int) -> None:
    where = "chat_template_kwargs"
    if length > ARGUMENTS_LEN_MAX:
        raise InvalidRequest(f"{where} must have at most {ARGUMENTS_LEN_MAX} bytes.", param=where)
    level: list[Any] = [arguments]
    for _ in range(ARGUMENTS_DEPTH_MAX):
        level = [inner for one in level for inner in _inner(one)]
    if any(isinstance(one, dict | list) for one in level):
        message = f"{where} has more than {ARGUMENTS_DEPTH_MAX} levels of nesting."
        raise InvalidRequest(message, param=where)


def _inner(value: Any) -> Sequence[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_final(asked: ChatFields, final: ChatMessage) -> None:
    where = "continue_final_message"
    if asked.add_generation_prompt:
        raise InvalidRequest(f"{where} and add_generation_prompt exclude each other.", param=where)
    if final.role != "assistant":
        raise InvalidRequest(f"{where} needs a last message of the assistant's.", param=where)
    if final.tool_calls:
        raise InvalidRequest(f"{where} needs a last message without calls.", param=where)


# -- the calls of a history -----------------------------------------------------------------------


def long_arguments(chat: ChatPrompt) -> list[tuple[str, str]]:
    """The arguments of calls, each behind its name, that may hold more than a body may have: all of them
    where together they are long, else those with more brackets than there may be levels."""
    found = [*_arguments(chat)]
    if sum([len(text) for _, text in found]) > SURE_LEN:
        return found
    return [one for one in found if one[1].count("[") + one[1].count("{") > DEPTH_MAX]


def _arguments(chat: ChatPrompt) -> Iterator[tuple[str, str]]:
    for index, message in enumerate(chat.messages):
        for at, call in enumerate(message.tool_calls or ()):
            if isinstance(call, FunctionToolCall):
                where = chat.place(index, f".tool_calls[{at}].function.arguments")
                yield where, call.function.arguments


def argument_slices(arguments: Sequence[tuple[str, str]]) -> Slices[None]:
    """Count the values in arguments, which are JSON within a string of the body: templates are given them as
    objects. Raises InvalidRequest where all together have more than a body may have."""
    seen = Census(0, 0, 0)
    for where, text in arguments:
        one = yield from census_slices(text.encode())
        seen = Census(
            seen.values + one.values, seen.fields + one.fields, seen.strings + one.strings, depth=one.depth
        )
        if (excess := seen.excess) is not None:
            raise InvalidRequest(f"The calls of tools have {excess}.", param=where)
