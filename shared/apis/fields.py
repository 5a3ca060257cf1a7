"""The request fields that ask for what no engine of ours can do, and those that are unknown.

A field that changes the answer elsewhere must not be dropped in silence: the caller would get another answer
than the one asked for, with a 200. So OpenAI's own fields that are not implemented, and the extensions of
other engines that are in use (vLLM, SGLang, llama.cpp, TGI), are listed (`shared.apis`) with the values that
ask for nothing; any other value is unsupported. Those of which our engines do a part are left to the request.
A field that is in no list is unknown: it is accepted, and named to the caller unless it is null, which asks
for nothing. Fields inside messages and their parts obey the same policy as those outside, and none of them
may be given twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final

import msgspec
from msgspec import Raw, Struct

from shared.apis.messages import ChatMessage, CustomToolCall, ImagePart
from shared.apis.nothing import FALSE, LOOKED_INTO, NONE, Nothing
from shared.apis.repeated import refuse_repeated, stays
from shared.apis.request import Request
from shared.wire.errors import InvalidRequest
from shared.wire.shapes import IMAGES_MAX

_MESSAGE: Final[Mapping[str, Nothing]] = {"audio": NONE, "prefix": FALSE, "partial": FALSE}
"""Fields of messages that no shape has."""
_CONTENTS: Final = ("tool_calls", "function_call", "refusal", "reasoning", "reasoning_content")
"""Fields of which the assistant's messages may have one in place of content."""
_OF_TOOLS: Final = frozenset({"tool", "function"})
"""The roles of messages that answer a call."""
_NOT_NAMED: Final = frozenset({f"messages.{name}" for name in (*_MESSAGE, "annotations")})
"""Fields of messages that are known, though no shape has them."""

_objects: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_object: Final = msgspec.json.Decoder(dict[str, Raw])


class Survey(Struct, frozen=True):
    """The unknown and unsupported fields of one request."""

    unknown: tuple[str, ...] = ()
    """The names of unknown fields, those within messages as `messages.name`."""
    unsupported: str | None = None
    """The first field that asks for what no engine of ours can do. None without one."""
    shapeless: tuple[str, ...] = ()
    """The names of the fields within messages that no shape of `shared.apis.messages` has, known or not."""
    is_plain: bool = True
    """True if no field is in the request's table, and all messages are texts alone."""


def survey(request: Request, fields: Mapping[str, Raw], known: frozenset[str]) -> Survey:
    """Look through the fields of a well-formed request. `known` are the names that its type has. Raises
    InvalidJson where an object that is looked into has a field twice, and InvalidRequest for a message that
    says nothing."""
    table = request.nothing
    unknown = [] if fields.keys() <= known else _unknown(fields, known | table.keys())
    unsupported = None
    is_plain = table.keys().isdisjoint(fields)
    if not is_plain:
        unsupported = next(_unsupported(fields, table), None)
        unknown += request.unknown_within(fields)
    if request.taken_from is not None:
        unsupported = unsupported or request.surplus
    if "stream_options" in fields and getattr(request, "stream_options", None) is not None:
        options = _object.decode(fields["stream_options"])
        if not stays(fields["stream_options"], options):
            refuse_repeated("stream_options", fields["stream_options"])
        unknown += [f"stream_options.{name}" for name in options if name != "include_usage"]
    chat: list[ChatMessage] | None = getattr(request, "messages", None) if request.has_messages else None
    shapeless: tuple[str, ...] = ()
    if chat is not None and not _are_plain(chat, fields["messages"]):
        is_plain = False
        _check_contents(chat)
        shapeless = tuple(dict.fromkeys(_shapeless(chat, fields["messages"], "messages", "messages")))
        unknown += [name for name in shapeless if name not in _NOT_NAMED]
        unsupported = unsupported or _unsupported_in_messages(chat, fields["messages"], shapeless)
    if unknown or unsupported or shapeless or not is_plain:
        return Survey(tuple(unknown), unsupported, shapeless, is_plain)
    return _NOTHING_TO_SAY


_NOTHING_TO_SAY: Final = Survey()
_NULL: Final = Raw(b"null")


def _unknown(fields: Mapping[str, Raw], known: frozenset[str]) -> list[str]:
    return [name for name, value in fields.items() if name not in known and value != _NULL]


