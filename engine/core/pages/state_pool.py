"""Snapshots of sequences' states, by number: which place holds which, and which one makes room.

A model with states (`engine.runtime.step.states`) goes on from a prefix only where it has the prefix's pages
and the state behind them. So states are copied out of slots at the ends of pages, each to a *place*; the
runner owns the tensors. At any moment each place is exactly one of

    free       it holds nothing
    kept       a state, under the identity of the page that ends where it was taken
    coming     the copy is planned, and its page is not computed yet (`engine.core.step.flight`)
    leaving    it is kept no more, and a plan in the making copies from it: free once that plan is made

Rules

1. The four sets are disjoint, and every place is in one of them.
2. A state is kept no longer than the prefix cache finds its page: without the page it is of no use.
3. Which of the kept ones makes room `engine.core.pages.cached_pages` says, as for pages: who floods the pool
   loses its own, and what is kept for a session's next turn goes last. Time is counted in places that were
   handed out.
4. What a plan in the making copies from makes no room in that plan: its copies out of slots are first.

There is one pool, which lies where the slots' states do: on a GPU in its own memory, on a CPU in host memory,
where a tier behind it would be the same memory under another name. So no page of such a model is kept in a
GPU's host memory or on disk, either, where no state would lie behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from engine.core.pages.block_manager import PageIdentity
from engine.core.pages.cached_pages import CachedPages


class StatePool:
    """The places of snapshots. Every call takes O(places it names)."""

    def __init__(self, places: int) -> None:
        self.total: Final = places
        self._free = list(reversed(range(places)))
        self._kept: dict[PageIdentity, int] = {}
        self._identity: dict[int, PageIdentity] = {}
        self._tenant = [""] * places
        """Whose prefix each place had last."""
        self._droppable = CachedPages(places)
        """The kept places that no plan in the making copies from."""
        self._read: set[int] = set()
        """The places that a plan in the making copies from, kept or leaving."""
        self._handed_out = 0
        self.evicted = 0
        """States that made room for others, since the start."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def kept(self) -> int:
        return len(self._kept)

    def has(self, identity: PageIdentity) -> bool:
        return identity in self._kept

    def known_len(self, identities: Sequence[PageIdentity]) -> int:
        """The most of these pages, from the first on, behind which a state is kept."""
        for count in range(len(identities), 0, -1):
            if identities[count - 1] in self._kept:
                return count
        return 0

    def take(self, tenant: str, now_s: float) -> int | None:
        """A place for a state of this tenant, `coming` from now on; None where there is no room."""
        if self._free:
            place = self._free.pop()
        elif self._droppable.tenants:
            (place,) = self._droppable.pop(1, self._handed_out, now_s)
            del self._kept[self._identity.pop(place)]
            self.evicted += 1
        else:
            return None
        self._handed_out += 1
        self._tenant[place] = tenant
        return place

    def keep(self, place: int, identity: PageIdentity) -> None:
        """Keep what comes to this place under an identity, unless another has it."""
        if identity in self._kept:
            self._free.append(place)
            return
        self._kept[identity] = place
        self._identity[place] = identity
        self._droppable.add((place,), self._tenant[place], self._handed_out)

    def give_back(self, place: int) -> None:
        """Free a place whose state is not kept."""
        self._free.append(place)

    def use(self, identity: PageIdentity) -> None:
        """Note that a kept state is of use: of its tenant's, it is dropped last."""
        if (place := self._kept[identity]) not in self._read:
            self._droppable.discard((place,))
            self._droppable.add((place,), self._tenant[place], self._handed_out)

    def keep_until(self, identity: PageIdentity, deadline_s: float) -> None:
        """Keep a state for a session's next turn, as its pages are, if it is there."""
        place = self._kept.get(identity)
        if place is not None and place not in self._read:
            self._droppable.discard((place,))
            self._droppable.keep((place,), self._tenant[place], self._handed_out, deadline_s)

    def read(self, identity: PageIdentity) -> int:
        """The place of a kept state, which the plan in the making copies from (rule 4)."""
        place = self._kept[identity]
        self._droppable.discard((place,))
        self._read.add(place)
        return place

    def plan_made(self) -> None:
        """Note that no plan in the making copies from any place."""
        for place in self._read:
            if place in self._identity:
                self._droppable.add((place,), self._tenant[place], self._handed_out)
            else:
                self._free.append(place)
        self._read.clear()

    def drop(self, identities: Iterable[PageIdentity]) -> None:
        """Keep these no more, where they are kept: their pages are gone, or cannot be trusted."""
        for identity in identities:
            place = self._kept.pop(identity, None)
            if place is None:
                continue
            del self._identity[place]
            if place not in self._read:
                self._droppable.discard((place,))
                self._free.append(place)
