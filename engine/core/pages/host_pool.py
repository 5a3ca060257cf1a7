"""Pages of host memory, by number, which keep the prefixes that the device lost.

The runner owns the tensors. At any moment each page is exactly one of

    free       it holds nothing
    kept       the copy of a page that the prefix cache evicted, with its identity
    leaving    a plan in the making copies from it: free once that plan is made
    lent       another thread reads it or writes it, and it is nobody's otherwise (`engine.core.pages.tiers`)

              keep             take
      free ----------> kept ---------> leaving ----> free, or lent while a thread still reads it
                        |  keep
                        '--------> kept: the oldest makes room

Rules

1. The four sets are disjoint, and every page is in one of them.
2. Which of the kept ones makes room `engine.core.pages.cached_pages` says, as on the device: a tenant whose
   prompts never come again loses its own. Time is counted in pages that were handed out here.
3. A page that a plan copies from is *leaving*: it is free from the next plan on. Otherwise something that
   moves out in the same plan might be copied onto it first.
4. A kept page that a thread reads (`lend`) stays where it is until the thread is done: it is neither dropped
   nor overwritten, and counts as used when it is done. The caller bounds how many these are.
5. A device makes the copies of a plan some time after its launch. So a thread gets no page to write that a
   step in flight copies from or to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from engine.core.pages.block_manager import PageIdentity
from engine.core.pages.cached_pages import CachedPages

IN_THE_MAKING: Final = 1 << 62


class HostPool:
    """The states of the pages of host memory. Every call takes O(pages it names)."""

    def __init__(self, pages: int) -> None:
        self.total: Final = pages
        self._free = list(reversed(range(pages)))
        self._leaving: list[int] = []
        self._kept: dict[PageIdentity, int] = {}
        self._identity: dict[int, PageIdentity] = {}
        self._tenant = [""] * pages
        """Whose prefix each page had last."""
        self._droppable = CachedPages()
        """The kept pages that no thread reads."""
        self._handed_out = 0
        self._fetched: set[int] = set()
        """Kept pages that a thread wrote."""
        self._lent: set[int] = set()
        """Pages that a thread reads or writes: kept ones, and the ones that are nobody's otherwise."""
        self._touched: dict[int, int] = {}
        """Pages that a step in flight copies from or to, with the number of the newest such step, and those
        that the plan in the making copies to (`IN_THE_MAKING`)."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def kept(self) -> int:
        """Pages with prefixes that the device lost."""
        return len(self._kept)

    @property
    def available(self) -> int:
        """Pages that `keep` could use now."""
        return len(self._free) + len(self._droppable.tenants)

    # -- plans ------------------------------------------------------------------------------------

    def plan_made(self, step: int = 0, touched: Iterable[int] = ()) -> None:
        """Free the leaving pages, which nothing copies from any more (rule 3). The plan of this step copies
        from or to the pages `touched`."""
        self._free += [page for page in self._leaving if page not in self._lent]
        self._leaving.clear()
        self._touched.update(dict.fromkeys(touched, step))

    def landed(self, step: int, copied: Iterable[int]) -> list[tuple[PageIdentity, int]]:
        """Note that a step is committed, which had `copied` pages here. Returns those of them that are kept
        and complete: no later plan copies to them."""
        complete = [
            (self._identity[page], page)
            for page in copied
            if self._touched.get(page) == step and page in self._identity
        ]
        self._touched = {page: newest for page, newest in self._touched.items() if newest != step}
        return complete

    # -- kept prefixes ----------------------------------------------------------------------------

    def find(self, identities: Sequence[PageIdentity]) -> int:
        """The number of leading identities that are kept here. Their pages become the newest."""
        count = 0
        for identity in identities:
            if identity not in self._kept:
                break
            count += 1
        for identity in reversed(identities[:count]):  # the head goes last: it is of use without its tail
            self._use(self._kept[identity])
        return count

    def keep(self, identity: PageIdentity, tenant: str = "") -> int | None:
        """The page that the plan in the making is to copy a page of this tenant with this identity to, which
        is kept from now on. None when it was kept before, or when there is no room."""
        if identity in self._kept:
            self._use(self._kept[identity])
            return None
        if not self.available:
            return None
        page = self._hand_out()
        self._set_kept(page, identity, tenant)
        self._touched[page] = IN_THE_MAKING
        return page

    def take(self, identity: PageIdentity) -> int | None:
        """Let the plan in the making copy this identity's page to the device: it is kept no more, and free
        after the plan. None when it is not kept."""
        page = self._remove(identity)
        if page is not None:
            self._leaving.append(page)
        return page

    def is_fetched(self, identity: PageIdentity) -> bool:
        """True if a thread wrote the page that keeps this identity."""
        return self._kept.get(identity) in self._fetched

    def forget(self, identities: Iterable[PageIdentity]) -> None:
        """Drop kept pages whose contents are not to be trusted."""
        for identity in identities:
            page = self._remove(identity)
            if page is not None and page not in self._lent:
                self._free.append(page)

    def _set_kept(self, page: int, identity: PageIdentity, tenant: str) -> None:
        self._kept[identity] = page
        self._identity[page] = identity
        self._tenant[page] = tenant
        self._droppable.add((page,), tenant, self._handed_out)

    def _use(self, page: int) -> None:
        """Note that a kept page is of use: of its tenant's, it is dropped last."""
        if page not in self._lent:
            self._droppable.discard((page,))
            self._droppable.add((page,), self._tenant[page], self._handed_out)

    def _remove(self, identity: PageIdentity) -> int | None:
        page = self._kept.pop(identity, None)
        if page is not None:
            del self._identity[page]
            self._droppable.discard((page,))
            self._fetched.discard(page)
        return page

    def _hand_out(self) -> int:
        """A page that is free now, or was kept; the caller knows that there is one."""
        self._handed_out += 1
        if self._free:
            return self._free.pop()
        (page,) = self._droppable.pop(1, self._handed_out)
        self._remove(self._identity[page])
        return page

    # -- pages in another thread's hands ----------------------------------------------------------

    def may_lend(self, identity: PageIdentity, page: int) -> bool:
        """True if this page keeps this identity, and neither a thread nor a step in flight has it."""
        return self._kept.get(identity) == page and page not in self._lent and page not in self._touched

    def lend(self, page: int) -> None:
        """Note that a thread reads a kept page, which stays until then (rule 4)."""
        assert page in self._identity
        assert page not in self._lent
        self._droppable.discard((page,))
        self._lent.add(page)

    def lend_empty(self) -> int | None:
        """A page for a thread to write, dropping a kept one when none is free; None when neither is there, or
        the one that would be dropped is in use by a step in flight (rule 5)."""
        for at in range(len(self._free) - 1, -1, -1):
            if self._free[at] not in self._touched:
                page = self._free.pop(at)
                break
        else:
            if not self._droppable.tenants or self._droppable.first(self._handed_out) in self._touched:
                return None
            page = self._hand_out()
        self._lent.add(page)
        return page

    def give_back(self, page: int, identity: PageIdentity | None = None, tenant: str = "") -> None:
        """Note that the thread is done with a page. One that it wrote is kept with this `identity` for its
        tenant; one that nobody keeps any more is free."""
        self._lent.remove(page)
        if page in self._identity:
            self._use(page)
        elif page in self._leaving:
            return
        elif identity is None or identity in self._kept:
            self._free.append(page)
        else:
            self._set_kept(page, identity, tenant)
            self._fetched.add(page)
