"""The notations of a call's arguments, each read into JSON as it comes.

A reader here passes the arguments in the source and emits their JSON text in pieces. JSON is passed on as the
model wrote it, blanks and all; the other notations are converted. It raises Broken at what it cannot read:
what was emitted so far stands, and the source is at the first thing that was not understood. Where the answer
ends within the arguments, what was emitted is the beginning of their JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from engine.api.formats.source import (
    HELD_LEN_MAX,
    MARKS,
    NONE,
    PARTIAL,
    Broken,
    MarkedSource,
    Marker,
    Reading,
    match,
    space_end,
)

Emit = Callable[[str], None]
"""Takes a piece of the JSON text of the arguments."""

KEY_LEN_MAX: Final = 256
"""The most characters of an argument's name."""
DEPTH_MAX: Final = 64
"""The most lists and mappings within each other in Python's notation."""
REFERENCES_MAX: Final = 8
"""The most references and choices that are followed within each other, for the type of an argument."""
CHOICES_MAX: Final = 64
"""The most choices that are looked at, for the same."""
SCALAR_LEN_MAX: Final = 512
"""The most characters of a number or a word in Python's notation."""

_IN_STRING: Final = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_OUTSIDE: Final = re.compile(rf'[^"{{}}\[\]<{MARKS}]*')
_SCALAR: Final = re.compile(rf'[^\s"{{}}\[\],:<{MARKS}]{{1,{SCALAR_LEN_MAX}}}')


def json_string(source: MarkedSource) -> Reading[str]:
    """Pass a JSON string, and return it with its quotes. What waits for its end is bounded."""
    scanned = 1
    while True:
        found = _IN_STRING.match(source.text, source.at + scanned)
        assert found is not None
        scanned = found.end() - source.at
        if source.text.startswith('"', found.end()):
            begun, source.at = source.at, found.end() + 1
            return source.text[begun : source.at]
        if len(source.text) - source.at > HELD_LEN_MAX or not (yield from source.more()):
            raise Broken


def json_scalar(source: MarkedSource) -> Reading[str]:
    """Pass a number or a word, and return it."""
    found = yield from source.matched(_SCALAR, _SCALAR)
    if found is None:
        raise Broken
    source.at = found.end()
    return found.group()


def json_value(source: MarkedSource, emit: Emit) -> Reading[None]:
    """Pass a JSON object or array up to its closing bracket. Brackets and strings are followed; whatever
    else it consists of is the model's."""
    depth, in_string = 0, False
    while True:
        begun = source.at
        depth, in_string = _follow(source, depth, in_string)
        emit(source.text[begun : source.at])
        if not depth:
            return
        if source.text[source.at : source.at + 1] not in ("", "\\"):
            raise Broken
        if not (yield from source.more()):
            emit(source.text[source.at :])
            source.at = len(source.text)
            return


def _follow(source: MarkedSource, depth: int, in_string: bool) -> tuple[int, bool]:
    """Pass what there is of a JSON value, or its end."""
    text, at = source.text, source.at
    while True:
        found = (_IN_STRING if in_string else _OUTSIDE).match(text, at)
        assert found is not None
        at = found.end()
        char = text[at : at + 1]
        if char == '"':
            in_string = not in_string
        elif not char or in_string or char not in "{}[]":
            break
        else:
            depth += 1 if char in "{[" else -1
        at += 1
        if not depth:
            break
    source.at = at
    return depth, in_string


# -- members that are written one by one --------------------------------------------------------------


class Members:
    """The members of a JSON object, emitted one by one."""

    __slots__ = ("_count", "emit")

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self._count = 0

    def key(self, name: str) -> None:
        self.emit(("{" if not self._count else ", ") + quoted(name) + ": ")
        self._count += 1

    def close(self) -> None:
        self.emit("}" if self._count else "{}")


def quoted(text: str) -> str:
    """The text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The text as it stands within a JSON string."""
    return quoted(text)[1:-1]


# -- one element per argument -------------------------------------------------------------------------


class Tags:
    """The elements of one argument, as markers."""

    __slots__ = ("begin", "drops_break", "end", "middle", "skips_break")

    def __init__(
        self, begin: Marker, middle: Marker, end: Marker, *, skips_break: bool, drops_break: bool
    ) -> None:
        self.begin, self.middle, self.end = begin, middle, end
        self.skips_break = skips_break
        """True if a line break before the value is not part of it."""
        self.drops_break = drops_break
        """True if a line break behind the value is not part of it."""


