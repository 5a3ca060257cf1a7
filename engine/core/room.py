"""Who holds which slot and which pages, and who gives them up for whom.

The rules A to G that are named here stand at the head of `engine.core.scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

from engine.core import policy
from engine.core.block_manager import BlockManager, pages_for
from engine.core.config import SchedulerConfig
from engine.core.messages import RunnerInfo, ServiceClass
from engine.core.sequence import Sequence, Status
from engine.core.step import Batch
from engine.core.waiting import WaitingRoom


class Room:
    """Slots and pages. Sequences enter by `seat`, and leave by `vacate`, `stall_paused`, or when they are
    preempted, for one that runs and grows (`grow`) or for one that enters (`displace`)."""

    def __init__(self, config: SchedulerConfig, runner: RunnerInfo, waiting: WaitingRoom) -> None:
        self._config: Final = config
        self._runner: Final = runner
        self._waiting: Final = waiting
        self._watermark_pages = math.ceil(config.watermark * runner.pages)
        self._slots_free = list(reversed(range(runner.slots)))
        self._left: list[int] = []
        self.pages: Final = BlockManager(runner.pages, runner.page_size)
        self.running: Final[dict[int, Sequence]] = {}
        """By slot, in the order of admission."""
        self.preemptions = 0
        """So many, since the start."""

    @property
    def has_free_slot(self) -> bool:
        return bool(self._slots_free)

    def take_left(self) -> list[int]:
        """Slots vacated since this was last asked."""
        left, self._left = self._left, []
        return left

    # -- entering ---------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> list[int]:
        """Cached pages that `sequence` may start from."""
        if not self._config.prefix_cache:
            return []
        pages_len = sequence.reusable_len // self._runner.page_size
        identities = sequence.chain.extend(sequence.tokens, pages_len)
        return self.pages.match(identities[:pages_len])

    def uncached_len(self, sequence: Sequence, start: list[int]) -> int:
        """How many of its known tokens are to be computed when it starts from these pages."""
        return len(sequence.tokens) - len(start) * self._runner.page_size

    def fits(self, sequence: Sequence, start: list[int], victims: Collection[Sequence] = ()) -> bool:
        """Whether there is a slot, its known tokens fit now, and leave what those who run may need to
        grow: when these victims are preempted, and the stalled give way."""
        if not (self._slots_free or victims):
            return False
        known_pages = pages_for(len(sequence.tokens), self._runner.page_size)
        takes = known_pages - len(start) + self.pages.unreferenced(start)
        running = [other for other in self.running.values() if other not in victims]
        headroom = self._watermark_pages if running else 0
        everybody = [sequence, *running]
        if any(s.preemptions >= self._config.preemptions_max for s in everybody):  # rule C
            growth = sum(self._pages_max(s) - len(s.pages) for s in everybody)
            headroom = max(headroom, growth - (known_pages - len(sequence.pages)))
        lacking = takes + headroom - self.pages.available
        return lacking <= 0 or lacking <= len(self._reclaimable(victims) - set(start))

    def _pages_max(self, sequence: Sequence) -> int:
        return pages_for(sequence.kv_len_max, self._runner.page_size)

    def is_outranked(self) -> bool:
        """Whether somebody who waits is of a higher class than somebody who runs."""
        highest = max((s.service_class for s in self._waiting.willing), default=min(ServiceClass))
        return any(s.service_class < highest for s in self.running.values())

    def displace(self, sequence: Sequence, start: list[int], batch: Batch, now: float) -> bool:
        """Preempt some who run and are of lower classes, so that this one fits; nobody, when all of them
        would not be enough (rule G)."""
        seated = {started.slot for started in batch.seated}
        lower = [
            other
            for slot, other in self.running.items()
            if other.service_class < sequence.service_class
            and other.preemptions < self._config.preemptions_max
            and slot not in seated
        ]
        if not lower or not self.fits(sequence, start, lower):
            return False
        ordered = policy.by_expendability(lower, self._pages_freed)
        victims: list[Sequence] = []
        while not self.fits(sequence, start, victims):
            victims.append(ordered[len(victims)])
        for victim in victims.copy():  # the first are the least, and a later one may do alone
            fewer = [other for other in victims if other is not victim]
            if self.fits(sequence, start, fewer):
                victims = fewer
        for victim in victims:
            self._preempt(victim, batch, now)
        return True

    def seat(self, sequence: Sequence, start: list[int], batch: Batch, now: float) -> None:
        """Admit one that fits. Its table starts with these pages: its own when it was stalled, else the
        cache's."""
        size, is_stalled = self._runner.page_size, sequence.status is Status.STALLED
        computed_len = sequence.computed_len if is_stalled else len(start) * size
        self._waiting.admit(sequence)
        if not is_stalled:
            self.pages.acquire(start)
        fresh = pages_for(len(sequence.tokens), size) - len(start)
        self._reclaim(fresh, batch, now)
        pages = start + self.pages.allocate(fresh)
        slot = self._slots_free.pop()
        sequence.admit(slot, pages, computed_len, now)
        self.running[slot] = sequence

    # -- growing ----------------------------------------------------------------------------------

    def grow(self, batch: Batch, now: float) -> None:
        """A page for every decode that crosses into a new one, as long as it need not give way."""
        size = self._runner.page_size
        crossing = [s for s in self.running.values() if s.computed_len == len(s.pages) * size]
        for sequence in crossing:
            if sequence.status is not Status.RUNNING:
                continue  # it gave way to one before it
            if not self.pages.available:
                self._make_way(sequence, batch, now)
            if sequence.slot is not None:
                page = self.pages.allocate(1)
                sequence.pages += page
                batch.grown[sequence.slot] = page

    def _make_way(self, needy: Sequence, batch: Batch, now: float) -> None:
        """Preempt so that a page is available; `needy` itself when it is the one to go."""
        if self._reclaimable():
            self._reclaim(1, batch, now)
            return
        for victim in policy.choose_victims(self.running.values(), 1, self._pages_freed) or [needy]:
            assert victim.preemptions < self._config.preemptions_max, "rule C is broken"
            self._preempt(victim, batch, now)

    # -- giving way -------------------------------------------------------------------------------

    def _pages_freed(self, sequence: Sequence) -> int:
        return self.pages.unshared(sequence.pages)

    def _reclaimable(self, victims: Iterable[Sequence] = ()) -> set[int]:
        """Pages that become available when these victims and all stalled sequences give theirs back."""
        return self.pages.only_in([s.pages for s in (*self._waiting.stalled.values(), *victims)])

    def _reclaim(self, pages_needed: int, batch: Batch, now: float) -> None:
        """Let stalled sequences give their pages back until so many are available. They hold enough."""
        while self.pages.available < pages_needed:
            self._preempt(
                policy.choose_stalled(self._waiting.stalled.values(), self._pages_freed), batch, now
            )

    def _preempt(self, victim: Sequence, batch: Batch, now: float) -> None:
        """Take everything back from one that runs or is stalled, and what was planned for it."""
        if victim.status is Status.RUNNING:
            batch.drop(self._leave_slot(victim), victim)
        else:
            self._waiting.leave(victim)
        self.pages.release(victim.pages)
        victim.preempt(now)
        self._waiting.enter(victim)
        self.preemptions += 1

    # -- leaving ----------------------------------------------------------------------------------

    def stall_paused(self, now: float) -> None:
        """Whoever runs and is paused gives its slot back, and keeps its pages."""
        for sequence in [s for s in self.running.values() if s.is_paused]:
            self._leave_slot(sequence)
            sequence.stall(now)
            self._waiting.enter(sequence)

    def vacate(self, sequence: Sequence) -> None:
        """It ends: take back whatever it holds, wherever it is."""
        self.pages.release(sequence.pages)
        if sequence.status is Status.RUNNING:
            self._leave_slot(sequence)
        else:
            self._waiting.leave(sequence)

    def _leave_slot(self, sequence: Sequence) -> int:
        """Take a running sequence's slot back, and return it."""
        slot = sequence.slot
        assert slot is not None
        del self.running[slot]
        self._slots_free.append(slot)
        self._left.append(slot)
        return slot

    def check(self) -> None:
        """Assert law 1, and that everybody holds what its status says."""
        everybody = [*self._waiting, *self.running.values()]
        self.pages.check([sequence.pages for sequence in everybody])
        slots = [*self._slots_free, *self.running]
        assert sorted(slots) == list(range(self._runner.slots)), "a slot is lost, or owned twice"
        for status, queue in self._waiting.queues.items():
            for sequence in queue.values():
                assert sequence.status is status
                assert sequence.slot is None
                assert bool(sequence.pages) == (status is Status.STALLED)
        for slot, sequence in self.running.items():
            assert sequence.slot == slot
            assert sequence.status is Status.RUNNING
        for sequence in everybody:
            assert sequence.pending_len >= 1
            assert sequence.computed_len <= len(sequence.pages) * self._runner.page_size
            assert sequence.preemptions <= self._config.preemptions_max
