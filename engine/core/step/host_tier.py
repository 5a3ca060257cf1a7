"""Host memory as the second place for pages: what the prefix cache evicts is copied there, and comes back.

A page has one life, whether its sequence ended or was preempted:

    owned --release--> cached --evicted: a copy out--> kept in host memory --written behind--> on disk
      ^                  |                               |
      '--- prefix hit ---+------- a copy back -----------'

A sequence that is preempted releases its pages into the prefix cache, and finds them again when it is
admitted, as any sequence finds a prefix: on the device, in host memory, or nowhere, and then its tokens are
computed again. Each way is exact. Of a page that it had not filled, the cache has the head on the device
alone: less than a page is computed again.

Rules

1. The runner makes a plan's copies before it computes anything, all those to the host before all those
   from there. So a page may be given away in the plan that copies it out. (The states of host pages, and
   which of them makes room, are in `engine.core.pages.host_pool`.)
2. A page that the prefix cache evicts is copied to host memory in the very plan that gives it away, where
   copying it there and back takes less than computing it, by the learned cost of a step
   (`engine.core.estimate.cost`). It keeps its identity there, and comes back as a part of the plan that
   admits a sequence whose prefix it continues: then it is on the device, and no longer here. A page that the
   device lost is of use only behind those that it has, so of pages that are evicted together the heads of
   prefixes are kept first.
3. Everything has a bound. When host pages do not suffice, or when one step's copies would take longer than
   `COPY_SHARE` of the gap target, an evicted page is lost, and of a prefix only the first pages come back.
   (All of them do while nothing runs, since no stream sees the gap.) What the copies take is no longer there
   for prompts (`engine.core.estimate.cost` counts them as work).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Final

from engine.core.estimate.cost import StepCost
from engine.core.pages.block_manager import BlockManager, Evicted, PageIdentity, pages_for
from engine.core.pages.host_pool import HostPool
from engine.core.sequence import Sequence

COPY_SHARE: Final = 0.5
"""The largest share of the default class's gap target that one step's copies may take."""
COPIES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a waiting sequence that need not be computed when it is admitted."""

    pages: list[int]
    """The first pages of its table: its own when it kept them, else those that the prefix cache has."""
    computed_len: int
    """The number of tokens in all these pages."""
    kept: list[PageIdentity] = field(default_factory=list)
    """The pages right behind `pages` that host memory keeps."""
    source: int | None = None
    """The page that has the head behind all these pages; its tokens are counted in `computed_len`."""
    state: PageIdentity | None = None
    """The snapshot of the state behind `pages`, of a model that has states."""
    branch_len: int = 0
    """The number of tokens in pages that the prefix cache has, `pages` and those behind them that lack a
    state."""


@dataclass(frozen=True, slots=True)
class Brought:
    """The part of a sequence's prefix that comes out of host memory as it is admitted."""

    host_pages: list[int]
    host_len: int
    """Tokens in pages that were kept here since the prefix cache evicted them."""
    disk_len: int
    """Tokens in pages that were read from disk."""


class HostTier:
    """Decides what is copied to host memory and back, and keeps the copies that the next plan makes."""

    def __init__(self, host_pages: int, pages: BlockManager, gap_target_s: float) -> None:
        """`gap_target_s` is infinite when none is set: then copies are not bounded by time."""
        self.host: Final = HostPool(host_pages)
        self._pages: Final = pages
        self._copies_s_max: Final = gap_target_s * COPY_SHARE
        self._out: dict[int, int] = {}
        """The page that is copied to each host page. A host page that is dropped and used again within one
        plan gets the later page alone."""
        self._in: list[tuple[int, int]] = []
        self._taken = 0
        """Host pages that were taken and are not in `_in` yet."""
        self.has_copies = False
        """True if the plan in the making copies anything."""
        self.pages_out = 0
        self.pages_in = 0

    @property
    def copied_pages(self) -> int:
        """The number of pages that the plan in the making copies, out and in."""
        return len(self._out) + len(self._in) + self._taken

    def restore_s(self, victim: Sequence, cost: StepCost) -> float:
        """The time to restore `victim` if it were preempted now, in seconds: what others share of it stays,
        the rest is computed again, or copied out and back if there is room for all of it."""
        size = self._pages.page_size
        first = self._pages.leading_shared(victim.pages)
        pages = pages_for(victim.computed_len, size) - first
        recompute_s = cost.chunk_s(first * size, victim.computed_len - first * size)
        return min(recompute_s, 2 * cost.page_s * pages) if pages <= self.host.available else recompute_s

    def keep(self, evicted: Sequence_[Evicted], cost: StepCost, *, streams: bool) -> None:
        """Let the plan in the making copy pages that the prefix cache evicted to host memory, as far as that
        is worth it and there is time (rules 2 and 3). The oldest come first in `evicted`; `streams` says
        whether sequences run."""
        if not evicted or 2 * cost.page_s >= cost.chunk_s(0, self._pages.page_size):
            return
        most = self._copies_left(cost) if streams else len(evicted)
        for one in evicted[max(0, len(evicted) - most) :]:
            host_page = self.host.keep(one.identity, one.tenant)
            if host_page is not None:
                self._out[host_page] = one.page
                self.pages_out += 1
                self.has_copies = True

    def _copies_left(self, cost: StepCost) -> int:
        """The number of pages that the plan in the making may still copy beside streams, within `COPY_SHARE`
        of their gap (rule 3)."""
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
        is_cheaper = cost.page_s * count < cost.chunk_s(found_len * size, count * size)
        return list(identities[:count]) if is_cheaper else []

    def take(self, identities: Sequence_[PageIdentity]) -> Brought:
        """Take these pages out of host memory, which `kept` has found in this plan, before others move out
        and need room. `bring_in` must follow."""
        size, host_pages, fetched = self._pages.page_size, list[int](), 0
        for identity in identities:
            fetched += self.host.is_fetched(identity)
            host_page = self.host.take(identity)
            assert host_page is not None, "it has made room since it was found"
            host_pages.append(host_page)
        self._taken = len(host_pages)
        return Brought(host_pages, (len(host_pages) - fetched) * size, fetched * size)

    def bring_in(self, brought: Brought, fresh: Sequence_[int]) -> None:
        """Let the plan in the making copy these host pages to the first of `fresh`."""
        self.has_copies |= bool(brought.host_pages)
        self._in += zip(brought.host_pages, fresh, strict=False)
        self.pages_in += len(brought.host_pages)
        self._taken = 0

    def take_copies(self, step: int = 0) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The copies of the plan of this step, which is made now: those out as (device page, host page),
        those in as (host page, device page)."""
        out = [(page, host_page) for host_page, page in self._out.items()]
        back, self._in = self._in, []
        self._out, self.has_copies = {}, False
        self.host.plan_made(step, [*(host_page for _, host_page in out), *(host for host, _ in back)])
        return out, back
