"""Formats that are stated as data: transformers' `response_template`, and what we add to it.

    {"version": 1, "start_anchor": TEXT or TEXTS (or start_anchor_pattern), "defaults": ignored,
     "fields": {NAME: {"open": TEXT or TEXTS (or open_pattern), "close": ... (or close_pattern),
                       "content": "text" | "json" | "xml-inline", "content_args": {...},
                       "repeats": BOOL, "transform": SHAPE, "transform_each": BOOL}}}

The fields that have a meaning are `content`, `tool_calls` and the reasoning, under any of its three names.
Patterns are not run as expressions: see `patterns`. White space in a text says what the model writes; when
answers are read, any may stand there.

Ours, for what it cannot state, and refused in a checkpoint's file: content `python-calls` (a list of calls as
Python writes them); an empty text among `open` (a call may come without a marker); `separator` between calls;
and beside `fields`, `call_ends_reasoning` and `ignored`, other markers that are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from engine.api.formats.format import (
    AnswerFormat,
    ArgumentsKind,
    CallFormat,
    Envelope,
    ReasoningFormat,
    TaggedArgument,
)
from engine.api.formats.patterns import BadPattern, Hole, Row, rows

REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
MARKER_LEN_MAX: Final = 256
SPELLINGS_MAX: Final = 16
_OPEN_TAG: Final = re.compile(r"<(\w+)[ =][^<>]*$")


class BadFormat(ValueError):
    """The data states no format that can be read. The message begins with the key."""


class _ContentArgs(msgspec.Struct, forbid_unknown_fields=True):
    strip: bool = True
    unquoted_keys: bool = False
    string_delims: list[list[str]] = []
    allow_non_json: bool = False
    tag_pattern: str | None = None
    value_parser: dict[str, Any] | None = None
    merge_duplicates: bool = False
    line_sep: str | None = None
    kv_sep: str | None = None


class _Field(msgspec.Struct, forbid_unknown_fields=True):
    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: _ContentArgs = msgspec.field(default_factory=_ContentArgs)
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False
    separator: str | None = None


class _Template(msgspec.Struct, forbid_unknown_fields=True):
    fields: dict[str, _Field]
    version: int = 1
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None
    call_ends_reasoning: bool = False
    ignored: list[str] = []


def compiled(data: object, name: str, *, is_ours: bool) -> AnswerFormat:
    """The format that the data states. `is_ours` allows our additions. Raises BadFormat."""
    try:
        template = msgspec.convert(data, _Template)
    except msgspec.ValidationError as error:
        raise BadFormat(_named(error)) from error
    if template.version != 1:
        raise BadFormat(f"version: {template.version} is not known, only 1")
    if not is_ours:
        _refuse_additions(template)
    known = ("content", "tool_calls", *REASONING_FIELDS)
    unknown = [field for field in template.fields if field not in known]
    if unknown:
        raise BadFormat(f"fields.{unknown[0][:64]}: only {', '.join(known)} have a meaning")
    reasoning = [field for field in REASONING_FIELDS if field in template.fields]
    if len(reasoning) > 1:
        raise BadFormat(f"fields.{reasoning[1]}: the reasoning is already {reasoning[0]}")
    calls = template.fields.get("tool_calls")
    framed = template.fields.get("content", _Field())
    return AnswerFormat(
        name=name,
        reasoning=_reasoning(template.fields[reasoning[0]], f"fields.{reasoning[0]}") if reasoning else None,
        calls=None if calls is None else _calls(calls, "fields.tool_calls"),
        call_ends_reasoning=template.call_ends_reasoning,
        anchors=tuple(_texts("start_anchor", template.start_anchor, template.start_anchor_pattern)),
        ignored=(*template.ignored, *_frame(framed)),
    )


def _named(error: msgspec.ValidationError) -> str:
    """msgspec's message with the key first: it says `... - at `$.fields[...].open``."""
    what, at, where = str(error).rpartition(" - at `$")
    return f"{where.rstrip('`').lstrip('.')}: {what}" if at else str(error)


