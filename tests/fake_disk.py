"""A disk without files, as slow as a world's random numbers make it, that copies what the fake runner's host
pages hold."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable

from engine.contract.messages import DiskCounts
from engine.core.pages.block_manager import PageIdentity
from engine.core.pages.tiers import ReturnedPage
from tests.fake_runner import FakeRunner

QUEUE_MAX = 8


class FakeDisk:
    """Implements `engine.core.pages.tiers.PageDisk`. Each page is copied at a random moment while it is
    lent."""

    def __init__(self, rng: random.Random, runner: Callable[[], FakeRunner], *, damage: float = 0.1) -> None:
        self._rng = rng
        self._runner = runner
        self._damage = damage
        self.files: dict[PageIdentity, array[int]] = {}
        self.jobs: list[tuple[PageIdentity, int, bool]] = []
        self.hangs = False
        self._counts = [0, 0]

    def has(self, identity: PageIdentity) -> bool:
        return identity in self.files

    def write(self, identity: PageIdentity, page: int) -> bool:
        return self._put(identity, page, is_read=False)

    def read(self, identity: PageIdentity, page: int) -> bool:
        return self._put(identity, page, is_read=True)

    def _put(self, identity: PageIdentity, page: int, *, is_read: bool) -> bool:
        if len(self.jobs) >= QUEUE_MAX:
            return False
        self.jobs.append((identity, page, is_read))
        return True

    def forget(self, identities: Iterable[PageIdentity]) -> None:
        for identity in identities:
            self.files.pop(identity, None)

    def take_done(self) -> list[ReturnedPage]:
        done = []
        while self.jobs and not self.hangs and self._rng.random() < 0.6:
            identity, page, is_read = self.jobs.pop(0)
            is_good = self._read(identity, page) if is_read else self._write(identity, page)
            self._counts[is_read] += is_good
            done.append(ReturnedPage(page, identity, is_read, is_good, 0.0))
        return done

    def _write(self, identity: PageIdentity, page: int) -> bool:
        held = self._runner().host_page(page)
        assert self.files.setdefault(identity, held) == held, "one identity, two contents"
        return True

    def _read(self, identity: PageIdentity, page: int) -> bool:
        runner = self._runner()
        if identity not in self.files or self._rng.random() < self._damage:
            self.files.pop(identity, None)
            runner.set_host_page(page, array("q", [-1] * runner.info.page_size))
            return False
        runner.set_host_page(page, self.files[identity])
        return True

    def counts(self) -> DiskCounts:
        return DiskCounts(len(self.files), self._counts[0], 0, self._counts[1], 0)
