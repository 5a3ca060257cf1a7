"""The pages of the prefix cache that no sequence refers to, and which of them are evicted next: those on the
device, and those that host memory keeps.

Theory. A cache in the order of last use alone belongs to whoever asks for the most: a tenant whose prompts
never come again takes every other tenant's prefixes within one turn of the cache. To give each tenant a part
of its own instead keeps pages for those that are away. So what counts is the *rent* of a tenant's pages: how
many they are, times how long its oldest one has not been used. The tenant whose rent is highest loses its
oldest pages. Who floods the cache has the most, and loses its own; who left has the oldest, and loses them in
time, the sooner the more they are. Time is counted in pages that were handed out, so an idle cache does not
age.

Rules:

1. Of one tenant, the page that was released first is evicted first. Where there is one tenant alone, that is
   all.
2. In the long run rents are level: a tenant with a tenth of another's pages keeps each of them ten times as
   long.
3. Tenants are kept by the magnitude of their counts (a power of two), those of one magnitude in the order of
   their oldest pages. Only the first of each magnitude is looked at, and once for pages that it released
   together, as long as its magnitude stays. So a choice takes O(log N) steps, and whoever loses a page pays
   at least a quarter of the highest rent.
4. A page that is likely to be asked for within seconds may be *kept* until a deadline. No kept page is
   evicted while there is another; then it is the one that was released first. In its tenant's rent it is
   counted like any other, but not as the oldest: who keeps pays with its other pages, and sooner.
5. Half of the cache may be kept pages, in equal parts for the tenants that have any. So whatever tenants ask
   to keep, the other half is shared by rents as ever. What is more than its tenant's part when it is released
   is not kept, from the tail of its prefix on. When they are too many, since one more tenant has its part,
   those that were released first are kept no more.
6. A page that is kept no more is as old as its release. Kept pages wait in the order of theirs, and only the
   first is looked at, whenever pages are evicted. So there are no timers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

STALE_MAX: Final = 64
"""Entries of tenants that have moved on, for each magnitude, that are not worth cleaning away."""


@dataclass(slots=True)
class _Queues:
    """One tenant's pages that are not kept, in two queues in the order of release, each with its time."""

    released: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """The pages that were never kept since their release."""
    let_go: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """The pages that were kept since, and let go."""

    def __len__(self) -> int:
        return len(self.released) + len(self.let_go)

    @property
    def oldest(self) -> OrderedDict[int, int]:
        """The queue whose first page is the oldest of both; there must be one."""
        if not (self.released and self.let_go):
            return self.released or self.let_go
        return min(self.released, self.let_go, key=_time_of_first)


def _time_of_first(queue: OrderedDict[int, int]) -> int:
    return next(iter(queue.values()))