def _refuse_additions(template: _Template) -> None:
    if template.call_ends_reasoning or template.ignored:
        raise BadFormat("call_ends_reasoning, ignored: no keys of a response_template")
    for name, field in template.fields.items():
        if field.separator is not None or field.content == "python-calls":
            raise BadFormat(f"fields.{name}: separator and python-calls are not part of a response_template")
        if "" in _listed(field.open):
            raise BadFormat(f"fields.{name}.open: is empty")


def _listed(texts: str | list[str] | None) -> list[str]:
    return [] if texts is None else [texts] if isinstance(texts, str) else texts


def _frame(content: _Field) -> Iterator[str]:
    """The markers around the text. A text that no marker begins is ended by the end of the answer."""
    if content.open is not None or content.open_pattern is not None:
        for key in ("open", "close"):
            literal, pattern = getattr(content, key), getattr(content, f"{key}_pattern")
            yield from (text for text in _texts(f"fields.content.{key}", literal, pattern) if text.strip())


def _reasoning(field: _Field, key: str) -> ReasoningFormat:
    openers = tuple(_texts(f"{key}.open", field.open, field.open_pattern))
    closers = tuple(_texts(f"{key}.close", field.close, field.close_pattern))
    for name, found in (("open", openers), ("close", closers)):
        if not found or not all(text.strip() for text in found):
            raise BadFormat(f"{key}.{name}: reasoning without a marker is not supported")
    return ReasoningFormat(openers, closers)


def _texts(key: str, literal: str | list[str] | None, pattern: str | None) -> Iterator[str]:
    """The texts that a marker can be, where it has no holes."""
    for row in _rows(key, literal, pattern):
        if any(isinstance(item, Hole) for item in row):
            raise BadFormat(f"{key}_pattern: a named group has no meaning here")
        yield "".join(item for item in row if isinstance(item, str))


def _rows(key: str, literal: str | list[str] | None, pattern: str | None) -> tuple[Row, ...]:
    if literal is not None and pattern is not None:
        raise BadFormat(f"{key}: stands beside {key.rpartition('.')[2]}_pattern")
    texts = _listed(literal)
    if len(texts) > SPELLINGS_MAX or any(len(text) > MARKER_LEN_MAX for text in texts):
        raise BadFormat(f"{key}: more than {SPELLINGS_MAX} texts or {MARKER_LEN_MAX} characters")
    if pattern is None:
        return tuple((text,) for text in texts)
    try:
        found = rows(pattern)
    except BadPattern as error:
        raise BadFormat(f"{key}_pattern: {error}") from error
    if any(len(item) > MARKER_LEN_MAX for row in found for item in row if isinstance(item, str)):
        raise BadFormat(f"{key}_pattern: a text has more than {MARKER_LEN_MAX} characters")
    return found


# -- calls --------------------------------------------------------------------------------------------


def _calls(field: _Field, key: str) -> CallFormat:
    opened = _rows(f"{key}.open", field.open, field.open_pattern)
    if not opened:
        raise BadFormat(f"{key}.open: calls without a marker are not supported")
    closed = [text for text in _texts(f"{key}.close", field.close, field.close_pattern) if text.strip()]
    closer = closed[0].rstrip() if closed else ""
    shape = _shape(field, f"{key}.transform")
    heads = [row[0] if row and isinstance(row[0], str) else "" for row in opened]
    if shape == ("{name}", "{content}") and not field.transform_each:
        return _named_call(field, key, opened, heads, closer)
    if any(len(row) > 1 for row in opened):
        raise BadFormat(f"{key}.open_pattern: its named groups are not what transform calls the function")
    if field.content == "python-calls":
        return CallFormat(tuple(heads), "", ("(",), ArgumentsKind.PYTHON, ")", closer, ", ", is_list=True)
    if field.content != "json":
        raise BadFormat(f"{key}.content: {field.content[:64]!r} is not supported for calls of this shape")
    envelope = Envelope(*shape_keys(shape, f"{key}.transform", is_each=field.transform_each))
    is_list = field.transform_each or "" in heads
    bracket = field.transform_each
    separator = field.separator or (", " if field.transform_each else "\n")
    return CallFormat(
        openers=tuple(head + "[" if bracket else head for head in heads),
        begin=f'{{"{envelope.name}": "',
        middles=(f'", "{envelope.arguments}": ',),
        arguments=ArgumentsKind.JSON,
        end="}",
        closer="]" + closer if bracket else closer,
        separator=separator,
        is_list=is_list,
        envelope=envelope,
    )


