"""The arguments of a past call, as objects that print themselves as the model wrote them.

A template writes arguments by `tojson`, which has one spelling of each value. The model may have written
another one (`{"price":19.90}`), and each token behind the first that differs is computed anew in every turn.
So an object remembers its JSON, and prints as that.

Rules:

1. A text without white space, and with numbers as Python spells them, is not remembered: that is what clients
   make of arguments that they have read, and says nothing about what the model wrote. They print as any
   object does, which is how the model was trained to write them.
2. For all else a template can do with it, it is a dict, a list or a number like any other. It prints as it
   was written where `tojson` without arguments makes JSON of it, alone or within its call, and a number also
   where it becomes text.
3. Beside all arguments, only those values are remembered that are an argument of their own: templates that do
   not print all arguments at once print each of them.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from shared.wire.shapes import MESSAGES_MAX

_decode_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_object: Final = msgspec.json.Decoder(dict[str, Any]).decode
_LEVELS: Final = ("tool_calls", "function", "arguments")
"""The keys that lead from a message to its calls' arguments."""


class WrittenObject(dict[str, Any]):
    """A JSON object with its text."""

    __slots__ = ("_text",)

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text


class WrittenArray(list[Any]):
    """A JSON array with its text."""

    __slots__ = ("_text",)

    def __init__(self, items: list[Any], text: str) -> None:
        super().__init__(items)
        self._text = text


class WrittenNumber(float):
    """A JSON number with its text."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, number: float, text: str) -> WrittenNumber:
        made = super().__new__(cls, number)
        made._text = text
        return made

    def __str__(self) -> str:
        return self._text


Written = WrittenObject | WrittenArray | WrittenNumber


def arguments_of(text: str) -> dict[str, Any]:
    """The object that a text is the JSON of. Raises MsgspecError, UnicodeError or RecursionError."""
    plain = plain_arguments_of(text)
    if json.dumps(plain, ensure_ascii=False, separators=(",", ":")) == text:
        return plain
    return WrittenObject({name: _written(raw) for name, raw in _decode_fields(text).items()}, text)


def plain_arguments_of(text: str) -> dict[str, Any]:
    """The object, which remembers nothing. Raises as `arguments_of` does."""
    return _decode_object(text)


def _written(raw: msgspec.Raw) -> Any:
    """The value of one argument, with its text where it has another one than its own."""
    value, text = msgspec.json.decode(raw), str(raw, "utf-8")
    if isinstance(value, dict):
        return WrittenObject(value, text)
    if isinstance(value, list):
        return WrittenArray(value, text)
    return WrittenNumber(value, text) if isinstance(value, float) and str(value) != text else value


def written_json(value: Any) -> str:
    """The JSON of a value in which arguments may be, as they were written."""
    if isinstance(value, Written):
        return value._text
    if not _leads(value):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(map(written_json, value)) + "]"
    fields = (f"{json.dumps(name, ensure_ascii=False)}: {written_json(one)}" for name, one in value.items())
    return "{" + ", ".join(fields) + "}"


def _leads(value: Any) -> bool:
    """True for a message, or a part of one, with arguments that remember how they were written."""
    if isinstance(value, dict):
        return isinstance(value, WrittenObject) or any(_leads(value.get(key)) for key in _LEVELS)
    return isinstance(value, list) and len(value) <= MESSAGES_MAX and any(map(_leads, value))
