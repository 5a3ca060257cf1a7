"""Finds the line of a TOML text that a problem of a configuration is about.

The text is read by lines, as TOML's own reader tells no places: headers, and keys at the beginning of a line.
Where several lines may be one text (triple quotes) no line is told, since it might be a wrong one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

_HEADER: Final = re.compile(r"\s*(\[{1,2})\s*([\w.\-\" ]+?)\s*\]{1,2}\s*(#.*)?")
_KEY: Final = re.compile(r"\s*([A-Za-z0-9_-]+(?:\s*\.\s*[A-Za-z0-9_-]+)*)\s*=")
_LAST: Final = re.compile(r"(\[\d+\]|\.?[^.\[\]]+)$")
_INVALID: Final = re.compile(r"not valid TOML: .*\(at line (\d+), ")
_SEVERAL: Final = ('"""', "'''")
_NAMES: Final = ("id", "name")
"""The settings that entries of lists are called by in problems: `keys.ID.tenant`."""


def lines_of(text: str, problems: list[str]) -> list[int | None]:
    """For each problem, `path: told`, its line from 1; None where it is not known."""
    try:
        entries = dict(_entries(tomllib.loads(text), ""))
    except (tomllib.TOMLDecodeError, RecursionError):
        return [int(found[1]) if (found := _INVALID.search(told)) else None for told in problems]
    places = {} if any(mark in text for mark in _SEVERAL) else _places(text)
    return [_line(_by_index(told.partition(": ")[0], entries), places) for told in problems]


def _places(text: str) -> dict[str, int]:
    """The line of each table and key, by its path with indices: `models[0].replicas`."""
    places: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            table = _table(header[2].replace('"', "").replace(" ", ""), header[1] == "[[", counts)
            places.setdefault(table, number)
            if "." in table:
                places.setdefault(table.partition(".")[0], number)
        elif key := _KEY.match(line):
            path = f"{table}.{key[1]}".lstrip(".").replace(" ", "")
            places.setdefault(path, number)
    return places


def _table(name: str, is_of_list: bool, counts: dict[str, int]) -> str:
    """A header's path with the indices of the entries that it is in."""
    path, parts = "", name.split(".")
    for at, part in enumerate(parts):
        path = f"{path}.{part}".lstrip(".")
        if is_of_list and at == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = f"{path}[{counts[path]}]"
    return path


def _entries(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """The entries of lists, by the path with a name in place of an index, to that with the index."""
    for key, value in table.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            yield from _entries(value, here)
        for at, entry in enumerate(value if isinstance(value, list) else ()):
            if isinstance(entry, dict):
                yield from ((f"{here}.{entry[name]}", f"{here}[{at}]") for name in _NAMES if name in entry)
                yield from _entries(entry, f"{here}[{at}]")


def _by_index(path: str, entries: Mapping[str, str]) -> str:
    """A problem's path, where an entry is named, with its index."""
    named = [one for one in entries if path == one or path.startswith(f"{one}.")]
    longest = max(named, key=len, default="")
    return entries[longest] + path[len(longest) :] if longest else path


def _line(path: str, places: Mapping[str, int]) -> int | None:
    """The line of a path, or of the nearest thing around it that has one."""
    while path:
        for tried in (path, f"{path}[0]"):
            if tried in places:
                return places[tried]
        shorter = _LAST.sub("", path)
        if shorter == path:
            return None
        path = shorter
    return None
