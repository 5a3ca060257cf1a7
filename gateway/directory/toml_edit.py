"""Edits of the tables of a list in a TOML file, `[[keys]]` or `[[tenants]]`, which leave all else as it is.

Only the lines of one table are replaced; comments elsewhere stay, those within the table are lost. What comes
of an edit is read again and compared with what was wanted: a file that is written in another way than in
tables below headers, such as `keys = [{ ... }]`, is refused rather than damaged.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from shared.config import to_toml

_HEADER: Final = re.compile(r"\s*\[{1,2}([^\[\]#]+)\]{1,2}\s*(#.*)?")
"""A line with the header of a table. Group 1 is its name."""


class CannotEdit(Exception):
    """The text is not written in a way that can be edited."""


def document(text: str) -> dict[str, Any]:
    """The contents of a TOML text. Raises CannotEdit."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise CannotEdit(f"it is not valid TOML: {error}") from None


def replace_table(text: str, section: str, at: int | None, record: Any) -> str:
    """The text with the table number `at` (from 0) of the list `section` replaced by one of `record`, a value
    of the dataclass of its settings. None for `at` adds a table at the end; None for `record` removes the
    one that is there. Raises CannotEdit."""
    lines = text.splitlines(keepends=True)
    new = "" if record is None else f"[[{section}]]\n{to_toml(record, section)}"
    if at is None:
        first = last = len(lines)
        new = ("" if text.endswith("\n\n") or not text else "\n" if text.endswith("\n") else "\n\n") + new
    else:
        first, last = _table(lines, section, at)
    edited = "".join([*lines[:first], new, *lines[last:]])
    if document(edited) != _wanted(document(text), section, at, new):
        raise CannotEdit(f"its {section} are not written as [[{section}]] tables")
    return edited


def _table(lines: list[str], section: str, at: int) -> tuple[int, int]:
    """The first line of a table and the one behind its last: neither the empty lines behind it nor the
    comments there, which belong to what follows. Raises CannotEdit."""
    headers = [(number, found[1].strip()) for number, line in enumerate(lines) if (found := _header(line))]
    starts = [number for number, name in headers if name == section and lines[number].lstrip()[:2] == "[["]
    if at >= len(starts):
        raise CannotEdit(f"its {section} are not written as [[{section}]] tables")
    first = starts[at]
    behind = (number for number, name in headers if number > first and not name.startswith(f"{section}."))
    last = next(behind, len(lines))
    while last < len(lines) and (not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#")):
        last -= 1
    return first, last


def _header(line: str) -> re.Match[str] | None:
    return _HEADER.fullmatch(line.rstrip("\r\n"))


def _wanted(before: dict[str, Any], section: str, at: int | None, new: str) -> dict[str, Any]:
    entries = list(before.get(section, ()))
    table = document(new).get(section, [])
    if at is None:
        entries += table
    else:
        entries[at : at + 1] = table
    others = {name: value for name, value in before.items() if name != section}
    return {**others, section: entries} if entries else others