def tagged(
    source: MarkedSource, emit: Emit, tags: Tags, schema: Mapping[str, Any], plain: Callable[[str], str]
) -> Reading[None]:
    """Pass elements up to what is none. A value is a JSON string of its text, unless its schema knows another
    type that it can be read as."""
    members = Members(emit)
    properties = schema.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    while True:
        yield from source.space()
        key = yield from _tag(source, tags)
        if key is None:
            if source.at < len(source.text):
                members.close()
            return
        members.key(plain(key))
        types = schema_types(known.get(key), schema)
        if tags.skips_break and (yield from source.peek()) == "\n":
            source.at += 1
        done = yield from _tagged_value(source, emit, tags, types, plain)
        if not done:
            return


def _tag(source: MarkedSource, tags: Tags) -> Reading[str | None]:
    """Pass the beginning of an element, and return its key. None if there is none."""
    while True:
        key, end = _tag_at(source.text, source.at, tags)
        if end == PARTIAL and (yield from source.more()):
            continue
        if end < 0:
            return None
        source.at = end
        return key


def _tag_at(text: str, at: int, tags: Tags) -> tuple[str, int]:
    began = match(tags.begin, text, at)
    if began < 0:
        return "", began
    found = text.find(tags.middle[0], began, began + KEY_LEN_MAX + len(tags.middle[0]))
    if found < 0:
        too_long = len(text) - began > KEY_LEN_MAX + len(tags.middle[0])
        return "", NONE if too_long or "\n" in text[began:] else PARTIAL
    key = text[began:found]
    return key.strip(), NONE if "\n" in key else match(tags.middle, text, found)


def _tagged_value(
    source: MarkedSource, emit: Emit, tags: Tags, types: tuple[str, ...], plain: Callable[[str], str]
) -> Reading[bool]:
    """Pass a value and the end of its element. False if the answer ends within it."""
    ending, *rest = tags.end
    if types not in ((), ("string",)):
        value = yield from _whole_value(source, ending, tags.drops_break)
        if value is not None:
            emit(coerced(plain(value), types))
            yield from source.accepts((ending,))
            yield from _rest(source, rest)
            return True
    if not (yield from _text_up_to(source, emit, ending, plain, drops_break=tags.drops_break)):
        return False
    yield from _rest(source, rest)
    return True


def _text_up_to(
    source: MarkedSource, emit: Emit, ending: str, plain: Callable[[str], str], *, drops_break: bool
) -> Reading[bool]:
    """Pass a text and its ending, as a JSON string. False if the answer ends within it."""
    emit('"')
    while True:
        found = source.text.find(ending, source.at)
        if found >= 0:
            chunk = source.text[source.at : found]
            emit(escaped(plain(chunk.removesuffix("\n") if drops_break else chunk)) + '"')
            source.at = found + len(ending)
            return True
        free = _free_end(source.text, source.at, ending, drops_break)
        emit(escaped(plain(source.text[source.at : free])))
        source.at = free
        if not (yield from source.more()):
            emit(escaped(plain(source.text[source.at :])))
            source.at = len(source.text)
            return False


def _rest(source: MarkedSource, rest: list[str]) -> Reading[None]:
    if rest:
        yield from source.space()
        yield from source.accepts(tuple(rest))


def _whole_value(source: MarkedSource, ending: str, drops_break: bool) -> Reading[str | None]:
    """The value, at whose ending the source is then. None if it is too long to wait for, or the answer ends:
    then nothing is passed."""
    scanned = 0
    while True:
        found = source.text.find(ending, source.at + scanned)
        if found >= 0:
            value, source.at = source.text[source.at : found], found
            return value.removesuffix("\n") if drops_break else value
        scanned = max(0, len(source.text) - source.at - len(ending))
        if len(source.text) - source.at > HELD_LEN_MAX // 2 or not (yield from source.more()):
            return None


def _free_end(text: str, at: int, ending: str, drops_break: bool) -> int:
    """Up to where a value is certain: before what may be its ending, and the line break before that."""
    end = len(text)
    held = next((n for n in range(min(len(ending) - 1, end - at), 0, -1) if text.endswith(ending[:n])), 0)
    end -= held
    return end - 1 if drops_break and end > at and text[end - 1] == "\n" else end


