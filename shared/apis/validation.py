"""The validation of a request: from bytes to a typed value, or to a 400 that says what to change.

Two passes over the body, both in C: one into a map of the top-level fields as they were sent, one
into the typed request. The map is what the gateway sends on (`with_fields`), with repeated and
misread names gone, so that both services read the same request.

Rules:

1. Whatever the bytes, the outcome is a `Parsed` or an `InvalidRequest`; nothing else escapes.
2. The error names the field (`param`), and never shows a value: values may be prompt text.
3. A field that asks for something no engine of ours can do is reported (`Parsed.unsupported`), and never
   silently ignored: the caller would get another answer than the one asked for, with a 200. So OpenAI's own
   fields that are not implemented, and the extensions of other engines that are in use (vLLM, SGLang,
   llama.cpp, TGI), are listed (`shared.apis`) with the values that ask for nothing; any other value is
   unsupported. Those of which our engines do a part are left to the request. Whether to refuse it is decided
   by the caller, which knows the engine.
4. A field that is in no list is unknown: it is accepted, and named to the caller unless it is null, which
   asks for nothing. Fields inside messages and their parts obey the same policy as those outside.
5. A body with an object that has a field twice is refused, as readers of JSON differ in which of the two
   counts. What is decoded of an object has each name once. Encoded again, with its values as they were sent,
   it is shorter than it was by a repeated field, by white space and by an escape in a name; nothing makes it
   longer. So an object that stays as long as it was, as SDKs send it, has no field twice. Others are looked
   at field by field, which takes several times as long.
6. What is made of a body is bounded before it is made: its values are counted first, so the work is some
   milliseconds for each megabyte, and so is the memory (`shared.apis.holding`).
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from shared.apis.chat_messages import ChatMessage, CustomToolCall, ImagePart
from shared.apis.holding import SLICE_LEN, Census, census_of, refuse_excess
from shared.apis.nothing import FALSE, LOOKED_INTO, NONE, Nothing, unsupported
from shared.apis.request import Request
from shared.fairness.fair_threads import Slices
from shared.wire.errors import InvalidJson, InvalidRequest
from shared.wire.shapes import IMAGES_MAX
from shared.wire.undecodable import UNDECODABLE

# -- repeated fields ------------------------------------------------------------------------------


PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""The names that are repeated to the caller who sent them, in headers too."""
_PLACE: Final = re.compile(
    r"[A-Za-z0-9_.-]{1,64}"
    r"|(?:tools\[\d{1,4}\](?:\.tools\[\d{1,4}\])?|response_format|structured_outputs|text\.format)"
    r"\.[A-Za-z0-9_.$-]{1,160}"
)
"""The names of fields, and places within tools and structures, such as
`tools[3].function.parameters.uniqueItems`."""


class UniqueName:
    """A name, equal only to itself, so that a repeated name does not hide the first."""

    __slots__ = ("name",)

    def __init__(self, _kind: type[Any], name: str) -> None:
        """The arguments are those of a `dec_hook`."""
        self.name = name


_encode: Final = msgspec.json.Encoder().encode
_decode_pairs: Final = msgspec.json.Decoder(
    list[dict[UniqueName, Raw]] | dict[UniqueName, Raw], dec_hook=UniqueName
).decode


def stays(raw: Raw, decoded: object) -> bool:
    """True if an object, or an array of objects, is as long as what is made of it again: then none has a
    field twice. `decoded` is what `raw` was decoded to, with the fields' values as they were sent."""
    return len(_encode(decoded)) == len(raw)


def refuse_repeated(path: str, raw: Raw) -> None:
    """Look field by field. Raises InvalidJson where an object, or one of an array of objects, has a field
    twice. `path` is its name."""
    objects = _decode_pairs(raw)
    if isinstance(objects, dict):
        _refuse_pairs(path, objects)
        return
    for at, pairs in enumerate(objects):
        _refuse_pairs(f"{path}[{at}]", pairs)


