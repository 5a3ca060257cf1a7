"""The pages of the KV cache, and the prefix cache: which sequences hold each page, and which prefix it
contains.

A page holds the keys and values of `page_size` consecutive tokens of one sequence. The runner owns
the tensors; here a page is only its number. At any moment each page is exactly one of

    free      no sequence refers to it, and it has no identity
    cached    no sequence refers to it, but it has the identity of a prefix that may be asked for again, or a
              head
    owned     in the page tables of one or more living sequences (its references)

              allocate                       release, without identity
      free ------------> owned  (refs >= 1) ---------------------------> free
                         |   ^
    release, with identity   | acquire (a prefix hit)
                         v   |
                         cached ----------------> owned, by another one
                                       allocate, when no page is free: an old one loses its identity

Picture of two sequences with a common prompt of two pages, and of one that has finished:

    table of A   [ 7 | 3 | 9 ]          page   0 1 2 3 4 5 6 7 8 9
    table of B   [ 7 | 3 | 4 ]          refs   0 0 0 2 1 0 0 2 0 1
    C is gone      5   8                       . . . o o c . o c o     . free  c cached  o owned
                   ^---^-- cached as parent and child: 8, the tail, is evicted before 5

Rules

1. `free + cached + owned == total`, and a page's reference count is the number of tables it is in.
2. Only a *full* page whose tokens are all computed gets an identity; such a page is never written
   again, so it may be shared. The page that a sequence is filling belongs to that sequence alone.
3. An identity is SHA-256 over (the parent page's identity, the page's tokens); the first page's
   parent is derived from the salt. So equal identities mean equal prefixes from position 0 under
   equal salts, and no client can forge a collision to read another's prefix.
4. Pages are released tail first, and those of a tenant are evicted in the order of their release: a prefix
   loses its end before its beginning, because a page is of use only with all its ancestors. Which tenant's
   page is evicted, `engine.core.pages.cached_pages` says. A page that has a head alone, which none has copied
   since its release, goes before all full ones: heads take no room from prefixes.
5. The first tokens of a page that do not fill it are its *head*. A head may be found as a page is, by an
   identity of the same kind, as soon as it is computed. It is never shared, since its owner writes behind it:
   who finds it copies it into a page of its own (a fork: `engine.core.step.allocator`, rule K).
6. Two sequences may compute the same page at the same time. The first to finish it gives it its
   identity; the other's stays without one until its end, and is free then.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import takewhile
from typing import Final, NamedTuple, NewType

from engine.core.pages.cached_pages import CachedPages

PageIdentity = NewType("PageIdentity", bytes)


def pages_for(tokens_len: int, page_size: int) -> int:
    """The number of pages that so many tokens take."""
    return -(-tokens_len // page_size)


class PageChain:
    """The identities of one sequence's full pages, each computed once, in order, when first needed.

    Sequences with the same prompt may each have a `branch` of one chain: then those of the prompt's pages are
    computed once for all of them.
    """

    __slots__ = ("_last", "_page_size", "_root", "_trunk", "_trunk_len", "identities")

    def __init__(self, salt: bytes, page_size: int) -> None:
        self._root = hashlib.sha256(b"penstock prefix\0" + salt).digest()
        self._page_size = page_size
        self._trunk: PageChain | None = None
        self._trunk_len = 0  # pages
        self._last: tuple[int, PageIdentity | None] = (0, None)  # the last answer of `identity`, by its end
        self.identities: list[PageIdentity] = []

    def branch(self, tokens_len: int) -> PageChain:
        """A chain that has the first `tokens_len` tokens in common with this one."""
        branch = copy(self)
        branch._trunk, branch._trunk_len, branch.identities = self, tokens_len // self._page_size, []
        return branch

    def extend(self, tokens: array[int], pages_len: int) -> list[PageIdentity]:
        """The identities of at least the first `pages_len` pages of `tokens`, which must be full.

        The tokens of pages that were hashed before must not have changed since.
        """
        identities, size = self.identities, self._page_size
        assert pages_len * size <= len(tokens)
        if self._trunk is not None and len(identities) < (shared_len := min(pages_len, self._trunk_len)):
            identities += self._trunk.extend(tokens, shared_len)[len(identities) : shared_len]
        parent = identities[-1] if identities else self._root
        packed, page_len = tokens[len(identities) * size : pages_len * size].tobytes(), size * tokens.itemsize
        for at in range(0, len(packed), page_len):
            parent = PageIdentity(hashlib.sha256(parent + packed[at : at + page_len]).digest())
            identities.append(parent)
        return identities

    def identity(self, tokens: array[int], end: int) -> PageIdentity | None:
        """The identity of the full page or the head in which the first `end` of `tokens` end; None for 0."""
        if end and self._last[0] != end:
            full, rest = divmod(end, self._page_size)
            parent = self.extend(tokens, full)[full - 1] if full else self._root
            self._last = end, _identity(parent, tokens[end - rest : end]) if rest else PageIdentity(parent)
        return self._last[1] if end else None


def _identity(parent: bytes, tokens: array[int]) -> PageIdentity:
    return PageIdentity(hashlib.sha256(parent + tokens.tobytes()).digest())


class Evicted(NamedTuple):
    """A full page that is the prefix cache's no more, and what it was."""

    page: int
    identity: PageIdentity
    tenant: str


