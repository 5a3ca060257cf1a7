"""Messages in OpenAI's shapes, which are those of the one chat form (`shared.apis.prompt`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from shared.wire.shapes import MESSAGES_MAX, Unshown


class TextPart(Unshown, tag_field="type", tag="text"):
    text: str


class RefusalPart(Unshown, tag_field="type", tag="refusal"):
    refusal: str


class ImageUrl(Unshown, omit_defaults=True):
    url: str
    detail: Annotated[str, Meta(max_length=16)] | None = None


class ImagePart(Unshown, tag_field="type", tag="image_url"):
    image_url: ImageUrl


ContentPart = TextPart | ImagePart | RefusalPart


class FunctionCall(Unshown):
    name: str
    arguments: str


class CustomCall(Unshown):
    name: str
    input: str


class FunctionToolCall(Unshown, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class CustomToolCall(Unshown, tag_field="type", tag="custom"):
    id: str
    custom: CustomCall


ToolCall = FunctionToolCall | CustomToolCall


class ChatMessage(Unshown, omit_defaults=True):
    """A message of any of OpenAI's shapes. Which of them a model's engine takes is another question."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MESSAGES_MAX)] | UnsetType | None = UNSET
    """Null, or left out, where the assistant called tools or refused."""
    name: str | None = None
    reasoning_content: str | None = None
    """The assistant's reasoning, for templates that repeat it. An extension that open engines share."""
    reasoning: str | None = None
    """The newer name of the same."""
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MESSAGES_MAX)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None

    @property
    def text(self) -> str:
        content = self.content
        if isinstance(content, str):
            return content
        return "".join([part.text for part in content or () if isinstance(part, TextPart)])

    @property
    def printable(self) -> tuple[str, ...]:
        """The texts that a chat template of ours may print."""
        if (
            self.name is None
            and self.reasoning_content is None
            and self.reasoning is None
            and self.tool_calls is None
            and self.tool_call_id is None
            and self.refusal is None
            and type(self.content) is str
        ):
            return (self.content,)
        return tuple(self.texts)

    @property
    def texts(self) -> list[str]:
        """All texts in it, but for the addresses and bytes of images."""
        more = self.name, self.reasoning_content, self.reasoning, self.refusal, self.tool_call_id
        texts = [self.text, *filter(None, more)]
        if isinstance(self.content, list):
            texts += [part.refusal for part in self.content if isinstance(part, RefusalPart)]
        if self.tool_calls is None and self.function_call is None:  # as in most messages
            return texts
        calls: list[FunctionCall | CustomCall] = []
        for call in self.tool_calls or ():
            texts.append(call.id)
            calls.append(call.function if isinstance(call, FunctionToolCall) else call.custom)
        if self.function_call is not None:
            calls.append(self.function_call)
        for one in calls:
            texts += one.name, one.arguments if isinstance(one, FunctionCall) else one.input
        return texts

    @property
    def parts(self) -> Sequence[ContentPart]:
        """The parts of its content. Empty where that is a text or none."""
        content = self.content
        return content if isinstance(content, list) else ()
