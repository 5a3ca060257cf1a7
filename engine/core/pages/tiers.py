"""The disk tier, as the core sees it: which pages go to disk, which come back, and how long a newcomer waits.

    device  --evicted, by copy-->  host memory  --written behind-->  disk
    device  <--with the plan-----  host memory  <--read ahead------  disk

Input and output are done by other threads (`engine.core.pages.disk`). This side never waits for them: it
lends them pages of host memory, and takes these back when they are done (`engine.core.pages.host_pool`, rules
4 and 5).

Rules

1. A page is written once the step that copied it to host memory is committed. At most one host page in
   `WRITING_PART` is lent to be written at once. Others wait, `DUE_MAX` at most, and not for long: once they
   are kept no more, they are not written. So a disk that is slow or hangs costs pages on disk, and nothing
   else.
2. When a sequence comes whose prefix goes on there, the pages are read at once, as far as one host page in
   `READING_PART` suffices, and if reading them takes less than computing them by what reads took lately.
3. It waits for them no longer than computing them would take. When that passes, nothing more is read until
   the disk answers again.
4. What cannot be trusted is forgotten in every tier, and once more when a thread that has it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from engine.contract.messages import DiskCounts
from engine.core.estimate.cost import StepCost
from engine.core.pages.block_manager import PageIdentity
from engine.core.pages.host_pool import HostPool

WRITING_PART: Final = 8
DUE_MAX: Final = 1024
READING_PART: Final = 4
NEW_WEIGHT: Final = 0.2
"""The weight of a new reading in the mean time of a read."""
RETRY: Final = 0.9
"""The factor by which the mean time of a read shrinks when it kept a prefix from being read: a disk that was
slow is tried again."""


@dataclass(frozen=True, slots=True)
class ReturnedPage:
    """A page that a thread gives back."""

    page: int
    identity: PageIdentity
    is_read: bool
    """True if it was read from disk, False if it was written there."""
    is_good: bool
    seconds: float
    """The time that it took."""


class PageDisk(Protocol):
    """Pages on disk. No call waits for input or output."""

    def has(self, identity: PageIdentity) -> bool: ...

    def write(self, identity: PageIdentity, page: int) -> bool:
        """Write this host page, which is lent until it comes back as a `ReturnedPage`. False when too many
        wait."""
        ...

    def read(self, identity: PageIdentity, page: int) -> bool:
        """Read to this host page, which is lent until it comes back as a `ReturnedPage`. False when too many
        wait."""
        ...

    def forget(self, identities: Iterable[PageIdentity]) -> None: ...

    def take_done(self) -> list[ReturnedPage]:
        """The pages that are given back since the last call."""
        ...

    def counts(self) -> DiskCounts: ...


class DiskLink:
    """The core's side of the disk tier; without a disk, nothing happens."""

    def __init__(self, host: HostPool, disk: PageDisk | None = None) -> None:
        self._host: Final = host
        self._disk: Final = disk
        self.is_there: Final = disk is not None
        self._writing: dict[int, PageIdentity] = {}
        self._due: deque[tuple[PageIdentity, int]] = deque()
        self._reading: dict[PageIdentity, str] = {}
        """The tenant that each page is read for."""
        self._forgotten: set[PageIdentity] = set()
        """Identities of pages that a thread has, and that are not to be trusted."""
        self._read_s = 0.0
        self._is_stuck = False
        self._dropped = 0

    def landed(self, step: int, host_pages: Iterable[int]) -> None:
        """Note that a step is committed that copied pages to these host pages, and write what is kept of
        them, which is complete only now (rule 1)."""
        complete = self._host.landed(step, host_pages)
        if self._disk is None:
            return
        for identity, page in complete:
            if len(self._due) < DUE_MAX:
                self._due.append((identity, page))
            else:
                self._dropped += 1
        self._write_due(self._disk)

    def _write_due(self, disk: PageDisk) -> None:
        """Write pages that wait for it and are still kept, as far as rule 1 lets: so many at a time."""
        while self._due and len(self._writing) < max(1, self._host.total // WRITING_PART):
            identity, page = self._due.popleft()
            if disk.has(identity) or not self._host.may_lend(identity, page):
                continue
            if not disk.write(identity, page):
                return
            self._host.lend(page)
            self._writing[page] = identity

    def fetch(
        self,
        behind: Sequence[PageIdentity],
        position: int,
        page_size: int,
        cost: StepCost,
        tenant: str = "",
    ) -> int:
        """Read the first of these pages, which are behind `position`, for a tenant. Returns how many are
        coming."""
        if self._disk is None or self._is_stuck:
            return 0
        room, count = self._host.total // READING_PART - len(self._reading), 0
        for identity in behind:
            if identity not in self._reading:
                if not (room and self._disk.has(identity)):
                    break
                room -= 1
            count += 1
        if not count:  # nothing is refused, so nothing is to be tried again
            return 0
        if count * (self._read_s + cost.page_s) >= cost.chunk_s(position, count * page_size):
            self._read_s *= RETRY
            return 0
        for at, identity in enumerate(behind[:count]):
            if identity not in self._reading and not self._read(identity, tenant):
                return at
        return count

    def _read(self, identity: PageIdentity, tenant: str) -> bool:
        assert self._disk is not None
        page = self._host.lend_empty()
        if page is None:
            return False
        if not self._disk.read(identity, page):
            self._host.give_back(page)
            return False
        self._reading[identity] = tenant
        return True

    def is_coming(self, identity: PageIdentity) -> bool:
        """True if a page is being read."""
        return identity in self._reading

    def is_late(self) -> None:
        """Note that somebody waited in vain: nothing is read until the disk answers (rule 3)."""
        self._is_stuck = True

    def take_done(self) -> None:
        """Take back the pages that threads are done with."""
        if self._disk is None:
            return
        for done in self._disk.take_done():
            is_trusted = done.identity not in self._forgotten
            if done.is_read:
                self._is_stuck = False
                if done.is_good or done.seconds > self._read_s:  # a file that is gone is missed at once
                    self._read_s += NEW_WEIGHT * (done.seconds - self._read_s)
                tenant = self._reading.pop(done.identity)
                identity = done.identity if done.is_good and is_trusted else None
                self._host.give_back(done.page, identity, tenant)
            else:
                del self._writing[done.page]
                self._host.give_back(done.page)
            if not is_trusted:
                self._forgotten.discard(done.identity)
                self._disk.forget([done.identity])
        self._write_due(self._disk)

    def forget(self, identities: Sequence[PageIdentity]) -> None:
        """Forget pages whose contents are not to be trusted, in host memory and on disk (rule 4: in every
        tier)."""
        self._host.forget(identities)
        if self._disk is not None:
            self._forgotten |= set(identities) & {*self._writing.values(), *self._reading}
            self._disk.forget(identities)

    def counts(self) -> DiskCounts:
        """The disk's counts, with what was dropped before it came to it."""
        counts = DiskCounts() if self._disk is None else self._disk.counts()
        return DiskCounts(
            counts.files, counts.written, counts.dropped + self._dropped, counts.read, counts.missed
        )
