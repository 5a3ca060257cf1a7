"""A chat as its model's template is given it: OpenAI's shapes, as transformers passes them on.

Rules:

1. A message has the keys that it was sent with; one that is null, such as the content of an assistant that
   called tools, is left out. `tool_calls` that is empty is left out, too. Reasoning is there under each of
   its names. Messages of one role that follow one another stay apart.
2. Arguments of past calls are objects, since templates write them as JSON or go through them.
3. Content in parts stays in parts for a template that goes through them, and is one text for all others. A
   template that takes nothing but parts gets a text as one.
4. What a template does not read is not dropped in silence: tools and calls are refused where it has no word
   of them, and so is a variable that is not among those that its operator lets requests set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from shared.apis.chat_messages import ChatMessage, FunctionToolCall, RefusalPart, TextPart, ToolCall
from shared.apis.prompt import ChatPrompt
from shared.apis.tools import FunctionTool, Tool
from shared.text.template_reads import Reads
from shared.wire.errors import InvalidRequest

EFFORT: Final = "reasoning_effort"
"""The one variable that requests name in a field of its own."""
THINKING: Final = "enable_thinking"
"""The variable by which most templates are told whether the model is to think."""
TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark at the end of a message that is to be continued, which some templates look for."""

_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The variables that one template is given of a chat."""

    reads: Reads
    knows_developer: bool
    knows_tools: bool
    knows_calls: bool
    arguments: Collection[str]
    """The variables that a request may set."""

    @classmethod
    def of(cls, source: str, reads: Reads, arguments: Collection[str]) -> TemplateInput:
        developer, tools, calls = (name in source for name in ("developer", "tools", "tool_calls"))
        return cls(reads, developer, tools, calls, arguments)

    def messages(self, prompt: ChatPrompt) -> list[Message]:
        """The messages, as the template expects them. Raises InvalidRequest."""
        plain = [self._message(one, prompt, index) for index, one in enumerate(prompt.messages)]
        if prompt.continues_final:
            _mark(plain[-1])
        return plain

    def variables(self, prompt: ChatPrompt) -> dict[str, Any]:
        """The variables beside the messages that are not the same for all chats. Raises InvalidRequest."""
        wishes = {name: value for name, value in prompt.wishes.items() if name in self.arguments}
        arguments = {**wishes, **self._with_effort(prompt.arguments)}
        for name in arguments:
            if name not in self.arguments:
                where = prompt.effort_param if name == EFFORT else f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{where} is not supported by this model's chat template.", param=where)
        if prompt.tools and not self.knows_tools:
            raise InvalidRequest("This model's chat template knows no tools.", param="tools")
        return {
            **arguments,
            "tools": [_tool(tool, index) for index, tool in enumerate(prompt.tools)] or None,
            "add_generation_prompt": prompt.opens_answer and not prompt.continues_final,
        }

    def _with_effort(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The variables, with the effort as a template has it that knows but whether to think. An effort of
        `none` asks a template for nothing that knows not even that."""
        if EFFORT not in arguments or EFFORT in self.arguments:
            return arguments
        others = {name: value for name, value in arguments.items() if name != EFFORT}
        thinks = arguments[EFFORT] != "none"
        if THINKING in self.arguments:
            return {THINKING: thinks, **others}
        return arguments if thinks else others

    def _message(self, message: ChatMessage, prompt: ChatPrompt, index: int) -> Message:
        """The message, keys in the order that they have in transformers, which gives reasoning a second name,
        `thinking`. For a template that does not know the role `developer`, it is `system`."""
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        plain: Message = {} if reasoning is None else {"thinking": reasoning}
        is_unknown = message.role == "developer" and not self.knows_developer
        plain["role"] = "system" if is_unknown else message.role
        if type(message.content) is str and self.reads.takes_text:
            plain["content"] = message.content
        elif (content := self._content(message)) is not None:
            plain["content"] = content
        if message.name is not None:
            plain["name"] = message.name
        if message.reasoning_content is not None:
            plain["reasoning_content"] = reasoning
        if message.reasoning is not None:
            plain["reasoning"] = message.reasoning
        if message.tool_calls:
            if not self.knows_calls:
                where = f"{prompt.place(index)}.tool_calls"
                raise InvalidRequest("This model's chat template knows no calls of tools.", param=where)
            calls = enumerate(message.tool_calls)
            plain["tool_calls"] = [_call(call, prompt, index, at) for at, call in calls]
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if reasoning is not None:
            plain["reasoning_content"] = reasoning
        return plain

    def _content(self, message: ChatMessage) -> list[dict[str, str]] | str | None:
        """The content. That of an assistant which refused is the refusal."""
        content = message.content
        if not isinstance(content, list):
            text = content if isinstance(content, str) else message.refusal
            return text if text is None or self.reads.takes_text else [_text_part(text)]
        texts = [
            part.text if isinstance(part, TextPart) else part.refusal
            for part in content
            if isinstance(part, TextPart | RefusalPart)
        ]
        return [*map(_text_part, texts)] if self.reads.takes_parts else "".join(texts)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def continued(text: str, final: Message) -> str:
    """A chat, rendered with its last message marked, up to where that is to be continued. Raises
    InvalidRequest where the template does not write it as it is."""
    content = final["content"]
    said = content if isinstance(content, str) else _last_text(content)["text"]
    tag = TAG.strip()
    if tag not in text or said.removesuffix(TAG).strip() not in text:
        message = "The last message cannot be continued: the chat template does not write it as it is."
        raise InvalidRequest(message, param="continue_final_message")
    end = text.rindex(tag)
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