def _refuse_pairs(path: str, pairs: dict[UniqueName, Raw]) -> None:
    seen: set[str] = set()
    for key in pairs:
        if key.name in seen:
            name = f"{path}.{key.name}" if PLAIN_NAME.fullmatch(key.name) else path
            raise InvalidJson("A field is given twice.", param=name)
        seen.add(key.name)


# -- unknown and unsupported fields ---------------------------------------------------------------


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
    """The names of the fields within messages that no shape of `shared.apis.chat_messages` has, known or
    not."""
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
    if "stream_options" in fields and (given := getattr(request, "stream_options", None)) is not None:
        options = _object.decode(fields["stream_options"])
        if not stays(fields["stream_options"], options):
            refuse_repeated("stream_options", fields["stream_options"])
        unknown += [f"stream_options.{name}" for name in options if name not in given.__struct_fields__]
    chat: list[ChatMessage] | None = getattr(request, "messages", None) if request.has_messages else None
    shapeless: tuple[str, ...] = ()
    if chat is not None and not _are_plain(chat, fields["messages"]):
        is_plain = False
        _check_contents(chat)
        shapeless = tuple(dict.fromkeys(surplus_fields(chat, fields["messages"], "messages", "messages")))
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


_NESTED: Final = frozenset(
    {
        *("content", "tool_calls", "function_call", "image_url", "function", "custom", "source", "format"),
        *("output", "summary", "tools", "instructions", "choices", "levels"),
    }
)


def surplus_fields(value: Struct | Sequence[Struct], raw: Raw, path: str, name: str) -> Iterator[str]:
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
                yield from surplus_fields(held, fields[key], f"{where}.{key}", f"{name}.{key}")


# -- the whole body -------------------------------------------------------------------------------


T = TypeVar("T", bound=Request)

INLINE_LEN_MAX: Final = 256 * 1024
"""Bytes of a body that is counted and parsed on the event loop, in some two milliseconds; larger ones go to
threads."""
ENCODED_AGAIN_LEN_MAX: Final = 16 * 1024
"""Bytes of the longest body that is encoded again to see whether a field is given twice."""
FIELDS_MAX: Final = 256
"""The most fields at the body's top level."""
IGNORED_NAMED_MAX: Final = 32
"""The most names of ignored fields that the answer's header lists."""


class Parsed(Struct, Generic[T], frozen=True):
    request: T
    fields: dict[str, Raw]
    """The fields at the body's top level, as they were sent."""
    ignored: tuple[str, ...]
    """The names of unknown fields, those within messages too."""
    unsupported: str | None = None
    """The first field that asks for what no engine of ours can do. None without one."""
    shapeless: tuple[str, ...] = ()
    """The names of the fields within messages that no shape of `shared.apis.chat_messages` has."""
    is_plain: bool = True
    """True if it has no field that our engines look into, and no message that is more than a text."""

    def require_supported(self) -> None:
        """Refuse what no engine of ours takes. Raises InvalidRequest, and UnsupportedParameter."""
        if self.unsupported is not None:
            raise unsupported(self.unsupported, self.request.instead.get(self.unsupported))
        if not self.is_plain:
            self.request.check_for_ours(self.fields)

    @property
    def ignored_header(self) -> str:
        """The names in `ignored` as a header's value."""
        return named(self.ignored) if self.ignored else ""


def named(ignored: Iterable[str]) -> str:
    """Names of fields, and places within them, as a header's value, without those that are not fit for one or
    too many."""
    return ", ".join([name for name in ignored if _PLACE.fullmatch(name)][:IGNORED_NAMED_MAX])


def parse(body: bytes, type_: type[T], census: Census | None = None) -> Parsed[T]:
    """Decode and check one request. Raises InvalidJson or InvalidRequest. `census` is the body's, if it was
    taken and checked already."""
    if census is None:
        refuse_excess(census_of(body))
    try:
        body.decode()  # msgspec leaves strings that it skips unchecked
        fields = _top_level(body)
        request = _decoder(type_).decode(body)
    except UNDECODABLE as error:
        if (rest := _behind_mark(body)) is not None:
            return parse(rest, type_, census)
        raise _refusal(error, body, type_) from None
    return _parsed(request, fields, type_)


