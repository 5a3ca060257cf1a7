"""Host memory as the second place for pages, and when to use it: for the pages of preempted sequences, and
for those that the prefix cache evicts.

A preempted sequence loses its pages and must be restored later, in one of two ways:

    recompute    its tokens run through the model again; what the prefix cache still has is skipped
    swap         its pages are copied to host memory now, and back when it is admitted again

Either is exact. Which is cheaper depends on the machine and on the sequence, so both are estimated by the
learned cost of a step (`engine.core.estimate.cost`): twice its pages at the rate of copies, against its
tokens at the rate of prompts. Leading pages that others refer to as well are left out of both: they stay
where they are, and are found again by their identities.

      device   [ 7 | 3 | 9 | 4 | . ]       7 and 3 are shared: not copied, and released like the others
                         |   |             9 is full, 4 has room for more tokens
                         v   v
      host             [ 0 | 2 ]           held by the sequence, behind its first two pages

Rules

1. A preempted sequence alone refers to its copies. The states of host pages, and who makes room for whom, are
   in `engine.core.pages.host_pool`.
2. The runner makes a plan's copies before it computes anything, all those to the host before all those
   from there. So a page may be given away in the plan that copies it out.
3. A page that the prefix cache evicts is copied to host memory in the very plan that gives it away, where
   copying it there and back takes less than computing it. It keeps its identity there, and comes back as a
   part of the plan that admits a sequence whose prefix it continues: then it is on the device, and no longer
   here. A page that the device lost is of use only behind those that it has, so of pages that are evicted
   together the heads of prefixes are kept first.
4. When a sequence is admitted again and its shared pages are gone from the cache, what lies behind them is
   of no use, since there is no way to compute the middle of a sequence alone: it is recomputed. When the
   cache holds some that were copied, too, only the rest is copied back.
5. Everything has a bound. When host pages do not suffice, or when one step's copies would take longer than
   `COPY_SHARE` of the gap target, the sequence is recomputed, an evicted page is lost, and of a prefix only
   the first pages come back. (All of them do while nothing runs, since no stream sees the gap.) What the
   copies take is no longer there for prompts (`engine.core.estimate.cost` counts them as work).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Final

from engine.core.estimate.cost import StepCost
from engine.core.pages.block_manager import BlockManager, Evicted, PageIdentity, pages_for
from engine.core.pages.host_pool import HostPool
from engine.core.sequence import Sequence, Swapped

COPY_SHARE: Final = 0.5
"""The largest share of the default class's gap target that one step's copies may take."""
COPIES_MAX: Final = 1 << 30


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
    """Copies of its own to bring into fresh pages behind those, and behind `kept`."""
    computed_len: int
    """The number of tokens in all these pages."""
    kept: list[PageIdentity] = field(default_factory=list)
    """The pages right behind `pages` that host memory keeps."""
    source: int | None = None
    """The page that has the head behind all these pages; its tokens are counted in `computed_len`."""


@dataclass(frozen=True, slots=True)
class Brought:
    """The part of a sequence's prefix that comes out of host memory as it is admitted."""

    host_pages: list[int]
    computed_len: int
    """The number of tokens in these pages and those before them."""
    host_len: int
    """Tokens in pages that were kept here since the prefix cache evicted them."""
    disk_len: int
    """Tokens in pages that were read from disk."""


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
        self._out: dict[int, int] = {}
        """The page that is copied to each host page. A host page that is dropped and used again within one
        plan gets the later page alone."""
        self._in: list[tuple[int, int]] = []
        self._taken = 0
        """Host pages that were taken and are not in `_in` yet."""
        self.sequences_out = 0
        self.sequences_in = 0
        self.pages_out = 0
        self.pages_in = 0

    @property
    def copied_pages(self) -> int:
        """The number of pages that the plan in the making copies, out and in."""
        return len(self._out) + len(self._in) + self._taken

    def restoration(self, victim: Sequence, cost: StepCost) -> Restoration:
        """The cost of restoring `victim` if it were preempted now."""
        size = self._pages.page_size
        first = self._pages.leading_shared(victim.pages)
        pages = pages_for(victim.computed_len, size) - first
        recompute_s = cost.chunk_s(first * size, victim.computed_len - first * size)
        copies_s = cost.page_s * (self.copied_pages + pages)
        is_possible = 0 < pages <= self.host.available and copies_s <= self._copies_s_max
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
        self._out.update(zip(host_pages, victim.pages[plan.first : end], strict=True))
        self.sequences_out += 1
        self.pages_out += plan.pages
        return Swapped(plan.first, host_pages, victim.computed_len)

    def keep(self, evicted: Sequence_[Evicted], cost: StepCost, *, streams: bool) -> None:
        """Let the plan in the making copy pages that the prefix cache evicted to host memory, as far as there
        is time (rule 3: where copying takes less than computing). The oldest come first in `evicted`;
        `streams` says whether sequences run."""
        size = self._pages.page_size
        if not evicted or not self._prefers(Restoration(0, 1, cost.chunk_s(0, size), 2 * cost.page_s)):
            return
        most = self._copies_left(cost) if streams else len(evicted)
        for one in evicted[max(0, len(evicted) - most) :]:
            host_page = self.host.keep(one.identity, one.tenant)
            if host_page is not None:
                self._out[host_page] = one.page
                self.pages_out += 1

    def _copies_left(self, cost: StepCost) -> int:
        """The number of pages that the plan in the making may still copy beside streams, within `COPY_SHARE`
        of their gap (rule 5)."""
        if not cost.page_s or self._copies_s_max == math.inf:
            return COPIES_MAX
        return max(0, int(self._copies_s_max / cost.page_s) - self.copied_pages)

    def kept(
        self, found_len: int, identities: Sequence_[PageIdentity], cost: StepCost, *, streams: bool
    ) -> list[PageIdentity]:
        """The pages behind the first `found_len` that host memory keeps and that are to be copied back rather
        than computed. `identities` are those behind them; `streams` says whether sequences run."""
        count = self.host.find(identities)
        count = min(count, self._copies_left(cost)) if streams else count
        size = self._pages.page_size
        recompute_s = cost.chunk_s(found_len * size, count * size)
        if not count or not self._prefers(Restoration(found_len, count, recompute_s, cost.page_s * count)):
            return []
        return list(identities[:count])

    def prefix(self, sequence: Sequence, found: list[int], kept: Sequence_[PageIdentity] = ()) -> Prefix:
        """The part of a sequence without pages that need not be computed; `found` are the pages that the
        prefix cache has of it, and host memory keeps those behind them, with no gap between (rule 4)."""
        swapped, size = sequence.swapped, self._pages.page_size
        known = len(found) + len(kept)
        if swapped is None or known < swapped.first or swapped.computed_len <= known * size:
            return Prefix(found, [], known * size, list(kept))
        own = max(len(found), swapped.first)
        before = list(kept[: own - len(found)])
        return Prefix(found, swapped.host_pages[own - swapped.first :], swapped.computed_len, before)

    def take(self, sequence: Sequence, prefix: Prefix) -> Brought:
        """Take the prefix's pages out of host memory, and free all that the sequence holds there, once the
        plan in the making is made. `bring_in` must follow.

        What was kept may have made room meanwhile for what the plan copies out: then only what is before it
        is of use.
        """
        size, host_pages, fetched = self._pages.page_size, list[int](), 0
        for identity in prefix.kept:
            is_fetched = self.host.is_fetched(identity)
            host_page = self.host.take(identity)
            if host_page is None:
                break
            host_pages.append(host_page)
            fetched += is_fetched
        kept = len(host_pages)
        computed_len = (len(prefix.pages) + kept) * size
        if kept == len(prefix.kept):
            host_pages += prefix.host_pages
            computed_len = prefix.computed_len
        if sequence.swapped is not None:
            self.host.release_after_plan(sequence.swapped.host_pages)
            self.sequences_in += len(host_pages) > kept
        self._taken = len(host_pages)
        return Brought(host_pages, computed_len, (kept - fetched) * size, fetched * size)

    def bring_in(self, brought: Brought, fresh: Sequence_[int]) -> None:
        """Let the plan in the making copy these host pages to the first of `fresh`."""
        self._in += zip(brought.host_pages, fresh, strict=False)
        self.pages_in += len(brought.host_pages)
        self._taken = 0

    def drop(self, sequence: Sequence) -> None:
        """Free the host pages of a sequence that ends."""
        if sequence.swapped is not None:
            self.host.release(sequence.swapped.host_pages)

    def take_copies(self, step: int = 0) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies of the plan of this step, which is made now: those out as (device page, host page),
        those in as (host page, device page)."""
        out = [(page, host_page) for host_page, page in self._out.items()]
        back, self._in = self._in, []
        self._out = {}
        self.host.plan_made(step, [*(host_page for _, host_page in out), *(host for host, _ in back)])
        return out, back