class CachedPages:
    """Each page is here once. A call takes O(pages it names), and O(log N) for each choice of a tenant."""

    def __init__(self, total: int = 0) -> None:
        """`total`: the pages of the whole cache, of which tenants have their parts. 0: none is kept."""
        self._total: Final = total
        self._of: Final[dict[str, _Queues]] = {}
        """The pages of each tenant that has any, but for the kept ones."""
        self.kept: Final[OrderedDict[int, tuple[int, float]]] = OrderedDict()
        """The times and deadlines of the kept pages, in the order of release. Those with deadlines that have
        passed are there until pages are evicted."""
        self._kept_of: Final[Counter[str]] = Counter()
        """The number of each tenant's kept pages."""
        self.tenants: Final[dict[int, str]] = {}
        """The tenant of each page, kept or not."""
        self._ranked: Final[dict[str, tuple[int, int]]] = {}
        """The magnitude of each tenant's count, and the time of its oldest page that is not kept, if there is
        one."""
        self._magnitudes: Final[list[list[tuple[int, str]]]] = []
        """For each magnitude a heap of times and tenants. Those that are not in `_ranked` are stale."""
        self.kept_found = 0
        """Kept pages that were asked for again, since the start."""
        self.kept_evicted = 0
        """Kept pages that were evicted before their deadlines, since the start."""

    def add(self, pages: Iterable[int], tenant: str, now: int) -> None:
        """Take pages of a tenant that were released now, those to be evicted first at the front. `now` never
        goes back."""
        own = self._of.get(tenant)
        if own is None:
            own = self._of[tenant] = _Queues()
        for page in pages:
            own.released[page] = now
            self.tenants[page] = tenant
        self._rank(tenant, own)

    def keep(self, pages: Sequence[int], tenant: str, now: int, deadline_s: float) -> None:
        """Take pages as `add` does, and keep the last of them, as many as rule 5 lets, until the deadline."""
        tenants = len(self._kept_of) + (tenant not in self._kept_of)
        first = max(0, len(pages) - max(0, self._part(tenants) - self._kept_of[tenant]))
        kept = dict.fromkeys(pages[first:], (now, deadline_s))
        self.kept.update(kept)
        self.tenants.update(dict.fromkeys(kept, tenant))
        self._kept_of[tenant] += len(kept)
        self.add(pages[:first], tenant, now)

    def _part(self, tenants: int) -> int:
        """The most pages that are kept for each of so many tenants (rule 5)."""
        return self._total // (2 * tenants)

    def discard(self, pages: Iterable[int]) -> None:
        """Take away those of the pages that are here, which were asked for again."""
        tenants = set()
        for page in pages:
            tenant = self.tenants.pop(page, None)
            if tenant is None:
                continue
            tenants.add(tenant)
            if self.kept.pop(page, None) is not None:
                self._kept_of[tenant] -= 1
                self.kept_found += 1
            elif self._of[tenant].released.pop(page, None) is None:
                del self._of[tenant].let_go[page]
        for tenant in tenants:
            self._rank(tenant, self._of[tenant])

    def first(self, now: int) -> int:
        """The page that is evicted next; there must be one, and none is kept."""
        return next(iter(self._of[self._highest(now)].oldest))

    def pop(self, count: int, now: int, now_s: float = 0.0) -> list[int]:
        """Take away the `count` pages that are evicted next; there must be as many. `now_s` is the time of
        the clock that deadlines are on."""
        if self.kept:
            self._let_go(now_s)
        pages: list[int] = []
        while len(pages) < count:
            if not self._ranked:
                pages.append(self._pop_kept())
                continue
            tenant = self._highest(now)
            own, (magnitude, since) = self._of[tenant], self._ranked[tenant]
            most, oldest = len(own) + self._kept_of[tenant] + 1 - (1 << magnitude), own.oldest
            for _ in range(min(count - len(pages), len(oldest), most)):
                page, at = oldest.popitem(last=False)
                if at != since:
                    oldest[page] = at
                    oldest.move_to_end(page, last=False)
                    break
                del self.tenants[page]
                pages.append(page)
            self._rank(tenant, own)
        return pages

    def _let_go(self, now_s: float) -> None:
        """Keep pages no longer whose deadlines have passed, or which have become too many (rule 5)."""
        most, tenants = self._part(1), set[str]()
        while self.kept:
            page, (time, deadline_s) = next(iter(self.kept.items()))
            tenant = self.tenants[page]
            if deadline_s > now_s and len(self.kept) <= most:
                break
            del self.kept[page]
            self._kept_of[tenant] -= 1
            self._of[tenant].let_go[page] = time
            tenants.add(tenant)
        for tenant in tenants:
            self._rank(tenant, self._of[tenant])

    def _pop_kept(self) -> int:
        """Take away the kept page that was released first."""
        page, _ = self.kept.popitem(last=False)
        tenant = self.tenants.pop(page)
        self._kept_of[tenant] -= 1
        self.kept_evicted += 1
        self._rank(tenant, self._of[tenant])
        return page

    def _highest(self, now: int) -> str:
        """The tenant that pays: of the first of each magnitude, the one with the highest rent (rule 3)."""
        highest, rent = "", -1
        for magnitude, heap in enumerate(self._magnitudes):
            while heap and self._ranked.get(heap[0][1]) != (magnitude, heap[0][0]):
                heappop(heap)
            if heap:
                since, tenant = heap[0]
                of_this = (len(self._of[tenant]) + self._kept_of[tenant]) * (now - since + 1)
                if of_this > rent:
                    highest, rent = tenant, of_this
        return highest

    def _rank(self, tenant: str, own: _Queues) -> None:
        """Note a change of a tenant's pages."""
        kept = self._kept_of[tenant]
        if not kept:
            del self._kept_of[tenant]
        if not own:
            self._ranked.pop(tenant, None)
            if not kept:
                del self._of[tenant]
            return
        magnitude, since = (len(own) + kept).bit_length() - 1, _time_of_first(own.oldest)
        if self._ranked.get(tenant) == (magnitude, since):
            return
        self._ranked[tenant] = magnitude, since
        while len(self._magnitudes) <= magnitude:
            self._magnitudes.append([])
        heap = self._magnitudes[magnitude]
        heappush(heap, (since, tenant))
        if len(heap) > 2 * len(self._of) + STALE_MAX:
            heap[:] = sorted((since, name) for name, (of, since) in self._ranked.items() if of == magnitude)
