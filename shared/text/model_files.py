"""The JSON files of a model directory: read as transformers reads them, with every key accounted for.

Rules:

1. `NaN`, `Infinity` and `-Infinity` are numbers, as Python writes them, and so is `{"__float__": "NaN"}`, as
   transformers 5 writes them. The code that uses a number checks that it is finite.
2. Each file has a `KeyMeanings`, which gives its keys a meaning: the value is used; or answers do not depend
   on it; or they would depend on it in a way that is not implemented, and only values that change nothing are
   accepted.
3. A key that is in no table is ignored and named in the log, because it may be a misspelt one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from shared.process import files

FILE_LEN_MAX: Final = 128 * 1024 * 1024
NAMES_SHOWN_MAX: Final = 20
SHOWN_LEN_MAX: Final = 60
"""Characters of a key or a value in a message."""
S = TypeVar("S", bound=msgspec.Struct)
_FLOAT_TAG: Final = "__float__"
_TAGGED: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class BadModelFile(ValueError):
    """The error of a file that cannot be read. The message says what is wrong with it. It names the file only
    where a function says that it does."""


class Meaning(Enum):
    USED = "used"
    NO_EFFECT = "no effect"
    """Answers do not depend on the key."""


@dataclass(frozen=True, slots=True)
class Only:
    """The meaning of a key that is accepted with these values alone: they change nothing, and others are not
    implemented."""

    values: tuple[object, ...]


KeyMeanings = Mapping[str, Meaning | Only]
USED: Final = Meaning.USED
NO_EFFECT: Final = Meaning.NO_EFFECT


def only(*values: object) -> Only:
    return Only(values)


def read_text(path: Path) -> str | None:
    """The file's text; None where there is no such file. Raises BadModelFile."""
    try:
        return files.read_text(path, FILE_LEN_MAX)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFile(f"cannot be read: {error}") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in `text`. Raises BadModelFile."""
    try:
        plain = text.decode() if isinstance(text, bytes) else text
        value = json.loads(plain, object_hook=_untagged)
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFile("must hold a JSON object")
    return value


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file. Raises BadModelFile, which names it."""
    try:
        text = read_text(path)
        return None if text is None else parse_object(text)
    except BadModelFile as error:
        raise BadModelFile(f"{path.name} {error}") from error


def filled(name: str, fields: Mapping[str, Any], kind: type[S]) -> S:
    """The Struct `kind`, filled from `fields` of the file `name`. A null is treated as an absent key. Raises
    BadModelFile, which names the file."""
    try:
        return msgspec.convert({key: value for key, value in fields.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise BadModelFile(f"{name} cannot be read: {error}") from error


def _untagged(value: dict[str, Any]) -> Any:
    tag = value.get(_FLOAT_TAG)
    return _TAGGED[tag] if len(value) == 1 and isinstance(tag, str) and tag in _TAGGED else value


def refusals(fields: Mapping[str, object], table: KeyMeanings) -> Iterator[str]:
    """One sentence for each key whose value the table does not allow."""
    for name, value in fields.items():
        meaning = table.get(name)
        if isinstance(meaning, Only) and value not in meaning.values:
            allowed = " or ".join(json.dumps(own) for own in meaning.values)
            yield f"{name} {shown(value)} is not supported, only {allowed}"


def unexplained(fields: Iterable[str], table: KeyMeanings) -> tuple[str, ...]:
    """The keys that are not in the table, as they may be logged."""
    names = [shown(name) for name in fields if name not in table]
    more = len(names) - NAMES_SHOWN_MAX
    return (*names[:NAMES_SHOWN_MAX], f"and {more} more") if more > 0 else tuple(names)


def shown(value: object) -> str:
    """A name or a value for a message: as in the file, on one line, and not too long."""
    text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
    return text if len(text) <= SHOWN_LEN_MAX else text[:SHOWN_LEN_MAX] + "..."