def schema_types(
    schema: Any,
    root: Mapping[str, Any] | None = None,
    followed: dict[str, tuple[str, ...]] | None = None,
    depth: int = 0,
) -> tuple[str, ...]:
    """The types that a schema allows, in the order in which it names them. Empty if it does not say. `root`
    is the schema that its references point into; `followed` has the types of those that were followed, each
    once, since a caller's may branch without end."""
    if not isinstance(schema, Mapping) or depth > REFERENCES_MAX:
        return ()
    followed = {} if followed is None else followed
    stated = schema.get("type")
    if isinstance(stated, str):
        return (stated,)
    found: list[str] = []
    if isinstance(stated, list):
        found += [kind for kind in stated if isinstance(kind, str)]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in followed:
            followed[reference] = ()  # as it may lead back here
            followed[reference] = schema_types(_referred(reference, root), root, followed, depth + 1)
        found += followed[reference]
    for union in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(union)
        for choice in choices[:CHOICES_MAX] if isinstance(choices, list) else ():
            found += schema_types(choice, root, followed, depth + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not found and isinstance(values, list):
        found += [_TYPE_NAMES.get(type(value), "string") for value in values[:CHOICES_MAX]]
    if not found:
        found += [kind for keyword, kind in _TELLING.items() if keyword in schema]
    return tuple(dict.fromkeys(found))


def _referred(reference: str, root: Any) -> Any:
    """The target of a reference within the schema. None where it is not there."""
    place, *steps = reference.split("/")
    if place != "#":
        return None
    for step in steps[:REFERENCES_MAX]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def coerced(raw: str, types: tuple[str, ...]) -> str:
    """The JSON of a value that was written as text: of the first type that it can be read as, else a string.
    A string is the last that it counts as."""
    text = raw.strip()
    for kind in types:
        value = _as(text, kind)
        if value is not None:
            return value
    return quoted(raw)


def _as(text: str, kind: str) -> str | None:
    if kind == "null":
        return "null" if text in ("null", "None") else None
    if kind == "boolean":
        return _BOOLEANS.get(text.lower())
    if kind in ("integer", "number"):
        return text if _NUMBER.fullmatch(text) and (kind == "number" or _is_whole(text)) else None
    if kind in ("object", "array"):
        bracket = "{" if kind == "object" else "["
        return text if text.startswith(bracket) and _is_json(text) else None
    return None


_TYPE_NAMES: Final[Mapping[type, str]] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    str: "string",
}
_TELLING: Final = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
}
"""The type that a keyword tells of, where a schema does not state one."""
_BOOLEANS: Final = {"true": "true", "1": "true", "false": "false", "0": "false"}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


def _is_whole(text: str) -> bool:
    return len(text) <= SCALAR_LEN_MAX and float(text).is_integer()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# -- JSON with bare keys ------------------------------------------------------------------------------


def relaxed(
    source: MarkedSource, emit: Emit, delimiter: Marker, plain: Callable[[str], str]
) -> Reading[None]:
    """Pass an object with bare keys, and strings between delimiters."""
    depth, before = 0, ""
    while True:
        char = yield from source.space()
        if not char:
            return
        if (yield from source.accepts(delimiter)):
            yield from _text_up_to(source, emit, delimiter[0], plain, drops_break=False)
        elif char == '"':
            emit((yield from json_string(source)))
        elif char in "{}[],:":
            emit(char + (" " if char in ",:" else ""))
            source.at += 1
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(char, 0)
            if not depth:
                return
        else:
            word = yield from json_scalar(source)
            is_key = before in ("{", ",") and (yield from source.space()) == ":"
            emit(quoted(word) if is_key else word)
        before = char


# -- Python's keyword arguments -----------------------------------------------------------------------

_PYTHON_SCALAR: Final = re.compile(rf"[^\s,()\[\]{{}}:'\"={MARKS}]{{1,{SCALAR_LEN_MAX}}}")
_NAMED: Final = rf"([^\W\d]\w{{0,{KEY_LEN_MAX}}})\s{{0,64}}=\s{{0,64}}"
_KEYWORD: Final = re.compile(rf"{_NAMED}(?:(?=['\"\[({{])|({_PYTHON_SCALAR.pattern})(?=[\s,)]))")
_KEYWORD_BEGUN: Final = re.compile(
    rf"(?:[^\W\d]\w{{0,{KEY_LEN_MAX}}}\s{{0,64}})?|{_NAMED}(?:{_PYTHON_SCALAR.pattern})?"
)
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_JSON_WORDS: Final = frozenset(("true", "false", "null"))
_ESCAPES: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
    "/": "/",
}
_HEX_LEN: Final = {"x": 2, "u": 4, "U": 8}
_BEHIND_STRING: Final = frozenset(",)]}:")


def keywords(
    source: MarkedSource, emit: Emit, commit: Callable[[], None], plain: Callable[[str], str]
) -> Reading[None]:
    """Pass keyword arguments up to their parenthesis, and it. `commit` is called once it is certain that they
    are arguments."""
    members = Members(emit)
    while True:
        char = yield from source.space()
        if char == ")":
            source.at += 1
            break
        found = yield from source.matched(_KEYWORD, _KEYWORD_BEGUN)
        word = None if found is None or found.group(2) is None else scalar_json(found.group(2))
        if found is None or (word is None and found.group(2) is not None):
            break
        source.at = found.end()
        commit()
        members.key(found.group(1))
        if word is None:
            yield from _Literals(source, emit, plain).value(0)
        else:
            emit(word)
        if (yield from source.space()) == ",":
            source.at += 1
    if char != ")" and source.holds:
        raise Broken
    commit()
    if char == ")" or source.at < len(source.text):
        members.close()


