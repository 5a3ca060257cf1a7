"""A chat as its model's template is given it: OpenAI's shapes, as transformers passes them on, in the form
that the template takes.

Rules:

1. One meaning has one form. Content in parts is their texts, one behind the other, which is what templates
   make of parts; a template that takes nothing but parts is given that text as one. Content that is null,
   empty or left out is what the template takes for none in a message that is calls alone, else an empty text.
   `tool_calls` that is empty is left out, and so is reasoning; where there is reasoning, it is there under
   each of its names.
2. Arguments of past calls are objects, since templates write them as JSON or go through them. They print as
   they were written (`shared.text.call_arguments`).
3. What a template does not take is changed as `shared.text.template_takes` has it.
4. What a template does not read is not dropped in silence: tools and calls are refused where it has no word
   of them, and so is a variable that is not among those that its operator lets requests set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from shared.apis.chat_messages import ChatMessage, FunctionToolCall, RefusalPart, TextPart, ToolCall
from shared.apis.prompt import ChatPrompt
from shared.apis.tools import FunctionTool, Tool
from shared.fairness.fair_threads import Slices
from shared.text.call_arguments import arguments_of, plain_arguments_of, written_json
from shared.text.template_takes import Message, Takes, nearest, taken, without_text
from shared.wire.errors import InvalidRequest

EFFORT: Final = "reasoning_effort"
"""The one variable that requests name in a field of its own."""
THINKING: Final = "enable_thinking"
"""The variable by which most templates are told whether the model is to think."""
TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark at the end of a message that is to be continued, which some templates look for."""

