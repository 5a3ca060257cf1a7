"""The validation of a request: from bytes to a typed value, or to a 400 that says what to change.

Two passes over the body, both in C: one into a map of the top-level fields as they were sent, one
into the typed request. The map is what the gateway sends on (`with_fields`), with repeated and
misread names gone, so that both services read the same request.

Rules:

1. Whatever the bytes, the outcome is a `Parsed` or an `InvalidRequest`; nothing else escapes.
2. The error names the field (`param`), and never shows a value: values may be prompt text.
3. A field that asks for something no engine of ours can do is reported (`Parsed.unsupported`), and never
   silently ignored. Whether to refuse it is decided by the caller, which knows the engine.
4. What is made of a body is bounded before it is made: its values are counted first (`shared.apis.census`),
   so the work is some milliseconds for each megabyte, and the memory is bounded by `shared.apis.holding`.
"""

from __future__ import annotations

import re
import secrets
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from shared.apis.census import SLICE_LEN, Census, census_of
from shared.apis.fields import survey
from shared.apis.nothing import unsupported
from shared.apis.repeated import PLAIN_NAME, Key
from shared.apis.request import Request
from shared.fairness.fair_threads import Slices
from shared.wire.errors import InvalidJson, InvalidRequest
from shared.wire.undecodable import UNDECODABLE

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
    """The names of the fields within messages that no shape of `shared.apis.messages` has."""
    is_plain: bool = True
    """True if it has no field that our engines look into, and no message that is more than a text."""

    def require_supported(self) -> None:
        """Refuse what no engine of ours takes. Raises InvalidRequest, and UnsupportedParameter."""
        if self.unsupported is not None:
            raise unsupported(self.unsupported)
        if not self.is_plain:
            self.request.check_for_ours(self.fields)

    def closer_look(self) -> Slices[tuple[str, ...]] | None:
        """The checks for our engines that take long (`Request.closer_look`)."""
        return None if self.is_plain else self.request.closer_look()

    @property
    def ignored_header(self) -> str:
        """The names in `ignored` as a header's value."""
        return named(self.ignored) if self.ignored else ""


def named(ignored: Iterable[str]) -> str:
    """Names of fields as a header's value, without those that are no plain names or too many."""
    return ", ".join([name for name in ignored if PLAIN_NAME.fullmatch(name)][:IGNORED_NAMED_MAX])


def refuse_excess(census: Census) -> None:
    """Refuse a body with too many values. Raises InvalidRequest.

    Such a body can never be served, however much memory is free, so this is checked before memory is
    reserved.
    """
    if census.excess is not None:
        raise InvalidRequest(f"The body has {census.excess}.")


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
    """The same, pass by pass, for a body of any length whose census was taken and checked already."""
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
_decode_top_level: Final = msgspec.json.Decoder(dict[Key, Raw], dec_hook=Key).decode


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
    """The same, field by field."""
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


_LONE_MAX: Final = 64
"""The most half pairs that are marked at a time to find the field with one. A body with more may get a
message without it."""
_LONE_WINDOW_LEN: Final = 16 * 1024
"""Bytes behind a half pair in which others are looked for at once. The search takes up to 30 ns for each."""
_LONE_ROUNDS_MAX: Final = 3
_PADDING: Final = b" " * 16
"""The bytes put behind a body so that msgspec says where a half pair is that stands at its end, and not that
the body ends too early."""
_UP_TO_LONE: Final = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F]))*+"
)
_PROBLEM_OF_PAIR: Final = re.compile(r".*(?:surrogate pair|hex escape) \(byte (\d+)\)")
_HIGH: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE_LEN: Final = len(rb"\ud800")


def _invalid_json(body: bytes, problem: str) -> InvalidJson:
    """The error of invalid JSON. It also finds half pairs of surrogates, which msgspec reports as truncation
    or without the field."""
    if not body.strip():
        return InvalidJson("The body is empty; it must be a JSON object.")
    marker = secrets.token_hex(8).encode()
    marked, names = body + _PADDING, []
    for _ in range(_LONE_ROUNDS_MAX):
        try:
            names = [key.name for key, value in _decode_top_level(marked).items() if marker in bytes(value)]
            break
        except (msgspec.DecodeError, RecursionError) as error:
            at = _half_pair_at(marked, str(error))
            if at is None:
                break
            marked = _mark_half_pairs(marked, at, marker)
    if len(marked) == len(body) + len(_PADDING):
        problem = problem.removeprefix("JSON is malformed: ").replace(
            "Input data was truncated", "it ends too early"
        )
        return InvalidJson(f"The body is not valid JSON: {problem}.")
    message = "Text holds half of a surrogate pair, which stands for no character."
    return InvalidJson(message, param=_param(names[0]) if names else None)


def _half_pair_at(body: bytes, problem: str) -> int | None:
    """The start of the half pair that msgspec's `problem` is about. None where it is about another."""
    if (found := _PROBLEM_OF_PAIR.fullmatch(problem)) is None:
        return None
    end = int(found[1])
    before, last = max(0, end - 2 * _ESCAPE_LEN), max(0, end - _ESCAPE_LEN)
    if _HIGH.match(body, before) and body.startswith(b"\\u", last):
        return before  # what follows it is no other half
    return last if _HALF.match(body, last) else None


def _mark_half_pairs(body: bytes, start: int, marker: bytes) -> bytes:
    """The body with `marker` in the place of the half pair at `start`, and of the next ones up to
    `_LONE_MAX` within the window."""
    behind = start + _ESCAPE_LEN
    parts: list[bytes] = [body[:start], marker]
    while len(parts) < 2 * _LONE_MAX:
        match = _UP_TO_LONE.match(body, behind, start + _LONE_WINDOW_LEN)
        assert match is not None  # it matches the empty string
        end = match.end()
        if end + 2 * _ESCAPE_LEN > start + _LONE_WINDOW_LEN or not _HALF.match(body, end):
            break  # a pair across the window's end is whole, perhaps
        parts += body[behind:end], marker
        behind = end + _ESCAPE_LEN
    return b"".join([*parts, body[behind:]])


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