class BlockManager:
    """Hands out pages, takes them back, and finds prefixes again. Every call takes O(pages it names)."""

    def __init__(
        self, pages: int, page_size: int, *, tells_evicted: bool = False, shares_heads: bool = True
    ) -> None:
        """`tells_evicted`: keep note of what is evicted, for `take_evicted`. `shares_heads`: whether heads
        are of use (rule 5)."""
        assert pages >= 1
        assert page_size >= 1
        self.total: Final = pages
        self.page_size: Final = page_size
        self.shares_heads: Final = shares_heads
        self._free = list(reversed(range(pages)))  # a stack: the page released last is still warm
        self.cached_pages: Final = CachedPages(pages)
        self._tenant = [""] * pages  # whose sequence each page was handed to last
        self._handed_out = 0  # pages, since the start: the time by which cached ones age
        self._cached_heads: OrderedDict[int, None] = OrderedDict()  # evicted before these
        self._refs = [0] * pages
        self._identity: list[PageIdentity | None] = [None] * pages
        self._by_identity: dict[PageIdentity, int] = {}  # of full pages and of heads
        self._heads: dict[int, list[PageIdentity]] = {}  # by page
        self._tells_evicted = tells_evicted
        self._evicted: list[Evicted] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self.cached_pages.tenants) + len(self._cached_heads)

    @property
    def owned(self) -> int:
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + self.cached

    def match(self, identities: Sequence[PageIdentity]) -> list[int]:
        """The pages that hold the longest known prefix of the chain. Takes no reference: `acquire` them
        before the next `allocate`, which may evict them."""
        pages = []
        for identity in identities:
            page = self._by_identity.get(identity)
            if page is None:
                break
            pages.append(page)
        return pages

    def find(self, identity: PageIdentity) -> int | None:
        """The page that has this identity, or this head. Takes no reference: `spare` it before the next
        `allocate`."""
        return self._by_identity.get(identity)

    def spare(self, page: int) -> None:
        """Let `allocate` take this page only after all others, if it is cached: a sequence that was preempted
        since it was found may have named the same head, and then it is free."""
        is_found = self._identity[page] is not None or page in self._heads
        if is_found and not self._refs[page] and page not in self.cached_pages.kept:
            self._cached_heads.pop(page, None)
            self.cached_pages.discard((page,))
            self.cached_pages.add((page,), self._tenant[page], self._handed_out)

    def unreferenced(self, pages: Iterable[int]) -> int:
        """The number of these pages that `acquire` would take out of `available`."""
        return sum(self._refs[page] == 0 for page in pages)

    def unshared(self, pages: Iterable[int]) -> int:
        """The number of these pages that `release` would make available."""
        return sum(self._refs[page] == 1 for page in pages)

    def leading_shared(self, pages: Iterable[int]) -> int:
        """The number of leading pages of a table that other tables contain, too."""
        return sum(1 for _ in takewhile(lambda page: self._refs[page] > 1, pages))

    def only_in(self, tables: Iterable[Iterable[int]]) -> set[int]:
        """The pages that are in no table but these: releasing all of these tables would make them
        available."""
        held = Counter(page for table in tables for page in table)
        return {page for page, count in held.items() if self._refs[page] == count}

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a reference to pages that `match` found."""
        self.cached_pages.discard(pages)
        for page in pages:
            assert self._identity[page] is not None, "only a page with an identity can be shared"
            self._refs[page] += 1

    def allocate(self, count: int, tenant: str = "", now_s: float = 0.0) -> list[int]:
        """Take `count` pages for a tenant with one reference each, evicting cached ones when none is free.
        `now_s` is the time of the clock that the deadlines of kept pages are on.

        The caller has made sure that so many are available.
        """
        assert 0 <= count <= self.available
        pages = [self._free.pop() for _ in range(min(count, len(self._free)))]
        pages += self._evict(count - len(pages), now_s)
        for page in pages:
            self._refs[page] = 1
            self._tenant[page] = tenant
        self._handed_out += count
        return pages

    def _evict(self, count: int, now_s: float) -> list[int]:
        """Take `count` cached pages, of which nothing is found any more, in rule 4's order: heads first, then
        by rent and age."""
        heads = min(count, len(self._cached_heads))
        pages = [self._cached_heads.popitem(last=False)[0] for _ in range(heads)]
        pages += self.cached_pages.pop(count - heads, self._handed_out, now_s)
        for page in pages:
            identity = self._identity[page]
            assert identity is not None or page in self._heads
            if self._tells_evicted and identity is not None:
                self._evicted.append(Evicted(page, identity, self._tenant[page]))
            self._forget(page)
        return pages

    def take_evicted(self) -> list[Evicted]:
        """The full pages that `allocate` took out of the cache since the last call; the oldest first. What
        they hold is there until the next plan writes to them."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def register(self, page: int, identity: PageIdentity) -> None:
        """Give a page that is full and computed its identity, so that `match` finds it, unless another has it
        (rule 6)."""
        assert self._refs[page] >= 1
        assert self._identity[page] is None
        if self._by_identity.setdefault(identity, page) == page:
            self._identity[page] = identity

    def register_head(self, page: int, head: PageIdentity) -> None:
        """Let `find` find a computed head in this page, unless a page that is owned has it already."""
        assert self._refs[page] >= 1
        before = self._by_identity.get(head, page)
        if before == page or not self._refs[before]:
            self._forget_head(before, head)
            self._by_identity[head] = page
            self._heads.setdefault(page, []).append(head)

    def release(self, pages: Sequence[int], keep_until_s: float = 0.0) -> None:
        """Drop one reference to each page of a table, the tail first (rule 4). Until `keep_until_s`, where it
        is given, full ones are kept as `engine.core.pages.cached_pages` says."""
        cached = []
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, "a page was released twice"
            if self._refs[page] > 0:
                continue
            if self._identity[page] is not None:
                cached.append(page)
            elif page in self._heads:
                self._cached_heads[page] = None
            else:
                self._free.append(page)
        if not cached:
            return
        tenant = self._tenant[cached[0]]  # all pages of a table are of one
        if keep_until_s:
            self.cached_pages.keep(cached, tenant, self._handed_out, keep_until_s)
        else:
            self.cached_pages.add(cached, tenant, self._handed_out)

    def forget(self, pages: Iterable[int]) -> None:
        """Take the identities of these pages, whose contents are not to be trusted: no new sequence finds
        them. References stay."""
        for page in pages:
            assert self._refs[page] >= 1
            self._forget(page)

    def _forget(self, page: int) -> None:
        identity = self._identity[page]
        if identity is not None:
            del self._by_identity[identity]
            self._identity[page] = None
        for head in self._heads.pop(page, ()):
            del self._by_identity[head]

    def _forget_head(self, page: int, head: PageIdentity) -> None:
        """Take a head from a page, if it has it. A cached page that nothing else can find becomes free."""
        heads = self._heads.get(page, [])
        if head not in heads:
            return
        heads.remove(head)
        del self._by_identity[head]
        if not heads:
            del self._heads[page]
        if not (heads or self._refs[page] or self._identity[page]):
            self.cached_pages.discard((page,))
            self._cached_heads.pop(page, None)
            self._free.append(page)