SLICE_LEN: Final = 256 * 1024
"""Characters of the arguments that are decoded in one slice, which takes some milliseconds."""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The variables that one template is given of a chat."""

    takes: Takes
    takes_all: bool
    """True if the template takes every chat as it is."""
    knows_tools: bool
    knows_calls: bool
    arguments: Collection[str]
    """The variables that a request may set."""

    @classmethod
    def of(cls, source: str, takes: Takes, arguments: Collection[str]) -> TemplateInput:
        return cls(takes, _takes_all(takes), "tools" in source, "tool_calls" in source, arguments)

    def taking(self, takes: Takes) -> TemplateInput:
        """The input of the same template if it takes this."""
        return replace(self, takes=takes, takes_all=_takes_all(takes))

    def messages(self, prompt: ChatPrompt) -> list[Message]:
        """The messages of a chat without calls, one for each of the prompt's. Raises InvalidRequest."""
        return [self._message(one) for one in prompt.messages]

    def message_slices(self, prompt: ChatPrompt) -> Slices[list[Message]]:
        """The messages of any chat, one for each of the prompt's, in slices. Raises InvalidRequest."""
        plain: list[Message] = []
        length = 0
        for index, one in enumerate(prompt.messages):
            message = self._message(one)
            plain.append(message)
            if one.tool_calls:
                length += self._add_calls(message, one.tool_calls, prompt, index)
                if length > SLICE_LEN:
                    length = 0
                    yield
        return plain

    def formed(self, plain: list[Message], prompt: ChatPrompt) -> list[Message]:
        """The messages in the form that the template takes. Those that are changed are changed in place.
        Raises InvalidRequest."""
        formed = plain if self.takes_all else taken(plain, self.takes)
        if prompt.continues_final:
            _mark(formed[-1], prompt.continues_param)
        if not self.takes.text:
            for message in formed:
                if isinstance(text := message.get("content"), str):
                    message["content"] = [{"type": "text", "text": text}]
        return formed

    def variables(self, prompt: ChatPrompt) -> dict[str, Any]:
        """The variables beside the messages that are not the same for all chats. Raises InvalidRequest."""
        wishes = {name: value for name, value in prompt.wishes.items() if name in self.arguments}
        arguments = self._with_effort({**wishes, **prompt.arguments})
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
        """The variables, with the effort as the template takes it. Where it takes no effort, or not that of
        `none`, it may know whether to think; `none` asks a template for nothing that knows not even that."""
        if EFFORT not in arguments:
            return arguments
        asked, efforts = arguments[EFFORT], self.takes.efforts
        thinks = asked != "none"
        if EFFORT in self.arguments and (thinks or not efforts or THINKING not in self.arguments):
            return {**arguments, EFFORT: nearest(asked, efforts)}
        others = {name: value for name, value in arguments.items() if name != EFFORT}
        if THINKING in self.arguments:
            return {THINKING: thinks, **others}
        return arguments if thinks else others

    def _message(self, message: ChatMessage) -> Message:
        """The message, keys in the order that they have in transformers, which gives reasoning a second name,
        `thinking`. For a template that does not know the role `developer`, it is `system`."""
        reasoning = message.reasoning_content or message.reasoning
        plain: Message = {"thinking": reasoning} if reasoning else {}
        is_unknown = message.role == "developer" and not self.takes.developer
        plain["role"] = "system" if is_unknown else message.role
        plain["content"] = message.content if type(message.content) is str else _content(message)
        if message.name is not None:
            plain["name"] = message.name
        if reasoning:
            plain["reasoning_content"] = plain["reasoning"] = reasoning
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        return plain

    def _add_calls(self, message: Message, calls: list[ToolCall], prompt: ChatPrompt, index: int) -> int:
        """Add its calls to a message. Returns the characters of their arguments."""
        if not self.knows_calls:
            where = prompt.place(index, ".tool_calls")
            raise InvalidRequest("This model's chat template knows no calls of tools.", param=where)
        length, made = 0, []
        for at, call in enumerate(calls):
            if isinstance(call, FunctionToolCall):
                where = prompt.place(index, f".tool_calls[{at}].function.arguments")
                made.append(self._call(call, where))
                length += len(call.function.arguments)
            else:
                custom = {"name": call.custom.name, "input": call.custom.input}
                made.append({"id": call.id, "type": "custom", "custom": custom})
        message["tool_calls"] = made
        if not message["content"]:
            without_text(message, self.takes)
        return length

    def _call(self, call: FunctionToolCall, where: str) -> dict[str, Any]:
        text = call.function.arguments or "{}"
        decode = arguments_of if self.takes.written else plain_arguments_of
        try:
            arguments = decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise InvalidRequest(f"{where} must be a JSON object, as text.", param=where) from None
        function = {
            "name": call.function.name,
            "arguments": arguments if self.takes.objects else written_json(arguments),
        }
        return {"id": call.id, "type": "function", "function": function}


def _takes_all(takes: Takes) -> bool:
    return takes.text and takes.any_order and takes.any_calls


def _content(message: ChatMessage) -> str:
    """The text of a content that is no text. That of an assistant which refused is the refusal."""
    content = message.content
    if not isinstance(content, list):
        return content if isinstance(content, str) else message.refusal or ""
    return "".join(
        [
            part.text if isinstance(part, TextPart) else part.refusal
            for part in content
            if isinstance(part, TextPart | RefusalPart)
        ]
    )


def continued(text: str, final: Message, where: str) -> str:
    """A chat, rendered with its last message marked, up to where that is to be continued. Raises
    InvalidRequest where the template does not write it as it is, which names the field that asks for it."""
    content = final["content"]
    said: str = content if isinstance(content, str) else content[0]["text"]
    tag = TAG.strip()
    if tag not in text or said.removesuffix(TAG).strip() not in text:
        message = "The last message cannot be continued: the chat template does not write it as it is."
        raise InvalidRequest(message, param=where)
    end = text.rindex(tag)
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


def _mark(final: Message, where: str) -> None:
    """Mark the end of the message that is to be continued. Raises InvalidRequest where it has no text, which
    names the field that asks for it."""
    if final.get("content") is None:
        message = "The last message cannot be continued: it has no content."
        raise InvalidRequest(message, param=where)
    final["content"] += TAG


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
