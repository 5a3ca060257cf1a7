"""A response's input as the one chat form.

Rules:

1. Nothing is moved, and nothing is put together but what the model wrote as one answer: its reasoning, its
   text and its calls, which are items of their own here, are one message of the assistant's. Text behind text
   and reasoning behind text or a call begin another, since no answer of ours has them.
2. What does not change the meaning changes no message: ids, statuses and phases are left out, and a list of
   one text is that text.
3. Reasoning is its own text where an item has it, else what `encrypted_content` of ours holds, else its
   summary. An item that another server has encrypted is left out.
4. What is refused is refused with its place among the items, since the messages have other numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from shared.apis.chat_messages import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionToolCall,
    ImagePart,
    ImageUrl,
    TextPart,
)
from shared.apis.nothing import unsupported
from shared.apis.responses.items import InputItem, InputPart
from shared.apis.responses.tools import flat_name
from shared.wire.errors import InvalidRequest, UnsupportedParameter
from shared.wire.shapes import IMAGES_MAX

T = TypeVar("T")
Said = str | Sequence[InputPart] | None

PARAM: Final = "input"
_TEXTS: Final = frozenset({"input_text", "output_text", "text"})
"""The types of parts whose `text` is what is said."""
_THOUGHTS: Final = frozenset({"reasoning_text", "summary_text", "text"})
_NOT_TAKEN: Final = {
    "item_reference": "no item is kept by its id; send the item itself",
    "input_file": "files are not read; send their text",
}
"""A hint for types that callers may expect, beside their name."""


class InputMessages(Struct, frozen=True):
    """An input as messages."""

    messages: list[ChatMessage]
    places: tuple[str, ...]
    """The place of each message in the request: that of its first item."""
    image: str | None = None
    """The place of the first image. None without one."""


def conversation(instructions: str | None, given: str | Sequence[InputItem]) -> InputMessages:
    """The messages of an input, behind the instructions. Raises InvalidRequest, and UnsupportedParameter for
    items and parts of other types than those that are read here."""
    reader = _Reader()
    if instructions:
        reader.add(ChatMessage("system", instructions), "instructions")
    if isinstance(given, str):
        reader.add(ChatMessage("user", given), PARAM)
    else:
        reader.read(given)
        if not reader.messages:
            raise InvalidRequest(f"{PARAM} has no item that says anything.", param=PARAM)
    return InputMessages(reader.messages, tuple(reader.places), reader.image)


class _Turn(Struct):
    """A message of the assistant's while its items are read."""

    place: str
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[FunctionToolCall] = []
    ends_with_text: bool = False

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant",
            "".join(self.texts) if self.texts else None,
            reasoning_content="".join(self.thoughts) if self.thoughts else None,
            tool_calls=[*self.calls] or None,
        )