def _shape(field: _Field, key: str) -> tuple[str, str] | None:
    """Where `transform` has the function's name and arguments from. None if the content is the function."""
    shape = field.transform
    if isinstance(shape, Mapping) and "function" in shape:
        shape = shape["function"]
    if shape in (None, "{content}"):
        return None
    if isinstance(shape, Mapping):
        name, arguments = shape.get("name"), shape.get("arguments")
        if isinstance(name, str) and isinstance(arguments, str):
            return name, arguments
    raise BadFormat(f"{key}: does not state a function's name and arguments")


def shape_keys(shape: tuple[str, str] | None, key: str, *, is_each: bool) -> tuple[str, str]:
    """The members of a call's object that are its name and its arguments."""
    if shape is None:
        return "name", "arguments"
    prefix = "" if is_each else r"content\."
    found = [re.fullmatch(rf"\{{{prefix}(\w{{1,64}})\}}", text) for text in shape]
    if found[0] is None or found[1] is None:
        raise BadFormat(f"{key}: does not state a function's name and arguments")
    return found[0].group(1), found[1].group(1)


def _named_call(field: _Field, key: str, opened: Sequence[Row], heads: list[str], closer: str) -> CallFormat:
    """A call whose name is in its marker."""
    if any(len(row) not in (2, 3) or row[1] != Hole("name") for row in opened):
        raise BadFormat(f"{key}.open_pattern: must be a marker, a group name, and what follows it")
    middles = tuple(dict.fromkeys(str(row[2]) if len(row) == 3 else "" for row in opened))
    openers = tuple(dict.fromkeys(heads))
    args = field.content_args
    separator = field.separator if field.separator is not None else "\n"
    if field.content == "json":
        delimiters = [own[0] for own in args.string_delims if len(own) == 2 and own[0] == own[1] and own[0]]
        if len(delimiters) != len(args.string_delims) or len(delimiters) > 1:
            raise BadFormat(f"{key}.content_args.string_delims: only one pair of equal texts is supported")
        if args.unquoted_keys != bool(delimiters):
            raise BadFormat(f"{key}.content_args: unquoted_keys and string_delims are supported together")
        kind = ArgumentsKind.RELAXED if delimiters else ArgumentsKind.JSON
        delimiter = "".join(delimiters)
        return CallFormat(openers, "", middles, kind, "", closer, separator, False, delimiter=delimiter)
    if field.content != "xml-inline":
        raise BadFormat(f"{key}.content: {field.content[:64]!r} is not supported for calls")
    argument = _argument(args.tag_pattern, f"{key}.content_args.tag")
    tag = _OPEN_TAG.search(openers[0])
    end = f"</{tag.group(1)}>" if tag is not None else ""
    if closer.startswith(end):
        closer = closer[len(end) :]
    return CallFormat(
        openers,
        "",
        middles,
        ArgumentsKind.TAGGED,
        end + "\n" * bool(end and closer.strip()),
        closer.lstrip(),
        separator,
        False,
        argument=argument,
    )


def _argument(pattern: str | None, key: str) -> TaggedArgument:
    found = _rows(key, None, pattern or "")
    row = found[0]
    holes = [item for item in row if isinstance(item, Hole)]
    if len(found) != 1 or holes != [Hole("key"), Hole("value")] or len(row) != 5:
        raise BadFormat(f"{key}_pattern: must be texts around a group key and a group value")
    begin, _, middle, _, end = map(str, row)
    if not (begin.strip() and middle.strip() and end.strip()):
        raise BadFormat(f"{key}_pattern: must have a text before, between and behind its groups")
    return TaggedArgument(begin, middle, end)
