"""Bounds the cost of a body before it is decoded: its values are counted, and its memory is reserved with its
tenant.

The census. Decoding makes an object for every item of an array and every field of an object: 8 MiB can be 4
million lists, which take a second and 400 MB. Counting them takes a few passes over the bytes, in C, and
makes no objects.

Strings are taken out first, as their text may hold any character. What is left is structure: a value follows
every comma and every opening bracket, a field's value every colon. So for valid JSON the counts are exact,
but for empty arrays and objects, which count as one value each; for invalid JSON, which the decoder refuses,
they mean nothing. The depth is the most brackets that are open at once. Decoders end where the stack of their
thread does, after a thousand levels or after fifty thousand, which is no bound for what comes after them.

A pass over megabytes takes some ten milliseconds, in which Python lets no other thread run. So a long body is
counted in slices. Of the slices before it, a slice must know only whether it begins within a string; no
escape is cut in two.

The memory. A body of n bytes costs more than n: text of one emoji is stored in four bytes a character, a
small JSON list takes eighty, a token id forty. `memory_of` is an upper bound, from the census; the
reservation is lowered again when less is held (`tests/neighbours` compares it with the memory of the
processes). What a template is given as objects, schemas of tools and arguments of calls, is gone before the
rendered prompt becomes ids, and takes no more than those: it has no part of its own.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final, Self

from msgspec import Struct

from shared.fairness.fair_share import FairShare
from shared.fairness.fair_threads import FairThreads, Slices, at_once
from shared.wire.errors import InvalidRequest, Overloaded

# -- the census -----------------------------------------------------------------------------------


VALUES_MAX: Final = 256 * 1024
"""The most items of all arrays and fields of all objects: the token ids of a long prompt, and far more than
any chat."""
FIELDS_MAX: Final = 16 * 1024
"""The most fields of all objects: schemas of a hundred tools have as many."""
STRINGS_MAX: Final = 64 * 1024
"""The most strings, names of fields included."""
DEPTH_MAX: Final = 128
"""The most arrays and objects within each other."""
COUNTED_LEN_MIN: Final = 4 * 1024
"""Bytes of the shortest body that is counted. Shorter ones hold too little to matter, but may be deep."""
SURE_LEN: Final = min(2 * VALUES_MAX, 4 * FIELDS_MAX, 2 * STRINGS_MAX)
"""Bytes of a body that is too short to exceed any of these but the last."""
PIECES: Final = 512
"""Pieces of `DEPTH_MAX` brackets that are looked at in one slice, which takes a millisecond or two."""
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Makes signed bytes of brackets: 1 for each that opens, -1 for each that closes."""
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[{]}"))

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
    depth: int = 0
    """The most arrays and objects within each other. Not counted where it cannot exceed the bound."""

    @property
    def excess(self) -> str | None:
        """The bound that is exceeded, in words for the caller; None when every bound is kept."""
        if self.strings > STRINGS_MAX:
            return f"more than {STRINGS_MAX} strings"
        if self.fields > FIELDS_MAX:
            return f"more than {FIELDS_MAX} fields"
        if self.values > VALUES_MAX:
            return f"more than {VALUES_MAX} values"
        if self.depth > DEPTH_MAX:
            return f"more than {DEPTH_MAX} levels of nesting"
        return None


def census_slices(body: bytes, slice_len: int = SLICE_LEN) -> Slices[Census]:
    """Count the values of a body slice by slice. Counting ends as soon as a bound is exceeded."""
    assert slice_len >= 2
    length = len(body)
    found = Census(0, 0, 0)
    at = quotes = level = 0
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
        opened = structure.count(b"[") + structure.count(b"{")
        values = found.values + structure.count(b",") + opened
        depth = found.depth
        if level + opened > DEPTH_MAX:
            depth = max(depth, (yield from _depth(structure, level)))
        level += opened - structure.count(b"]") - structure.count(b"}")
        fields = found.fields + structure.count(b":")
        found = Census(values, fields, strings, is_narrow, depth)
        yield
    return found


