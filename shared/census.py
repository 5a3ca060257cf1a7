"""The number of values in a JSON body, counted before any of them is made.

Decoding makes an object for every item of an array and every field of an object: 8 MiB can be 4 million
lists, which take a second and 400 MB. Counting them takes a few passes over the bytes, in C, and makes no
objects.

Strings are taken out first, as their text may hold any character. What is left is structure: a value follows
every comma and every opening bracket, a field's value every colon. So for valid JSON the counts are exact,
but for empty arrays and objects, which count as one value each; for invalid JSON, which the decoder refuses,
they mean nothing.

A pass over megabytes takes some ten milliseconds, in which Python lets no other thread run. So a long body is
counted in slices. Of the slices before it, a slice must know only whether it begins within a string; no
escape is cut in two.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from shared.fair_threads import Slices, at_once

VALUES_MAX: Final = 256 * 1024
"""The most items of all arrays and fields of all objects: the token ids of a long prompt, and far more than
any chat."""
FIELDS_MAX: Final = 16 * 1024
"""The most fields of all objects: schemas of a hundred tools have as many."""
STRINGS_MAX: Final = 64 * 1024
"""The most strings, names of fields included."""
COUNTED_LEN_MIN: Final = 4 * 1024
"""Bytes of the shortest body that is counted. Shorter ones hold too little to matter."""


_BACKSLASH: Final = ord("\\")
"""A number, as bytes are searched ten times as fast for one as for bytes."""
SLICE_LEN: Final = 512 * 1024
"""Bytes of a slice, which takes two or three milliseconds."""


class Census(Struct, frozen=True):
    """The number of values in a body. `fields` are counted among `values` too."""

    values: int
    fields: int
    strings: int
    is_narrow: bool = True
    """True if all text is ASCII, also where it is escaped."""

    @property
    def excess(self) -> str | None:
        """The bound that is exceeded, in words for the caller; None when every bound is kept."""
        if self.strings > STRINGS_MAX:
            return f"more than {STRINGS_MAX} strings"
        if self.fields > FIELDS_MAX:
            return f"more than {FIELDS_MAX} fields"
        if self.values > VALUES_MAX:
            return f"more than {VALUES_MAX} values"
        return None


def census_slices(body: bytes, slice_len: int = SLICE_LEN) -> Slices[Census]:
    """Count the values of a body slice by slice. Counting ends as soon as a bound is exceeded."""
    assert slice_len >= 2
    length = len(body)
    found = Census(0, 0, 0)
    at = quotes = 0
    while at < length and found.excess is None:
        piece = body[at : at + slice_len]
        piece = piece[: len(piece) - _escapes(piece) % 2] if at + slice_len < length else piece
        at += len(piece)
        is_narrow = found.is_narrow and _is_narrow(piece)
        if _BACKSLASH in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        begins_within = quotes % 2
        quotes += piece.count(b'"')
        if (strings := (quotes + 1) // 2) > STRINGS_MAX:
            return Census(0, 0, strings)
        structure = b"".join(piece.split(b'"')[begins_within::2])
        values = structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        found = Census(found.values + values, found.fields + structure.count(b":"), strings, is_narrow)
        yield
    return found


def census_of(body: bytes) -> Census:
    """The census of a body: exact for a long one, an upper bound without counting for a short one."""
    length = len(body)
    if length >= COUNTED_LEN_MIN:
        return take_census(body)
    return Census(length // 2, length // 4, length // 2, _is_narrow(body))


def take_census(body: bytes, slice_len: int = SLICE_LEN) -> Census:
    """The result of `census_slices`, computed at once."""
    return at_once(census_slices(body, slice_len))


def _is_narrow(piece: bytes) -> bool:
    return piece.isascii() and not (_BACKSLASH in piece and rb"\u" in piece)


def _escapes(piece: bytes) -> int:
    """The number of backslashes at the end of `piece`."""
    return len(piece) - len(piece.rstrip(b"\\"))