class _Reader:
    """The items that were read so far, as messages."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.places: list[str] = []
        self.image: str | None = None
        self._images = 0
        self._turn: _Turn | None = None

    def add(self, message: ChatMessage, place: str) -> None:
        self._end_turn()
        self.messages.append(message)
        self.places.append(place)

    def read(self, items: Iterable[InputItem]) -> None:
        for index, item in enumerate(items):
            place = f"{PARAM}[{index}]"
            match item.kind:
                case "message":
                    self._message(item, place)
                case "function_call" | "custom_tool_call":
                    call = _call(item, place)
                    self._going_on(place).calls.append(call)
                case "function_call_output" | "custom_tool_call_output":
                    call_id = _given(item.call_id, f"{place}.call_id")
                    content = self._content(item.output, f"{place}.output")
                    self.add(ChatMessage("tool", content, tool_call_id=call_id), place)
                case "reasoning":
                    if thought := _thought(item, place):
                        self._going_on(place, begins=True).thoughts.append(thought)
                case kind:
                    raise _not_taken(kind, f"{place}.type")
        self._end_turn()

    def _message(self, item: InputItem, place: str) -> None:
        if item.role is None:
            raise _required(f"{place}.role")
        if item.role != "assistant":
            self.add(ChatMessage(item.role, self._content(item.content, f"{place}.content")), place)
            return
        turn = self._going_on(place, begins=self._turn is not None and self._turn.ends_with_text)
        turn.texts.append(_text(item.content, f"{place}.content"))
        turn.ends_with_text = True

    def _going_on(self, place: str, *, begins: bool = False) -> _Turn:
        """The turn that an item at `place` belongs to. `begins`: it begins another, where there is text or a
        call in this one."""
        if begins and self._turn is not None and (self._turn.texts or self._turn.calls):
            self._end_turn()
        if self._turn is None:
            self._turn = _Turn(place)
        self._turn.ends_with_text = False
        return self._turn

    def _end_turn(self) -> None:
        if (turn := self._turn) is not None:
            self._turn = None
            self.messages.append(turn.message)
            self.places.append(turn.place)

    def _content(self, content: Said, where: str) -> str | list[ContentPart]:
        """The content of a message, in its parts."""
        if content is None:
            raise _required(where)
        if isinstance(content, str):
            return content
        parts: list[ContentPart] = []
        for at, part in enumerate(content):
            place = f"{where}[{at}]"
            if part.type == "input_image":
                parts.append(self._image(part, place))
            else:
                parts.append(TextPart(_said(part, place)))
        return parts[0].text if len(parts) == 1 and isinstance(parts[0], TextPart) else parts

    def _image(self, part: InputPart, place: str) -> ImagePart:
        self._images += 1
        if self._images > IMAGES_MAX:
            raise InvalidRequest(f"{PARAM} must have at most {IMAGES_MAX} images.", param=PARAM)
        self.image = self.image or place
        return ImagePart(ImageUrl(_given(part.image_url, f"{place}.image_url"), part.detail))


def _call(item: InputItem, place: str) -> FunctionToolCall:
    call_id, name = _given(item.call_id, f"{place}.call_id"), _given(item.name, f"{place}.name")
    if item.kind == "custom_tool_call":
        arguments = custom_arguments(_given(item.input, f"{place}.input"))
    else:
        arguments = _given(item.arguments, f"{place}.arguments")
    return FunctionToolCall(call_id, FunctionCall(flat_name(item.namespace, name), arguments))


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return msgspec.json.encode({"input": text}).decode()


def _thought(item: InputItem, place: str) -> str:
    """The text of reasoning (rule 3). Empty where none can be read."""
    if item.content:
        return _thinking(item.content, f"{place}.content")
    if item.encrypted_content is not None:
        return item.kept or ""
    return _thinking(item.summary or "", f"{place}.summary")


def _thinking(value: str | Sequence[InputPart], where: str) -> str:
    if isinstance(value, str):
        return value
    texts: list[str] = []
    for at, part in enumerate(value):
        if part.type not in _THOUGHTS:
            raise _not_taken(part.type, f"{where}[{at}].type")
        texts.append(_given(part.text, f"{where}[{at}].text"))
    return "".join(texts)


def _text(content: Said, where: str) -> str:
    """The text of a message of the assistant's."""
    if content is None:
        raise _required(where)
    if isinstance(content, str):
        return content
    return "".join([_said(part, f"{where}[{at}]") for at, part in enumerate(content)])


def _said(part: InputPart, place: str) -> str:
    if part.type in _TEXTS:
        return _given(part.text, f"{place}.text")
    if part.type == "refusal":
        return _given(part.refusal, f"{place}.refusal")
    raise _not_taken(part.type, f"{place}.type")


def _given(value: T | None, where: str) -> T:
    if value is None:
        raise _required(where)
    return value


def _required(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is required.", param=where)


def _not_taken(kind: str, where: str) -> UnsupportedParameter:
    """The error of a type that is not read here."""
    if (why := _NOT_TAKEN.get(kind)) is not None:
        return UnsupportedParameter(f"{where} {kind} is not supported: {why}.", param=where)
    return unsupported(where)
