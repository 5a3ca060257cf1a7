"""The threads of the disk tier: one writes pages behind the core's back, one reads them ahead.

    core thread    write, read      -> bounded queues -> writer, reader: engine.core.pages.page_files
                   take_done        <- given back   <-

The core never waits for these threads, whatever the disk does. The first error that is not about a single
file (no space, no permission, a read-only file system) turns the tier off, with one line in the log: what is
still queued is given back untouched, and the engine goes on without a disk. The writer looks first at what
earlier runs left.

The threads are daemons: a disk that hangs does not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from engine.contract.messages import DiskCounts
from engine.core.pages.block_manager import PageIdentity
from engine.core.pages.page_files import PageFiles
from engine.core.pages.tiers import ReturnedPage
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock

WRITES_MAX: Final = 256
"""Pages that wait to be written."""
READS_MAX: Final = 4096
"""Pages that wait to be read."""
log = logs.get(__name__)

Job = tuple[PageIdentity, int]
NO_PAGE: Final = -1
"""In the place of a page: the file is to be removed."""


class DiskThreads:
    """Implements `engine.core.pages.tiers.PageDisk`."""

    def __init__(
        self, files: PageFiles, view: Callable[[int], memoryview], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`view` gives the bytes of a host page."""
        self._files: Final = files
        self._view: Final = view
        self._clock: Final = clock
        self._writes: Final[queue.Queue[Job]] = queue.Queue(WRITES_MAX)
        self._reads: Final[queue.Queue[Job]] = queue.Queue(READS_MAX)
        self._done: Final[deque[ReturnedPage]] = deque()  # bounded by the pages that are lent
        self._is_on = True
        self._written = self._dropped = self._read = self._missed = 0

    def start(self) -> None:
        """Look at the directory, and begin to work."""
        for work in (self._write_all, self._read_all):
            threading.Thread(target=work, name="penstock-disk", daemon=True).start()

    # -- the core's thread ------------------------------------------------------------------------

    def has(self, identity: PageIdentity) -> bool:
        return self._is_on and self._files.has(identity)

    def write(self, identity: PageIdentity, page: int) -> bool:
        """Implements `PageDisk`. Counts what is dropped."""
        is_taken = self._is_on and _put(self._writes, (identity, page))
        self._dropped += not is_taken
        return is_taken

    def read(self, identity: PageIdentity, page: int) -> bool:
        return self._is_on and _put(self._reads, (identity, page))

    def forget(self, identities: Iterable[PageIdentity]) -> None:
        """Implements `PageDisk`: they are not found from now on, and removed by the writer."""
        for identity in identities:
            if self._files.drop(identity):
                _put(self._writes, (identity, NO_PAGE))

    def take_done(self) -> list[ReturnedPage]:
        return [self._done.popleft() for _ in range(len(self._done))]

    def counts(self) -> DiskCounts:
        return DiskCounts(len(self._files), self._written, self._dropped, self._read, self._missed)

    # -- the other threads ------------------------------------------------------------------------

    def _write_all(self) -> None:
        self._guarded(self._scan)
        while True:
            self.write_next()

    def _scan(self) -> bool:
        self._files.scan()
        log.info("core.disk_tier_found", pages=len(self._files), others=self._files.others)
        return True

    def write_next(self) -> None:
        """Write the page that has waited for longest. Waits for one."""
        identity, page = self._writes.get()
        if page == NO_PAGE:
            self._guarded(lambda: self._files.remove(identity))
            return
        began_at = self._clock.monotonic()
        is_good = self._guarded(lambda: self._files.write(identity, self._view(page)))
        self._written += is_good
        self._done.append(ReturnedPage(page, identity, False, is_good, self._clock.monotonic() - began_at))

    def _read_all(self) -> None:
        while True:
            self.read_next()

    def read_next(self) -> None:
        """Read the page that has waited for longest. Waits for one."""
        identity, page = self._reads.get()
        began_at = self._clock.monotonic()
        is_good = self._guarded(lambda: self._files.read_into(identity, self._view(page)))
        self._read += is_good
        self._missed += not is_good
        self._done.append(ReturnedPage(page, identity, True, is_good, self._clock.monotonic() - began_at))

    def _guarded(self, work: Callable[[], bool]) -> bool:
        """The result of `work`. False once the tier is off, and when this error turns it off."""
        if not self._is_on:
            return False
        try:
            return work()
        except Exception as error:  # whatever it is, no step may miss its page because of it
            self._is_on = False
            log.warning("core.disk_tier_off", reason=f"{type(error).__name__}: {error}")
            return False


def _put(jobs: queue.Queue[Job], job: Job) -> bool:
    try:
        jobs.put_nowait(job)
    except queue.Full:
        return False
    return True