class _PlainMessage(Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Raw
    content: Raw
    name: Raw = Raw()


_plain: Final = msgspec.json.Decoder(list[_PlainMessage])


def _are_plain(messages: list[ChatMessage], raw: Raw) -> bool:
    """True if all messages have a role, a text and perhaps a name alone, as most have, so that no field is
    unknown or unsupported. Raises InvalidJson where one has a field twice."""
    for message in messages:
        if type(message.content) is not str or message.role in _OF_TOOLS:
            return False
    try:
        plain = _plain.decode(raw)
    except msgspec.ValidationError:
        return False
    if not (stays(raw, plain) or _are_spaced(plain, raw)):
        refuse_repeated("messages", raw)
    return True


def _are_spaced(messages: list[_PlainMessage], raw: Raw) -> bool:
    """True if these are messages as Python's `json` writes them, with a space behind each colon and comma.
    Then none has a field twice: each field once makes the same bytes."""
    parts: list[bytes] = []
    for message in messages:
        parts += (b'}, {"role": ', message.role, b', "content": ', message.content)
    parts[0] = b'[{"role": '
    parts.append(b"}]")
    return b"".join(parts) == bytes(raw)


def _unsupported(fields: Mapping[str, Raw], table: Mapping[str, Nothing]) -> Iterator[str]:
    for name in fields:
        if name in table and table[name] is not LOOKED_INTO:
            value = msgspec.json.decode(fields[name])
            if value is not None and value not in table[name]:
                yield name


def _unsupported_in_messages(chat: Sequence[ChatMessage], raw: Raw, shapeless: Sequence[str]) -> str | None:
    if not _NOT_NAMED.isdisjoint(shapeless):
        for index, fields in enumerate(_objects.decode(raw)):
            for name in _unsupported(fields, _MESSAGE):
                return f"messages[{index}].{name}"
    for index, message in enumerate(chat):
        for name in _unsupported_in(message):
            return f"messages[{index}].{name}"
    return None


def _unsupported_in(message: ChatMessage) -> Iterator[str]:
    """The fields of a message that ask for what no engine of ours does."""
    if message.role == "function":
        yield "role"
    if message.function_call is not None:
        yield "function_call"
    if message.tool_calls and message.role != "assistant":
        yield "tool_calls"
    if message.tool_call_id and message.role != "tool":
        yield "tool_call_id"
    for at, call in enumerate(message.tool_calls or ()):
        if type(call) is CustomToolCall:
            yield f"tool_calls[{at}]"
    for at, part in enumerate(message.parts):
        if type(part) is ImagePart:
            yield f"content[{at}]"


def _check_contents(chat: Iterable[ChatMessage]) -> None:
    """Raises InvalidRequest for a message without content that stands for nothing else, and for too many
    images."""
    images = 0
    for index, message in enumerate(chat):
        if not isinstance(message.content, str | list) and not (
            message.role == "function"
            or (message.role == "assistant" and any(getattr(message, name) for name in _CONTENTS))
        ):
            where = f"messages[{index}].content"
            raise InvalidRequest(f"{where} is required.", param=where)
        images += sum(type(part) is ImagePart for part in message.parts)
    if images > IMAGES_MAX:
        raise InvalidRequest(f"messages must have at most {IMAGES_MAX} images.", param="messages")


@cache
def _shape(type_: type[Struct]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of a shape's fields, and of those that may hold objects of other shapes."""
    names = frozenset(type_.__struct_encode_fields__)
    if (tag := type_.__struct_config__.tag_field) is not None:
        names |= {tag}
    return names, tuple(name for name in type_.__struct_fields__ if name in _NESTED)


_NESTED: Final = frozenset({"content", "tool_calls", "function_call", "image_url", "function", "custom"})


def _shapeless(value: Struct | Sequence[Struct], raw: Raw, path: str, name: str) -> Iterator[str]:
    """The names of the fields in `raw` that the shapes of `value`, which was read from it, do not have.
    `path` is where it is in the request, `name` the same without numbers. Raises InvalidJson where an object
    has a field twice."""
    objects: list[dict[str, Raw]]
    if isinstance(value, Struct):
        values, objects = [value], [_object.decode(raw)]
        is_same = stays(raw, objects[0])
    else:
        values, objects = list(value), _objects.decode(raw)
        is_same = stays(raw, objects)
    if not is_same:
        refuse_repeated(path, raw)
    for at, (one, fields) in enumerate(zip(values, objects, strict=True)):
        names, nested = _shape(type(one))
        if not fields.keys() <= names:
            yield from (f"{name}.{key}" for key in fields if key not in names)
        for key in nested:
            if isinstance(held := getattr(one, key), list | Struct):
                where = path if isinstance(value, Struct) else f"{path}[{at}]"
                yield from _shapeless(held, fields[key], f"{where}.{key}", f"{name}.{key}")