class _Literals:
    """Reads Python's literals, and emits them as JSON."""

    __slots__ = ("emit", "plain", "source")

    def __init__(self, source: MarkedSource, emit: Emit, plain: Callable[[str], str]) -> None:
        self.source, self.emit, self.plain = source, emit, plain

    def value(self, depth: int, *, is_key: bool = False) -> Reading[None]:
        char = yield from self.source.space()
        if depth > DEPTH_MAX or not char:
            raise Broken
        if char in "'\"":
            yield from self._string(char)
        elif char in "[(" and not is_key:
            yield from self._members(depth, "]" if char == "[" else ")", "[]", keyed=False)
        elif char == "{" and not is_key:
            yield from self._members(depth, "}", "{}", keyed=True)
        else:
            word = yield from self._scalar()
            self.emit(quoted(word) if is_key else word)

    def _members(self, depth: int, closing: str, written: str, *, keyed: bool) -> Reading[None]:
        """Read the members between brackets, up to the closing one. `written`: JSON's brackets for it."""
        source = self.source
        source.at += 1
        self.emit(written[0])
        count = 0
        while (char := (yield from source.space())) != closing:
            if count:
                self._expect(char, ",")
                if (yield from source.space()) == closing:
                    break
                self.emit(", ")
            if keyed:
                yield from self.value(depth + 1, is_key=True)
                self._expect((yield from source.space()), ":")
                self.emit(": ")
            yield from self.value(depth + 1)
            count += 1
        source.at += 1
        self.emit(written[1])

    def _expect(self, char: str, wanted: str) -> None:
        if char != wanted:
            raise Broken
        self.source.at += 1

    def _scalar(self) -> Reading[str]:
        found = yield from self.source.matched(_PYTHON_SCALAR, _PYTHON_SCALAR)
        word = None if found is None else scalar_json(found.group())
        if found is None or word is None:
            raise Broken
        self.source.at = found.end()
        return word

    def _string(self, quote: str) -> Reading[None]:
        """A string. Its quote ends it only where something may follow that follows a literal, because
        templates write strings between quotes without escaping what is in them."""
        source = self.source
        if (yield from source.accepts((quote * 3,))):
            quote *= 3
        else:
            source.at += 1
        self.emit('"')
        run = re.compile(rf"[^\\{quote[0]}]*")
        while True:
            found = run.match(source.text, source.at)
            assert found is not None
            self.emit(escaped(self.plain(found.group())))
            source.at = found.end()
            char = yield from source.peek()
            if not char:
                return
            if char == "\\":
                yield from self._escape()
            elif char == quote[0]:
                if (yield from self._closes(quote)):
                    self.emit('"')
                    return
                source.at += 1
                self.emit(escaped(char))

    def _closes(self, quote: str) -> Reading[bool]:
        """Pass the quote if it ends the string."""
        source = self.source
        while True:
            end = match((quote,), source.text, source.at)
            place = space_end(source.text, end) if end >= 0 else len(source.text)
            behind = source.text[place : place + 1]
            if end == NONE or (behind and behind not in _BEHIND_STRING):
                return False
            if behind or not (yield from source.more()):
                source.at = max(end, source.at)
                return end >= 0

    def _escape(self) -> Reading[None]:
        source = self.source
        while len(source.text) < source.at + 2:
            if not (yield from source.more()):
                source.at = len(source.text)
                return
        char = source.text[source.at + 1]
        count = _HEX_LEN.get(char, 0)
        while len(source.text) < source.at + 2 + count:
            if not (yield from source.more()):
                break
        digits = source.text[source.at + 2 : source.at + 2 + count]
        if count and re.fullmatch(f"[0-9a-fA-F]{{{count}}}", digits):
            source.at += 2 + count
            self.emit(_code_point(digits))
        elif char in _ESCAPES:
            source.at += 2
            self.emit(escaped(_ESCAPES[char]))
        else:  # as Python has it, the backslash stays
            source.at += 1
            self.emit("\\\\")


def _code_point(digits: str) -> str:
    number = int(digits, 16)
    if number < 0x10000:
        return f"\\u{number:04x}"
    return escaped(chr(number)) if number <= 0x10FFFF else "\\ufffd"


def scalar_json(word: str) -> str | None:
    """A number or a constant as JSON. None for anything else."""
    if word in _JSON_WORDS or _NUMBER.fullmatch(word):
        return word
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    if not re.match(r"[+-]?\.?\d", word, re.ASCII):
        return None
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if abs(number) < float("inf") else None
