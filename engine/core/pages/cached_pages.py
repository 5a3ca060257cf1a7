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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Final

STALE_MAX: Final = 64
"""Entries of tenants that have moved on, for each magnitude, that are not worth cleaning away."""


class CachedPages:
    """Each page is here once. A call takes O(pages it names), and O(log N) for each choice of a tenant."""

    def __init__(self) -> None:
        self._of: Final[dict[str, OrderedDict[int, int]]] = {}
        """The pages of each tenant that has any, in the order of release, with the time of each."""
        self._tenants: Final[dict[int, str]] = {}
        """The tenant of each page."""
        self._ranked: Final[dict[str, tuple[int, int]]] = {}
        """The magnitude of each tenant's count, and the time of its oldest page."""
        self._magnitudes: Final[list[list[tuple[int, str]]]] = []
        """For each magnitude a heap of times and tenants. Those that are not in `_ranked` are stale."""

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tenants)

    def add(self, pages: Iterable[int], tenant: str, now: int) -> None:
        """Take pages of a tenant that were released now, those to be evicted first at the front. `now` never
        goes back."""
        own = self._of.get(tenant)
        if own is None:
            own = self._of[tenant] = OrderedDict()
        for page in pages:
            own[page] = now
            self._tenants[page] = tenant
        self._rank(tenant, own)

    def discard(self, pages: Iterable[int]) -> None:
        """Take away those of the pages that are here."""
        tenants = set()
        for page in pages:
            tenant = self._tenants.pop(page, None)
            if tenant is not None:
                del self._of[tenant][page]
                tenants.add(tenant)
        for tenant in tenants:
            self._rank(tenant, self._of[tenant])

    def first(self, now: int) -> int:
        """The page that is evicted next; there must be one."""
        return next(iter(self._of[self._highest(now)]))

    def pop(self, count: int, now: int) -> list[int]:
        """Take away the `count` pages that are evicted next; there must be as many."""
        pages: list[int] = []
        while len(pages) < count:
            tenant = self._highest(now)
            own, (magnitude, since) = self._of[tenant], self._ranked[tenant]
            most = min(count - len(pages), len(own) + 1 - (1 << magnitude))
            for _ in range(most):
                page, at = own.popitem(last=False)
                if at != since:
                    own[page] = at
                    own.move_to_end(page, last=False)
                    break
                del self._tenants[page]
                pages.append(page)
            self._rank(tenant, own)
        return pages

    def _highest(self, now: int) -> str:
        """The tenant that pays: of the first of each magnitude, the one with the highest rent (rule 3)."""
        highest, rent = "", -1
        for magnitude, heap in enumerate(self._magnitudes):
            while heap and self._ranked.get(heap[0][1]) != (magnitude, heap[0][0]):
                heappop(heap)
            if heap:
                since, tenant = heap[0]
                of_this = len(self._of[tenant]) * (now - since + 1)
                if of_this > rent:
                    highest, rent = tenant, of_this
        return highest

    def _rank(self, tenant: str, own: OrderedDict[int, int]) -> None:
        """Note a change of a tenant's pages."""
        if not own:
            del self._of[tenant]
            self._ranked.pop(tenant, None)
            return
        magnitude, since = len(own).bit_length() - 1, next(iter(own.values()))
        if self._ranked.get(tenant) == (magnitude, since):
            return
        self._ranked[tenant] = magnitude, since
        while len(self._magnitudes) <= magnitude:
            self._magnitudes.append([])
        heap = self._magnitudes[magnitude]
        heappush(heap, (since, tenant))
        if len(heap) > 2 * len(self._of) + STALE_MAX:
            heap[:] = sorted((since, name) for name, (of, since) in self._ranked.items() if of == magnitude)
