"""Who holds which slot and which pages, and who gives them up for whom.

The rules A to I that are named here stand at the head of `engine.core.scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from engine.core import policy
from engine.core.block_manager import BlockManager, pages_for
from engine.core.config import SchedulerConfig
from engine.core.cost import CostLearner
from engine.core.messages import RunnerInfo, ServiceClass
from engine.core.sequence import Sequence, Status
from engine.core.step import Batch, InFlight
from engine.core.swap import Preference, Start, Swapper
from engine.core.tenants import Seats
from engine.core.waiting import WaitingRoom


class Room:
    """Slots and pages. Sequences enter by `seat`, and leave by `vacate`, `stall_paused`, or when they are
    preempted, for one that runs and grows (`grow`) or for one that enters (`displace`)."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: RunnerInfo,
        waiting: WaitingRoom,
        in_flight: Mapping[int, InFlight],
        learner: CostLearner,
        prefers_swap: Preference,
    ) -> None:
        self._config: Final = config
        self._runner: Final = runner
        self._waiting: Final = waiting
        self._in_flight: Final = in_flight
        self._learner: Final = learner
        self._watermark_pages = math.ceil(config.watermark * runner.pages)
        self._slots_free = list(reversed(range(runner.slots)))
        self._left: list[int] = []
        self._replaced: list[tuple[Sequence, int]] = []
        self._is_wanted = False
        self._may_yield_from = -math.inf
        self.seats: Final = Seats(runner.slots, runner.pages)
        """What those who run hold, by tenant."""
        self.pages: Final = BlockManager(runner.pages, runner.page_size)
        self.swapper: Final = Swapper(runner.host_pages, self.pages, config.step_time_target_s, prefers_swap)
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

    def take_replaced(self) -> list[tuple[int, int, int]]:
        """(slot, index, page): what changed within page tables since this was last asked."""
        replaced, self._replaced = self._replaced, []
        return [(s.slot, index, s.pages[index]) for s, index in replaced if s.slot is not None]

    # -- entering ---------------------------------------------------------------------------------

    def start(self, sequence: Sequence) -> Start:
        """What its page table would begin with, were it admitted now: its own pages when it was stalled,
        else what the prefix cache has of it, and what it keeps in host memory."""
        if sequence.status is Status.STALLED:
            return Start(sequence.pages, [], sequence.computed_len)
        return self.swapper.start(sequence, self._match(sequence))

    def _match(self, sequence: Sequence) -> list[int]:
        if not self._config.prefix_cache:
            return []
        pages_len = sequence.reusable_len // self._runner.page_size
        identities = sequence.chain.extend(sequence.tokens, pages_len)
        return self.pages.match(identities[:pages_len])

    def fits(self, sequence: Sequence, start: Start, victims: Collection[Sequence] = ()) -> bool:
        """Whether there is a slot, its known tokens fit now, and leave what those who run may need to
        grow: when these victims are preempted, and the stalled give way."""
        if not (self._slots_free or victims):
            return False
        known_pages = pages_for(len(sequence.tokens), self._runner.page_size)
        takes = known_pages - len(start.pages) + self.pages.unreferenced(start.pages)
        running = [other for other in self.running.values() if other not in victims]
        headroom = self._watermark_pages if running else 0
        everybody = [sequence, *running]
        if any(s.is_protected(self._config.preemptions_max) for s in everybody):  # rule C
            growth = sum(self._pages_max(s) - len(s.pages) for s in everybody)
            headroom = max(headroom, growth - (known_pages - len(sequence.pages)))
        lacking = takes + headroom - self.pages.available
        return lacking <= 0 or lacking <= len(self._reclaimable(victims) - set(start.pages))

    def _pages_max(self, sequence: Sequence) -> int:
        return pages_for(sequence.kv_len_max, self._runner.page_size)

    def may_displace(self, now: float) -> bool:
        """Whether somebody who waits may displace somebody who runs, as far as a look at classes and slots
        tells."""
        willing = self._waiting.willing
        highest = max((s.service_class for s in willing), default=min(ServiceClass))
        if any(s.service_class < highest for s in self.running.values()):
            return True  # rule G
        if now < self._may_yield_from:
            return False
        tenants = {sequence.tenant for sequence in willing}
        most = max((self.seats.share(t) for t, slots in self.seats.slots.items() if slots > 1), default=0.0)
        return any(self.seats.share(t, slots=1, pages=1) < most for t in tenants)  # rule J

    def displace(self, sequence: Sequence, start: Start, batch: Batch, now: float) -> bool:
        """Preempt some who run, so that this one fits: those of lower classes (rule G), else those of tenants
        that hold more than its own will (rule J). Nobody, when all of them would not be enough."""
        seated = {started.slot for started in batch.seated}
        lower = [
            other
            for slot, other in self.running.items()
            if other.service_class < sequence.service_class
            and not other.is_protected(self._config.preemptions_max)
            and slot not in seated
        ]
        if lower and self.fits(sequence, start, lower):
            ordered = policy.by_expendability(lower, self._restore_s, self.seats)
            return self._preempt_for(sequence, start, ordered, batch, now, yields=False)
        if now < self._may_yield_from:
            return False
        yielding = [s for s in policy.may_yield(self.running.values(), sequence) if s.slot not in seated]
        known_pages = pages_for(len(sequence.tokens), self._runner.page_size)
        will_hold = self.seats.share(sequence.tenant, slots=1, pages=known_pages)
        ordered = policy.by_expendability(yielding, self._restore_s, self.seats, above=will_hold)
        if ordered and self.fits(sequence, start, ordered):
            return self._preempt_for(sequence, start, ordered, batch, now, yields=True)
        return False

    def _preempt_for(
        self,
        sequence: Sequence,
        start: Start,
        ordered: list[Sequence],
        batch: Batch,
        now: float,
        *,
        yields: bool,
    ) -> bool:
        """The first of these, as many as are enough, once nothing is in flight."""
        if self._in_flight:
            self._is_wanted = True  # by this one (rule I)
            return False
        victims: list[Sequence] = []
        while not self.fits(sequence, start, victims):
            victims.append(ordered[len(victims)])
        for victim in victims.copy():  # the first are the least, and a later one may do alone
            fewer = [other for other in victims if other is not victim]
            if self.fits(sequence, start, fewer):
                victims = fewer
        if yields:
            self._may_yield_from = now + sum(map(self._restore_s, victims))
        for victim in victims:
            self._preempt(victim, batch, now, yields=yields)
        return True

    def seat(self, sequence: Sequence, start: Start, batch: Batch, now: float) -> None:
        """Admit one that fits."""
        self._waiting.admit(sequence)
        if sequence.status is not Status.STALLED:
            self.pages.acquire(start.pages)
        fresh = pages_for(len(sequence.tokens), self._runner.page_size) - len(start.pages)
        self._reclaim(fresh, batch, now)
        pages = start.pages + self.pages.allocate(fresh)
        if sequence.swapped is not None:
            self._bring_in(sequence, start, pages)
            batch.copied_pages = self.swapper.copied_pages
        slot = self._slots_free.pop()
        sequence.admit(slot, pages, start.computed_len, now)
        self.running[slot] = sequence
        self.seats.add(sequence.tenant, slots=1, pages=len(pages))

    def _bring_in(self, sequence: Sequence, start: Start, pages: list[int]) -> None:
        """Its plan copies what it has in host memory before anything is computed, so full pages can be found
        at once."""
        self.swapper.bring_in(sequence, start, pages[len(start.pages) :])
        if self._config.prefix_cache:
            for page in range(len(start.pages), start.computed_len // self._runner.page_size):
                self.pages.register(pages[page], sequence.chain.identities[page])

    # -- growing ----------------------------------------------------------------------------------

    def must_wait(self) -> bool:
        """Whether somebody who runs has to give way, which none does while anything is in flight (rule I)."""
        if not self._in_flight:
            self._is_wanted = False
            return False
        if self._is_wanted:
            return True
        if len(self.running) <= self.pages.available:
            return False
        lacking = len(self._crossing()) - self.pages.available
        return lacking > 0 and lacking > len(self._reclaimable())

    def _crossing(self) -> list[Sequence]:
        """Those whose next token needs a new page."""
        size = self._runner.page_size
        return [s for s in self.running.values() if s.planned_len == len(s.pages) * size and s.is_due]

    def grow(self, batch: Batch, now: float) -> None:
        """A page for every decode that crosses into a new one, as long as it need not give way."""
        for sequence in self._crossing():
            if sequence.status is not Status.RUNNING:
                continue  # it gave way to one before it
            if not self.pages.available:
                self._make_way(sequence, batch, now)
            if sequence.slot is not None:
                page = self.pages.allocate(1)
                sequence.pages += page
                self.seats.add(sequence.tenant, slots=0, pages=1)
                batch.grown[sequence.slot] = page

    def _make_way(self, needy: Sequence, batch: Batch, now: float) -> None:
        """Preempt so that a page is available; `needy` itself when it is the one to go."""
        if self._reclaimable():
            self._reclaim(1, batch, now)
            return
        running = self.running.values()
        victims = policy.choose_victims(running, 1, self._pages_freed, self._restore_s, self.seats)
        for victim in victims or [needy]:
            assert not victim.is_protected(self._config.preemptions_max), "rule C is broken"
            self._preempt(victim, batch, now)

    # -- giving way -------------------------------------------------------------------------------

    def _pages_freed(self, sequence: Sequence) -> int:
        return self.pages.unshared(sequence.pages)

    def _restore_s(self, sequence: Sequence) -> float:
        return self.swapper.restoration(sequence, self._learner.cost).least_s

    def _reclaimable(self, victims: Iterable[Sequence] = ()) -> set[int]:
        """Pages that become available when these victims and all stalled sequences give theirs back."""
        return self.pages.only_in([s.pages for s in (*self._waiting.stalled.values(), *victims)])

    def _reclaim(self, pages_needed: int, batch: Batch, now: float) -> None:
        """Let stalled sequences give their pages back until so many are available. They hold enough."""
        while self.pages.available < pages_needed:
            self._preempt(
                policy.choose_stalled(self._waiting.stalled.values(), self._pages_freed), batch, now
            )

    def _preempt(self, victim: Sequence, batch: Batch, now: float, *, yields: bool = False) -> None:
        """Take everything back from one that runs or is stalled, and what was planned for it. What it has
        computed may be copied to host memory first."""
        if victim.status is Status.RUNNING:
            assert not self._in_flight, "rule I is broken"
            batch.drop(self._leave_slot(victim), victim)
        else:
            self._waiting.leave(victim)
        swapped = self.swapper.take_out(victim, self._learner.cost)
        batch.copied_pages = self.swapper.copied_pages
        self.pages.release(victim.pages)
        victim.preempt(now, swapped, yields=yields)
        self._waiting.enter(victim)
        self.preemptions += 1

    # -- leaving ----------------------------------------------------------------------------------

    def stall_paused(self, now: float) -> None:
        """Whoever runs, is paused, and has nothing in flight, gives its slot back, and keeps its pages."""
        for sequence in [s for s in self.running.values() if s.is_paused and not s.in_flight_len]:
            self._leave_slot(sequence)
            sequence.stall(now)
            self._waiting.enter(sequence)

    def vacate(self, sequence: Sequence) -> None:
        """It ends: take back whatever it holds, wherever it is."""
        self.swapper.drop(sequence)
        self._release(sequence, sequence.pages)
        if sequence.status is Status.RUNNING:
            self._leave_slot(sequence)
        else:
            self._waiting.leave(sequence)

    def _release(self, sequence: Sequence, pages: list[int]) -> None:
        """Take these pages of its table back. Nobody gets them before the last step in flight that works on
        them is committed (rule H)."""
        last = self._in_flight.get(sequence.last_step)
        if last is None:
            self.pages.release(pages)
        else:
            last.tables.append(pages)

    def _leave_slot(self, sequence: Sequence) -> int:
        """Take a running sequence's slot back, and return it. It is fenced as pages are."""
        slot, last = sequence.slot, self._in_flight.get(sequence.last_step)
        assert slot is not None
        del self.running[slot]
        self.seats.add(sequence.tenant, slots=-1, pages=-len(sequence.pages))
        (self._slots_free if last is None else last.slots).append(slot)
        self._left.append(slot)
        return slot

    def merge(self, sequence: Sequence, index: int, page: int) -> None:
        """Its own page at this index holds what that page does: refer to that one, and give up its own,
        which a step in flight may still read."""
        self.pages.acquire([page])
        own, sequence.pages[index] = sequence.pages[index], page
        self._release(sequence, [own])
        self._replaced.append((sequence, index))

    def settle(self, landed: InFlight) -> None:
        """This step is committed: what it held back can be handed out again."""
        for table in landed.tables:
            self.pages.release(table)
        self._slots_free += landed.slots

    def check(self) -> None:
        """Assert law 1, and that everybody holds what its status says."""
        everybody = [*self._waiting, *self.running.values()]
        held = [table for flight in self._in_flight.values() for table in flight.tables]
        self.pages.check([*(sequence.pages for sequence in everybody if sequence.pages), *held])
        self.swapper.host.check([s.swapped.host_pages for s in everybody if s.swapped is not None])
        held_slots = [slot for flight in self._in_flight.values() for slot in flight.slots]
        slots = [*self._slots_free, *held_slots, *self.running]
        page_size, preemptions_max = self._runner.page_size, self._config.preemptions_max
        assert sorted(slots) == list(range(self._runner.slots)), "a slot is lost, or owned twice"
        for status, queue in self._waiting.queues.items():
            has_pages, is_swapped = status is Status.STALLED, status is Status.SWAPPED
            for sequence in queue.values():
                assert sequence.status is status
                assert sequence.slot is None
                assert bool(sequence.pages) == has_pages
                assert (sequence.swapped is not None) == is_swapped
                assert sequence.in_flight_len == sequence.coming == 0
        for slot, sequence in self.running.items():
            assert sequence.slot == slot
            assert sequence.status is Status.RUNNING
            assert sequence.swapped is None
        for sequence in everybody:
            planned_len = sequence.computed_len + sequence.in_flight_len
            assert len(sequence.tokens) + sequence.coming > planned_len, "it has nothing more to do"
            assert planned_len <= len(sequence.pages) * page_size
            assert sequence.preemptions - sequence.yields <= preemptions_max
        self.seats.check((sequence.tenant, len(sequence.pages)) for sequence in self.running.values())
