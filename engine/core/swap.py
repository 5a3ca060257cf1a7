"""Host memory as the second place for a sequence's pages, and when to use it.

A preempted sequence loses its pages and must be restored later, in one of two ways:

    recompute    its tokens run through the model again; what the prefix cache still has is skipped
    swap         its pages are copied to host memory now, and back when it is admitted again

Either is exact. Which is cheaper depends on the machine and on the sequence, so both are estimated by the
learned cost of a step (`engine.core.cost`): twice its pages at the rate of copies, against its tokens at
the rate of prompts. Leading pages that others refer to as well are left out of both: they stay where they
are, and are found again by their identities.

      device   [ 7 | 3 | 9 | 4 | . ]       7 and 3 are shared: not copied, and released like the others
                         |   |             9 is full, 4 has room for more tokens
                         v   v
      host             [ 0 | 2 ]           held by the sequence, behind its first two pages

Rules

1. `free + leaving + held == total` host pages, and no sequence holds one that another does (`check`
   asserts both). A host page is never shared, and has no identity.
2. The runner makes a plan's copies before it computes anything, all those to the host before all those
   from there. So a page may be given away in the plan that copies it out.
3. A host page that a plan copies from is *leaving*: it is free from the next plan on. Otherwise a sequence
   preempted in the same plan might be copied onto it first.
4. When a sequence is admitted again and its shared pages are gone from the cache, what lies behind them is
   of no use, since there is no way to compute the middle of a sequence alone: it is recomputed. When the
   cache holds some that were copied, too, only the rest is copied back.
5. Everything has a bound. When host pages do not suffice, or when one step's copies would take longer than
`COPY_SHARE` of the gap target, the sequence is recomputed. What the copies take is no longer there for
prompts (`engine.core.cost` counts them as work).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from engine.core.block_manager import BlockManager, pages_for
from engine.core.cost import StepCost
from engine.core.sequence import Sequence, Swapped

COPY_SHARE: Final = 0.5
"""The largest share of the default class's gap target that one step's copies may take."""


@dataclass(frozen=True, slots=True)
class Restoration:
    """The cost of restoring a sequence if it were preempted now."""

    first: int
    """The number of leading pages that other sequences hold, too."""
    pages: int
    """The number of pages behind them that hold computed tokens."""
    recompute_s: float
    """The time to compute these pages' tokens again, in seconds."""
    swap_s: float
    """The time to copy these pages to host memory and back, in seconds; infinite when that is impossible."""

    @property
    def least_s(self) -> float:
        return min(self.recompute_s, self.swap_s)


Preference = Callable[[Restoration], bool]
"""Says whether a sequence that can be swapped is swapped."""