def _mark(final: Message) -> None:
    """Mark the end of the message that is to be continued. Raises InvalidRequest where it has no text."""
    match final.get("content"):
        case str(text):
            final["content"] = text + TAG
        case [*_] as parts if parts:
            _last_text(parts)["text"] += TAG
        case _:
            message = "continue_final_message needs a last message that has content."
            raise InvalidRequest(message, param="continue_final_message")


def _last_text(parts: list[dict[str, str]]) -> dict[str, str]:
    return parts[-1]  # all of them are texts


def _call(call: ToolCall, prompt: ChatPrompt, index: int, at: int) -> dict[str, Any]:
    if not isinstance(call, FunctionToolCall):
        custom = {"name": call.custom.name, "input": call.custom.input}
        return {"id": call.id, "type": "custom", "custom": custom}
    text = call.function.arguments
    try:
        arguments = _decode_object(text) if text else {}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        where = f"{prompt.place(index)}.tool_calls[{at}].function.arguments"
        raise InvalidRequest(f"{where} must be a JSON object, as text.", param=where) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool, index: int) -> dict[str, Any]:
    kind, spec = ("function", tool.function) if isinstance(tool, FunctionTool) else ("custom", tool.custom)
    plain: dict[str, Any] = {}
    for name in spec.__struct_fields__:
        value = getattr(spec, name)
        if isinstance(value, msgspec.Raw):
            value = _decoded(value, f"tools[{index}].{kind}.{name}")
        if value is not None and value is not msgspec.UNSET:
            plain[name] = value
    return {"type": kind, kind: plain}


def _decoded(value: msgspec.Raw, where: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        message = f"{where} cannot be read as JSON, or is nested too deeply."
        raise InvalidRequest(message, param=where) from None


def measured(prompt: ChatPrompt) -> int:
    """The characters of all that a template may print of a chat."""
    length = 0
    for message in prompt.messages:
        length += sum(map(len, message.printable))
    for tool in prompt.tools:
        spec = tool.function if isinstance(tool, FunctionTool) else tool.custom
        values = (getattr(spec, name) for name in spec.__struct_fields__)
        length += sum(len(value) for value in values if isinstance(value, str | msgspec.Raw))
    given = prompt.arguments or prompt.wishes
    return length + _length({**prompt.wishes, **prompt.arguments}) if given else length


def _length(arguments: Mapping[str, Any]) -> int:
    try:
        return len(msgspec.json.encode(arguments))
    except RecursionError:
        where = "chat_template_kwargs"
        raise InvalidRequest(f"{where} is nested too deeply.", param=where) from None