def parse_slices(body: bytes, type_: type[T]) -> Slices[Parsed[T]]:
    """`parse`, pass by pass, for a body of any length whose census was taken and checked already."""
    try:
        text = getincrementaldecoder("utf-8")()
        for at in range(0, len(body), SLICE_LEN):
            text.decode(body[at : at + SLICE_LEN], final=at + SLICE_LEN >= len(body))
            yield
        fields = _top_level(body)
        yield
        request = _decoder(type_).decode(body)
        yield
    except UNDECODABLE as error:
        if (rest := _behind_mark(body)) is not None:
            return (yield from parse_slices(rest, type_))
        raise _refusal(error, body, type_) from None
    return _parsed(request, fields, type_)


def _behind_mark(body: bytes) -> bytes | None:
    """The body behind a byte order mark, which RFC 8259 lets a reader ignore: PowerShell writes one. None
    where it has none, or more than one. No decoder takes one, so it is looked for when one has failed."""
    return body[len(BOM_UTF8) :] if body.startswith(BOM_UTF8) and not body.startswith(2 * BOM_UTF8) else None


def _parsed(request: T, fields: dict[str, Raw], type_: type[T]) -> Parsed[T]:
    request.check(fields)
    try:
        found = survey(request, fields, _names(type_))
    except msgspec.ValidationError:
        raise _out_of_range(fields) from None
    return Parsed(request, fields, found.unknown, found.unsupported, found.shapeless, found.is_plain)


def _out_of_range(fields: dict[str, Raw]) -> InvalidJson:
    """The error of a number that no type has looked at, and that is out of all range: nothing else is left to
    be found in a value that was skipped without an error."""
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            param = _param(name)
            return InvalidJson(f"{param or 'A field'} has a number out of range.", param=param)
    return InvalidJson("The body has a number out of range.")


def _refusal(error: Exception, body: bytes, type_: type[Struct]) -> InvalidRequest:
    match error:
        case UnicodeDecodeError():
            return InvalidJson("The body is not valid UTF-8.")
        case RecursionError():
            return InvalidJson("The body is nested too deeply.")
        case msgspec.ValidationError():
            return invalid_value(str(error), type_)
        case _:
            return _invalid_json(body, str(error))


def with_fields(fields: dict[str, Raw], **overrides: object) -> bytes:
    """A body of `fields` with some of them replaced or added."""
    return msgspec.json.encode({**fields, **overrides})


# -- shape ----------------------------------------------------------------------------------------


_decode_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_top_level: Final = msgspec.json.Decoder(dict[UniqueName, Raw], dec_hook=UniqueName).decode


def _top_level(body: bytes) -> dict[str, Raw]:
    """The fields of a body. Raises InvalidRequest where they are too many, or one is given twice.

    A short body is decoded and encoded again. That adds nothing; it leaves out white space, and the first of
    two fields of one name. So a body that stays as long as it was, as SDKs send it, names no field twice.
    """
    if len(body) <= ENCODED_AGAIN_LEN_MAX:
        fields = _decode_fields(body)
        if len(fields) <= FIELDS_MAX and len(msgspec.json.encode(fields)) == len(body):
            return fields
    return _distinct(body)


def _distinct(body: bytes) -> dict[str, Raw]:
    """The fields at the top level, decoded one by one."""
    pairs = _decode_top_level(body)
    if len(pairs) > FIELDS_MAX:
        raise InvalidRequest(f"The body has more than {FIELDS_MAX} fields.")
    fields: dict[str, Raw] = {}
    for key, value in pairs.items():
        if key.name in fields:
            raise InvalidJson("A field is given twice.", param=_param(key.name))
        fields[key.name] = value
    return fields