def if_cheaper(restoration: Restoration) -> bool:
    """The preference of the product: swap when that takes less time than computing again."""
    return restoration.swap_s < restoration.recompute_s


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a waiting sequence that need not be computed when it is admitted."""

    pages: list[int]
    """The first pages of its table: its own when it is stalled, else those that the prefix cache has."""
    host_pages: list[int]
    """Host pages to copy into fresh pages behind those."""
    computed_len: int
    """The number of tokens in all these pages."""


class HostPool:
    """Pages of host memory, by number; the runner owns the tensors. Every call takes O(pages it names)."""

    def __init__(self, pages: int) -> None:
        self.total: Final = pages
        self._free = list(reversed(range(pages)))
        self._leaving: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def allocate(self, count: int) -> list[int]:
        assert 0 <= count <= self.free
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: Iterable[int]) -> None:
        """Free these pages at once, since no further plan copies from them."""
        self._free += pages

    def release_after_plan(self, pages: Iterable[int]) -> None:
        """Free these pages once the plan in the making is made, which copies from them (rule 3)."""
        self._leaving += pages

    def plan_made(self) -> None:
        """Free the leaving pages (rule 3)."""
        self._free += self._leaving
        self._leaving.clear()

    def check(self, held: Iterable[Collection[int]]) -> None:
        """Assert rule 1; `held` has the host pages of each living sequence."""
        everything = [*self._free, *self._leaving, *(page for pages in held for page in pages)]
        assert sorted(everything) == list(range(self.total)), "a host page is lost, or in two places"


class Swapper:
    """Decides how victims are restored, and keeps the copies that the next plan makes."""

    def __init__(
        self,
        host_pages: int,
        pages: BlockManager,
        gap_target_s: float,
        prefers: Preference = if_cheaper,
    ) -> None:
        """`gap_target_s` is infinite when none is set: then copies are not bounded by time."""
        self.host: Final = HostPool(host_pages)
        self._pages: Final = pages
        self._copies_s_max: Final = gap_target_s * COPY_SHARE
        self._prefers: Final = prefers
        self._out: list[tuple[int, int]] = []
        self._in: list[tuple[int, int]] = []
        self.sequences_out = 0
        self.sequences_in = 0
        self.pages_out = 0
        self.pages_in = 0

    @property
    def copied_pages(self) -> int:
        """The number of pages that the plan in the making copies, out and in."""
        return len(self._out) + len(self._in)

    def restoration(self, victim: Sequence, cost: StepCost) -> Restoration:
        """The cost of restoring `victim` if it were preempted now."""
        size = self._pages.page_size
        first = self._pages.leading_shared(victim.pages)
        pages = pages_for(victim.computed_len, size) - first
        recompute_s = cost.chunk_s(first * size, victim.computed_len - first * size)
        copies_s = cost.page_s * (self.copied_pages + pages)
        is_possible = 0 < pages <= self.host.free and copies_s <= self._copies_s_max
        swap_s = 2 * cost.page_s * pages if is_possible else math.inf
        return Restoration(first, pages, recompute_s, swap_s)

    def take_out(self, victim: Sequence, cost: StepCost) -> Swapped | None:
        """Let the plan in the making copy the victim's pages to host memory, if that is possible and
        preferred.

        Returns what the victim then holds there, or None when it is to be recomputed. Its pages may be
        released right after.
        """
        plan = self.restoration(victim, cost)
        if plan.swap_s == math.inf or not self._prefers(plan):
            return None
        host_pages = self.host.allocate(plan.pages)
        end = plan.first + plan.pages
        self._out += zip(victim.pages[plan.first : end], host_pages, strict=True)
        self.sequences_out += 1
        self.pages_out += plan.pages
        return Swapped(plan.first, host_pages, victim.computed_len)

    def prefix(self, sequence: Sequence, found: list[int]) -> Prefix:
        """The part of a sequence without pages that need not be computed; `found` are the pages that the
        prefix cache has of it (rule 4)."""
        swapped, found_len = sequence.swapped, len(found) * self._pages.page_size
        if swapped is None or len(found) < swapped.first or swapped.computed_len <= found_len:
            return Prefix(found, [], found_len)
        return Prefix(found, swapped.host_pages[len(found) - swapped.first :], swapped.computed_len)

    def bring_in(self, sequence: Sequence, prefix: Prefix, fresh: Collection[int]) -> None:
        """Let the plan in the making copy the prefix's host pages to the first of `fresh`, and free all that
        the sequence holds in host memory."""
        assert sequence.swapped is not None
        self._in += zip(prefix.host_pages, fresh, strict=False)
        self.host.release_after_plan(sequence.swapped.host_pages)
        self.sequences_in += bool(prefix.host_pages)
        self.pages_in += len(prefix.host_pages)

    def drop(self, sequence: Sequence) -> None:
        """Free the host pages of a sequence that ends."""
        if sequence.swapped is not None:
            self.host.release(sequence.swapped.host_pages)

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies of the plan that is made now: those out as (device page, host page), those in as
        (host page, device page)."""
        self.host.plan_made()
        copies = self._out, self._in
        self._out, self._in = [], []
        return copies
