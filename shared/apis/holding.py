"""The memory that one request holds, reserved with its tenant before it is taken.

A body of n bytes costs more than n: text of one emoji is stored in four bytes a character, a small JSON list
takes eighty, a token id forty. `memory_of` is an upper bound, from a census of the body, before it is
decoded; the reservation is lowered again when less is held (`tests/neighbours` compares it with the memory of
the processes).
"""

from __future__ import annotations

from typing import Final, Self

from shared.apis.census import (
    COUNTED_LEN_MIN,
    FIELDS_MAX,
    STRINGS_MAX,
    VALUES_MAX,
    Census,
    census_of,
    census_slices,
)
from shared.apis.validation import refuse_excess
from shared.fairness.fair_share import FairShare
from shared.fairness.fair_threads import FairThreads
from shared.wire.errors import Overloaded

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
    """The same for a body of any length, slice by slice on a thread."""
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