@cache
def _decoder(type_: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(type_)


@cache
def _names(type_: type[Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(type_))


def _param(name: str) -> str | None:
    """A name that came from the caller, or None if it is not fit to be repeated."""
    return name if PLAIN_NAME.fullmatch(name) else None


_PADDING: Final = b" " * 16
"""The bytes put behind a body so that msgspec tells of half a pair of surrogates at its end, and not that the
body ends too early."""


def _invalid_json(body: bytes, problem: str) -> InvalidJson:
    if not body.strip():
        return InvalidJson("The body is empty; it must be a JSON object.")
    try:
        _decode_fields(body + _PADDING)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = str(error)
    if "surrogate" in problem or "end of hex escape" in problem:
        return InvalidJson("Text holds half of a surrogate pair, which stands for no character.")
    told = problem.removeprefix("JSON is malformed: ")
    told = told.replace("Input data was truncated", "it ends too early")
    return InvalidJson(f"The body is not valid JSON: {told}.")


# -- values ---------------------------------------------------------------------------------------

_NOUNS: Final = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def _noun(type_name: str) -> str:
    return _NOUNS.get(type_name, type_name)


_RELATIONS: Final = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}

_PATTERNS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...]] = (
    (
        re.compile(r"Expected `(str|array|object)` of length (>=|<=) (\d+)"),
        lambda m: f"must have {_RELATIONS[m[2]]} {m[3]} {'characters' if m[1] == 'str' else 'items'}",
    ),
    (
        re.compile(r"Expected `\w+` (>=|<=|>|<) (\S+)"),
        lambda m: f"must be {_RELATIONS[m[1]]} {m[2]}",
    ),
    (
        re.compile(r"Expected `([\w |]+)`, got `(\w+)`"),
        lambda m: f"must be {' or '.join(map(_noun, m[1].split(' | ')))}, not {_noun(m[2])}",
    ),
    (re.compile(r"(Integer value|Number) out of range"), lambda _: "is out of range"),
)


def invalid_value(problem: str, type_: type[Struct]) -> InvalidRequest:
    """The error of an invalid value, from msgspec's `problem - at `$.path``, in words and without the
    value."""
    text, _, path = problem.partition(" - at `$")
    where = path.rstrip("`").removeprefix(".")
    param = where.replace("[...]", "")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequest(f"{param} is required.", param=param)
    subject = param or "The body"
    if where.endswith("[...]"):  # the path of any value of an object
        subject = f"A value of {param}"
    for pattern, words in _PATTERNS:
        if match := pattern.fullmatch(text):
            return InvalidRequest(f"{subject} {words(match)}.", param=param or None)
    choices = _choices_at(type_, param)
    if choices:
        return InvalidRequest(f"{subject} must be one of {', '.join(choices)}.", param=param)
    return InvalidRequest(f"{subject} has a value that is not allowed.", param=param or None)


def _choices_at(type_: type[Struct], param: str) -> list[str]:
    """The allowed values of an enumerated field, found by its path."""
    types: list[Any] = [msgspec.inspect.type_info(type_)]
    for name in re.findall(r"\w+(?=[.\[]|$)|\[\d+\]", param):
        types = [inner for outer in types for inner in _step(outer, name)]
    return [
        str(choice)
        for found in types
        for choice in (found.values if isinstance(found, msgspec.inspect.LiteralType) else ())
    ]


def _step(outer: Any, name: str) -> Iterator[Any]:
    """The types that `name` leads to from `outer`, with the members of unions one by one."""
    match outer:
        case msgspec.inspect.StructType(tag_field=tag_field, tag=tag) if tag_field == name:
            yield msgspec.inspect.LiteralType((tag,))
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                if field.encode_name == name:
                    yield from _spread(field.type)
        case msgspec.inspect.ListType(item_type=item) if name.startswith("["):
            yield from _spread(item)


def _spread(type_: Any) -> Iterator[Any]:
    if isinstance(type_, msgspec.inspect.UnionType):
        yield from type_.types
    else:
        yield type_