def census_of(body: bytes) -> Census:
    """The census of a body: exact for a long one, an upper bound without counting for a short one."""
    length = len(body)
    if length >= COUNTED_LEN_MIN:
        return take_census(body)
    if body.count(b"[") + body.count(b"{") > DEPTH_MAX:  # some of them in strings, perhaps
        return take_census(body)
    return Census(length // 2, length // 4, length // 2, _is_narrow(body))


def most_of(body: bytes) -> Census:
    """No fewer values than a body has: what looks like them in strings is counted, too. The depth is not."""
    values = body.count(b",") + body.count(b"[") + body.count(b"{")
    return Census(values, body.count(b":"), (body.count(b'"') + 1) // 2)


def take_census(body: bytes, slice_len: int = SLICE_LEN) -> Census:
    """The result of `census_slices`, computed at once."""
    return at_once(census_slices(body, slice_len))


def refuse_excess(census: Census) -> None:
    """Refuse a body with too many values. Raises InvalidRequest.

    Such a body can never be served, however much memory is free, so this is checked before memory is
    reserved.
    """
    if census.excess is not None:
        raise InvalidRequest(f"The body has {census.excess}.")


def _depth(structure: bytes, level: int) -> Slices[int]:
    """The most brackets that are open at once within some structure, before which there are `level`; or more
    than the bound."""
    steps = structure.translate(_STEPS, _NO_BRACKETS)
    depth = level
    for number, at in enumerate(range(0, len(steps), DEPTH_MAX), 1):
        piece = steps[at : at + DEPTH_MAX]
        opened = piece.count(1)
        if level + opened > DEPTH_MAX:
            depth = max(depth, max(accumulate(memoryview(piece).cast("b"), initial=level)))
            if depth > DEPTH_MAX:
                break
        level += 2 * opened - len(piece)
        if number % PIECES == 0:
            yield
    return depth


def _is_narrow(piece: bytes) -> bool:
    return piece.isascii() and not (_BACKSLASH in piece and rb"\u" in piece)


def _escapes(piece: bytes) -> int:
    """The number of backslashes at the end of `piece`."""
    return len(piece) - len(piece.rstrip(b"\\"))


# -- the memory -----------------------------------------------------------------------------------


TOKENS_MAX: Final = 1024 * 1024
"""The most tokens of all prompts of a request together."""
VALUE_BYTES: Final = 96
"""Bytes of a small list in a list, or of a field with its name."""
TOKEN_BYTES: Final = 40
"""Bytes of a token id: an integer and its place in a list."""
TEXTS: Final = 2
"""The number of copies of a body's text: as it was decoded, and as the chat template renders it."""
CHARACTER_BYTES_MAX: Final = 4
assert min(VALUES_MAX, FIELDS_MAX, STRINGS_MAX) >= COUNTED_LEN_MIN, "no body that is not counted has too many"
SHRINK_MIN: Final = 64 * 1024
"""Bytes of the least amount that `shrink` gives back. Less is given back at the end."""


class Holding:
    """One request's part of a `FairShare` of bytes."""

    __slots__ = ("_held", "_share", "tenant")

    def __init__(self, share: FairShare, tenant: str) -> None:
        self._share: Final = share
        self.tenant: Final = tenant
        self._held = 0

    def hold(self, size: int) -> None:
        """Hold `size` bytes in all from now on. Raises Overloaded when the tenant may not have as many."""
        if size < self._held:
            self._share.release(self.tenant, self._held - size)
        elif not self._share.acquire(self.tenant, size - self._held):
            raise Overloaded(
                "Requests hold as much memory as they may. Please try again later.",
                retry_after_s=1.0,
                detail=f"bytes: {self._share.describe(self.tenant, size - self._held)}",
            )
        self._held = size

    def shrink(self, size: int) -> None:
        """Hold no more than `size` bytes from now on, if that gives back more than `SHRINK_MIN`."""
        if self._held - size > SHRINK_MIN:
            self.hold(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hold(0)


def weigh(body: bytes, holding: Holding) -> Census:
    """Count the values of a body of up to `INLINE_LEN_MAX` bytes, and hold the memory for it and all that is
    made of it. Raises InvalidRequest when there are too many values, and Overloaded."""
    return _held(body, census_of(body), holding)


async def weigh_long(body: bytes, holding: Holding, threads: FairThreads, tenant: str) -> None:
    """Weigh a body of any length, slice by slice on a thread."""
    _held(body, await threads.run(tenant, census_slices(body), holds=True), holding)


def _held(body: bytes, census: Census, holding: Holding) -> Census:
    refuse_excess(census)
    holding.hold(memory_of(len(body), census))
    return census


def memory_of(body_len: int, census: Census) -> int:
    """The most bytes that a body takes with all that is made of it until it is dispatched."""
    texts = TEXTS * body_len * (1 if census.is_narrow else CHARACTER_BYTES_MAX)
    return body_len + texts + census.values * VALUE_BYTES + min(body_len, TOKENS_MAX) * TOKEN_BYTES


def memory_max(body_len_max: int) -> int:
    """The largest value of `memory_of` for any body up to this length that is not refused."""
    texts = TEXTS * CHARACTER_BYTES_MAX * body_len_max
    return body_len_max + texts + VALUES_MAX * VALUE_BYTES + min(body_len_max, TOKENS_MAX) * TOKEN_BYTES
