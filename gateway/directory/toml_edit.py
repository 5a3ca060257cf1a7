"""Edits of the tables of a list in a TOML file, such as `[[keys]]` or `[[admin.keys]]`, which leave all else
as it is.

Only the lines of one table are replaced; comments elsewhere stay, those within the table are lost. New lines
end as the first one of the file does. What comes of an edit is read again and compared with what was wanted:
a file that is written in another way than in tables below headers, such as `keys = [{ ... }]`, is refused
rather than damaged.
"""

from __future__ import annotations

import copy
import re
import tomllib
from typing import Any, Final

from shared.process.setting_values import to_toml

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
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    new = "" if record is None else f"[[{section}]]\n{to_toml(record, section)}".replace("\n", end)
    if at is None:
        first = last = len(lines)
        new = ("" if text.endswith(2 * end) or not text else end if text.endswith("\n") else 2 * end) + new
    else:
        first, last = _table(lines, section, at)
    edited = "".join([*lines[:first], new, *lines[last:]])
    try:
        is_wanted = _without_empty(document(edited), section) == _wanted(document(text), section, at, new)
    except CannotEdit:  # such as a table behind a list in brackets
        is_wanted = False
    if not is_wanted:
        raise _strange(section)
    return edited


def _table(lines: list[str], section: str, at: int) -> tuple[int, int]:
    """The first line of a table and the one behind its last: neither the empty lines behind it nor the
    comments there, which belong to what follows. Raises CannotEdit."""
    headers = [(number, found[1].strip()) for number, line in enumerate(lines) if (found := _header(line))]
    starts = [number for number, name in headers if name == section and lines[number].lstrip()[:2] == "[["]
    if at >= len(starts):
        raise _strange(section)
    first = starts[at]
    behind = (number for number, name in headers if number > first and not name.startswith(f"{section}."))
    last = next(behind, len(lines))
    while last < len(lines) and (not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#")):
        last -= 1
    return first, last


def _header(line: str) -> re.Match[str] | None:
    return _HEADER.fullmatch(line.rstrip("\r\n"))


def _wanted(before: dict[str, Any], section: str, at: int | None, new: str) -> dict[str, Any]:
    wanted = copy.deepcopy(before)
    holder, name = _holder(wanted, section)
    table, _ = _holder(document(new), section)
    entries = list(holder.get(name, ()))
    if at is None:
        entries += table.get(name, [])
    else:
        entries[at : at + 1] = table.get(name, [])
    holder[name] = entries
    return _without_empty(wanted, section)


def _holder(contents: dict[str, Any], section: str) -> tuple[dict[str, Any], str]:
    """The table that a list is in, which is made if it is missing, and the list's own name."""
    *tables, name = section.split(".")
    for table in tables:
        contents = contents.setdefault(table, {})
    return contents, name


def _without_empty(contents: dict[str, Any], section: str) -> dict[str, Any]:
    """The contents without the list where it is empty, and without the tables around it that have nothing
    else: a file need not spell them."""
    names = section.split(".")
    while names:
        holder, name = _holder(contents, ".".join(names))
        if not holder.get(name):
            holder.pop(name, None)
        names.pop()
    return contents


def _strange(section: str) -> CannotEdit:
    return CannotEdit(f"its {section} are not written as [[{section}]] tables")
