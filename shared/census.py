"""How many values a JSON body holds, counted before any of them is made.

Decoding makes an object for every item of an array and every field of an object: 8 MiB can be 4 million
lists, which take a second and 400 MB. Counting them takes a few passes over the bytes, in C, and makes
nothing.

Strings are taken out first, as their text may hold any character. What is left is structure: a value follows
every comma and every opening bracket, a field's value every colon. So for valid JSON the counts are exact,
but for empty arrays and objects, which count as one value each; for anything else they mean nothing, and the
decoder refuses it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

VALUES_MAX: Final = 256 * 1024
"""Items of all arrays and fields of all objects: the token ids of a long prompt, and far more than any
chat."""
FIELDS_MAX: Final = 16 * 1024
"""Fields of all objects: schemas of a hundred tools have as many."""
STRINGS_MAX: Final = 64 * 1024
"""Strings, names of fields included."""
COUNTED_LEN_MIN: Final = 4 * 1024
"""Shorter bodies are not counted: they hold too little to matter."""


class Census(Struct, frozen=True):
    """How many of each a body holds; `fields` are counted among `values` too."""

    values: int
    fields: int
    strings: int

    @property
    def excess(self) -> str | None:
        """What there is too much of, in words for the caller; None when every bound is kept."""
        if self.strings > STRINGS_MAX:
            return f"more than {STRINGS_MAX} strings"
        if self.fields > FIELDS_MAX:
            return f"more than {FIELDS_MAX} fields"
        if self.values > VALUES_MAX:
            return f"more than {VALUES_MAX} values"
        return None


def census_of(body: bytes) -> Census:
    """An upper bound for a short body, without looking at it; exact for a long one."""
    length = len(body)
    return Census(length // 2, length // 4, length // 2) if length < COUNTED_LEN_MIN else take_census(body)


def take_census(body: bytes) -> Census:
    """Count the values of a body. What has too many strings is not looked at further."""
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = (body.count(b'"') + 1) // 2
    if strings > STRINGS_MAX:
        return Census(0, 0, strings)
    structure = b"".join(body.split(b'"')[::2]) if strings else body
    values = structure.count(b",") + structure.count(b"[") + structure.count(b"{")
    return Census(values, structure.count(b":"), strings)
