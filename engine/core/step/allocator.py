"""Admission, preemption, and between them growth: which sequence holds which slots and pages, and which
sequence gives them up for which.

A sequence holds a slot while it runs, and pages while it runs, is stalled or has yielded. It gets them when
it is admitted (`admit`), gets a page more whenever its decode needs one (`grow`), and loses them when it is
preempted, for one that runs and grows or for one that is admitted (`preempt_for`), or when it ends
(`release`). It loses the slot alone when it stalls (`stall_paused`) or yields (`_step_aside`). Which sequence
is preempted is chosen in `engine.core.step.victims`, with the rules G, by class, and J, by tenants' shares.
It releases its pages into the prefix cache, and finds there what is left of them when it is admitted again;
what others took meanwhile may be in host memory (`engine.core.step.host_tier`).

A. Pages for all known tokens are taken at admission, so only decodes grow, one page at a time. A new sequence
   is admitted into a free slot when the whole uncached part fits into the available pages, with a watermark
   to spare. Pages of sequences without a slot (those that stalled or yielded) count as available, and are
   taken when no others are left.
C. A sequence that was preempted `preemptions_max` times is *protected*: from its next admission on, none is
   admitted unless all that run, itself included, can grow to their ends, into pages that are available or
   that sequences without a slot hold. So none is preempted while it runs, and no sequence is preempted more
   than `preemptions_max` times while it runs, apart from yields to tenants that hold less (rule J).
E. A paused sequence is in no plan. What was in flight when the pause came still counts. It harms no other:
   its slot is released at the next plan at which nothing of it is in flight, since admitting it again costs
   no computation; its pages are released when others lack them, before any running sequence is preempted.
   This is not counted against rule C's bound on preemptions, since its reader caused it: each pause costs it
   its pages once at most.
F. A stalled sequence that is resumed needs a slot, and is admitted as others are (first in rank), except that
   it brings its pages along. So rule C holds for it, too: protected ones are waited for.
I. No running sequence is preempted while a step is in flight: its pages would be free only later, and until
   then every plan would find too few and take more. When one has to be, no plan is made, the step in flight
   is committed, and the next plan is made as if steps had never overlapped. So rules C and G, the bound
   on preemptions and their order by class, hold as they stand, and rows in flight can only be late (rule H)
   for a sequence that has ended, never for one that goes on.
K. What a sequence lacks of its prompt's last page may be the head of a page that another fills, or filled.
   Then it is *forked*: the plan that admits the sequence copies the head into a page of its own. So the
   choices of one prompt compute its last token alone for themselves, and a prompt that comes again does.
   The same plan may evict the source, as it makes its copies before it writes anything; but it is the last to
   be taken, for the choices that come after.
L. Where the model keeps a state by slot (`RunnerInfo.state_bytes`), pages are of use up to a snapshot of the
   state behind them (`engine.core.step.state_tier`): a prefix is found as far as it has both. So a sequence
   that loses its slot gives its pages to the prefix cache at once, and what came behind its last snapshot is
   computed again when it is admitted: what stalls is preempted as if others lacked its pages, which each
   pause costs it once at most (rule E), and what yields as if they did (rule J, which lets time pass for it).
   No head is forked, since no state belongs to one (rule K): the choices of one prompt go on from its last
   snapshot. A sequence whose prompt's vector is asked for gives up its pages with its slot, too, as what is
   gathered for the vector is lost with that; and neither takes it a prefix nor leaves one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from engine.contract.messages import Move, Moved, RunnerInfo, ServiceClass
from engine.contract.records import Lack
from engine.core.estimate.cost import CostLearner
from engine.core.pages.block_manager import BlockManager, PageIdentity, pages_for
from engine.core.pages.tiers import DiskLink, PageDisk
from engine.core.queue.tenants import TenantHoldings
from engine.core.queue.waiting import WaitingQueue
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence, Status
from engine.core.step.flight import InFlight
from engine.core.step.host_tier import Brought, HostTier, Prefix
from engine.core.step.plan_builder import PlanBuilder
from engine.core.step.state_tier import StateTier
from engine.core.step.victims import (
    YIELDS_AHEAD_S,
    by_expendability,
    choose_victims,
    choose_waiting,
    may_yield,
)


class Allocator:
    """Gives slots and pages to sequences, and takes them back."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: RunnerInfo,
        waiting: WaitingQueue,
        in_flight: Mapping[int, InFlight],
        learner: CostLearner,
        disk: PageDisk | None = None,
    ) -> None:
        """`in_flight` has the steps in flight, by step number; it belongs to the scheduler, which changes
        it."""
        self._config: Final = config
        self._runner: Final = runner
        self._waiting: Final = waiting
        self._in_flight: Final = in_flight
        self._learner: Final = learner
        self._watermark_pages = math.ceil(config.watermark * runner.pages)
        self._slots_free = list(reversed(range(runner.slots)))
        self._left: list[int] = []
        self._moved: list[Moved] = []
        self._forked: list[tuple[int, int, int]] = []
        self._preemption_awaits_commit = False
        self._may_yield_from = -math.inf
        self.holdings: Final = TenantHoldings(runner.slots, runner.pages)
        self._keeps: Final = runner.host_pages > 0 and config.prefix_cache
        """True if host memory keeps what the prefix cache evicts."""
        self._has_states: Final = runner.state_bytes > 0
        self.pages: Final = BlockManager(
            runner.pages,
            runner.page_size,
            tells_evicted=self._keeps or self._has_states,
            shares_heads=not self._has_states,
        )
        self.states: Final = StateTier.of(runner, config, self.pages)
        """The snapshots of a model that has states; None: there are none."""
        gap_target_s = config.gap_targets_s[ServiceClass.DEFAULT]
        self.host_tier: Final = HostTier(runner.host_pages, self.pages, gap_target_s)
        self.disk: Final = DiskLink(self.host_tier.host, disk if self._keeps else None)
        self.running: Final[dict[int, Sequence]] = {}
        """The running sequences by slot, in the order of admission."""
        self.preemptions = 0
        """How often a sequence gave up pages, or its slot alone, since the start."""
        self.yields = 0
        """How often it was the slot alone."""
        self.copied_back = 0
        """How often one was admitted again with pages from host memory."""
        self.lack = Lack.NOTHING
        """The want of the first sequence that did not fit into the plan that is made."""

    @property
    def has_free_slot(self) -> bool:
        return bool(self._slots_free)

    @property
    def holders(self) -> int:
        """The number of sequences that hold pages."""
        queues = self._waiting.queues
        return len(self.running) + len(queues[Status.STALLED]) + len(queues[Status.YIELDED])

    def take_left(self) -> list[int]:
        """The slots that were left since the last call."""
        left, self._left = self._left, []
        return left

    def take_forked(self) -> list[tuple[int, int, int]]:
        """The copies of heads since the last call, as (source, page, length)."""
        forked, self._forked = self._forked, []
        return forked

    def take_moved(self) -> list[Moved]:
        """The preemptions and readmissions since the last call."""
        moved, self._moved = self._moved, []
        return moved

    # -- admission --------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The part of a waiting sequence that need not be computed if it is admitted now: that in its own
        pages when it kept them, else that in the prefix cache and in host memory."""
        if sequence.pages:
            return Prefix(sequence.pages, sequence.computed_len)
        if not self._config.prefix_cache or sequence.is_pooled:
            return Prefix([], 0)
        size, chain, end = self._runner.page_size, sequence.chain, sequence.reusable_len
        identities = chain.extend(sequence.tokens, end // size)[: end // size]
        found, kept = self.pages.match(identities), list[PageIdentity]()
        if self.states is not None:
            known = self.states.pool.known_len(identities[: len(found)])
            state = identities[known - 1] if known else None
            return Prefix(found[:known], known * size, state=state, branch_len=len(found) * size)
        if self._keeps and self.host_tier.host.kept and len(found) < len(identities):
            behind, cost = identities[len(found) :], self._learner.cost
            kept = self.host_tier.kept(len(found), behind, cost, streams=bool(self.running))
        known = len(found) + len(kept)
        head = chain.identity(sequence.tokens, end) if known == len(identities) and end % size else None
        source = None if head is None else self.pages.find(head)
        return Prefix(found, known * size if source is None else end, kept, source)

    def lacks_prompt(self, sequence: Sequence) -> bool:
        """True if no other could take all of this sequence's prompt now, but for its last token."""
        if self.states is not None:
            return not sequence.is_pooled and self.states.lacks_prompt(sequence, self._learner.cost)
        identity = sequence.prompt_identity
        return self._config.prefix_cache and identity is not None and self.pages.find(identity) is None

    def fetch(self, sequence: Sequence) -> tuple[int, float]:
        """Read the pages behind a newcomer's prefix from disk, where that is cheaper. Returns the number of
        tokens that are coming, for which it waits, and the time that computing them takes."""
        if not self._keeps or sequence.is_pooled:
            return 0, 0.0
        size = self._runner.page_size
        pages_len = sequence.reusable_len // size
        identities = sequence.chain.extend(sequence.tokens, pages_len)[:pages_len]
        known = len(self.pages.match(identities))
        known += self.host_tier.host.find(identities[known:])
        cost = self._learner.cost
        coming = self.disk.fetch(identities[known:], known * size, size, cost, sequence.tenant)
        if coming:
            sequence.awaits = identities[known + coming - 1]
        return coming * size, cost.chunk_s(known * size, coming * size)

    def fits(self, sequence: Sequence, prefix: Prefix, victims: Collection[Sequence] = ()) -> bool:
        """True if `sequence` could be admitted once `victims` and all that wait with pages are preempted.

        It needs a slot, pages for all its known tokens, and beside running sequences the watermark as well;
        with a protected sequence it needs the pages that all of them may need to grow to their ends (rule C:
        those are not preempted).
        """
        if not (self._slots_free or victims):
            self.lack = self.lack or Lack.SLOTS
            return False
        known_pages = pages_for(len(sequence.tokens), self._runner.page_size)
        takes = known_pages - len(prefix.pages) + self.pages.unreferenced(prefix.pages)
        running = [other for other in self.running.values() if other not in victims]
        headroom = self._watermark_pages if running else 0
        together = [sequence, *running]
        if any(s.is_protected(self._config.preemptions_max) for s in together):  # rule C
            growth = sum(self._pages_max(s) - len(s.pages) for s in together)
            headroom = max(headroom, growth - (known_pages - len(sequence.pages)))
        lacking = takes + headroom - self.pages.available
        if lacking <= 0 or lacking <= len(self._reclaimable(victims) - set(prefix.pages)):
            return True
        self.lack = self.lack or Lack.PAGES
        return False

    def _pages_max(self, sequence: Sequence) -> int:
        return pages_for(sequence.kv_len_max, self._runner.page_size)

    def may_preempt(self, now: float) -> bool:
        """True if any waiting sequence could preempt a running one, as far as classes, slots and shares tell
        without looking at each pair."""
        waiting = self._waiting.due
        highest = max((s.service_class for s in waiting), default=min(ServiceClass))
        if any(s.service_class < highest for s in self.running.values()):
            return True  # a lower class gives way: rule G
        if now + YIELDS_AHEAD_S < self._may_yield_from:
            return False
        most, tenants = self.holdings.most, {sequence.tenant for sequence in waiting}
        return any(self.holdings.share(t, slots=1, pages=1) < most for t in tenants)  # rule J

    def preempt_for(self, sequence: Sequence, prefix: Prefix, builder: PlanBuilder, now: float) -> bool:
        """Preempt running sequences so that a waiting one fits: those of lower classes (rule G), else those
        of tenants that hold more than its own will (rule J). Returns whether it fits now; when all of them
        would not be enough, none is preempted."""
        seated = {started.slot for started in builder.seated}
        lower = [
            other
            for slot, other in self.running.items()
            if other.service_class < sequence.service_class
            and not other.is_protected(self._config.preemptions_max)
            and slot not in seated
        ]
        if lower and self.fits(sequence, prefix, lower):
            ordered = by_expendability(lower, self._restore_s, self.holdings)
            return self._preempt_enough(sequence, prefix, ordered, builder, now, yields=False)
        if now + YIELDS_AHEAD_S < self._may_yield_from:
            return False
        known_pages = pages_for(len(sequence.tokens), self._runner.page_size)
        will_hold = self.holdings.share(sequence.tenant, slots=1, pages=known_pages)
        if will_hold >= self.holdings.most:  # as for nearly all of a crowd
            return False
        yielding = [s for s in may_yield(self.running.values(), sequence) if s.slot not in seated]
        ordered = by_expendability(yielding, self._restore_s, self.holdings, above=will_hold)
        if ordered and self.fits(sequence, prefix, ordered):
            return self._preempt_enough(sequence, prefix, ordered, builder, now, yields=True)
        return False

    def _preempt_enough(
        self,
        sequence: Sequence,
        prefix: Prefix,
        ordered: list[Sequence],
        builder: PlanBuilder,
        now: float,
        *,
        yields: bool,
    ) -> bool:
        """Preempt as many of `ordered`, from the first on, as `sequence` needs. While a step is in flight
        none is preempted, and the result is False (rule I: pages would be free only later)."""
        if self._in_flight:
            self._preemption_awaits_commit = True
            return False
        chosen: list[Sequence] = []
        while not self.fits(sequence, prefix, chosen):
            chosen.append(ordered[len(chosen)])
        for victim in chosen.copy():  # a later one may be enough without those before it
            fewer = [other for other in chosen if other is not victim]
            if self.fits(sequence, prefix, fewer):
                chosen = fewer
        self._hold(prefix)
        for victim in chosen:
            if yields:
                self._step_aside(victim, builder, now)
            else:
                self._preempt(victim, builder, now, Move.PREEMPTED_CLASS)
        return True

    def _hold(self, prefix: Prefix) -> None:
        """Let no other state take the place of the one that a sequence goes on from."""
        if prefix.state is not None:
            assert self.states is not None
            self.states.pool.read(prefix.state)

    def admit(self, sequence: Sequence, prefix: Prefix, builder: PlanBuilder, now: float) -> Brought:
        """Give a slot and pages to a waiting sequence that fits. Returns what comes out of host memory."""
        self._waiting.admit(sequence)
        is_new = sequence.status is Status.WAITING
        if not is_new:
            self._moved.append(Moved(sequence.handle, Move.READMITTED, bool(prefix.kept)))
            self.copied_back += bool(prefix.kept)
        self._hold(prefix)
        if not sequence.pages:
            self.pages.acquire(prefix.pages)
        brought = self.host_tier.take(prefix.kept)
        fresh = pages_for(len(sequence.tokens), self._runner.page_size) - len(prefix.pages)
        self._reclaim(fresh, builder, now)
        if prefix.source is not None:
            self.pages.spare(prefix.source)
        pages = prefix.pages + self._allocate(fresh, sequence.tenant, now)
        self._bring_in(sequence, brought, pages, len(prefix.pages))
        if prefix.source is not None:
            index, length = divmod(prefix.computed_len, self._runner.page_size)
            self._forked.append((prefix.source, pages[index], length))
        builder.copied_pages = self.host_tier.copied_pages
        slot = self._slots_free.pop()
        sequence.admit(slot, pages, prefix.computed_len, now)
        if self.states is not None:
            sequence.branch_len = prefix.branch_len
            if is_new:
                self.states.stateless_tokens += prefix.branch_len - prefix.computed_len
            if prefix.state is not None:
                self.states.restore(prefix.state, slot)
            builder.copied_pages = self.states.copies
        self.running[slot] = sequence
        self.holdings.add(sequence.tenant, slots=1, pages=len(pages))
        return brought

    def _allocate(self, count: int, tenant: str, now: float) -> list[int]:
        """Pages for a tenant. Host memory keeps what the prefix cache evicts for them, where that is on."""
        pages = self.pages.allocate(count, tenant, now)
        if evicted := self.pages.take_evicted():
            if self.states is not None:
                self.states.pool.drop([page.identity for page in evicted])
                return pages
            self.host_tier.keep(evicted, self._learner.cost, streams=bool(self.running))
        return pages

    def _bring_in(self, sequence: Sequence, brought: Brought, pages: list[int], found: int) -> None:
        """Copy what comes out of host memory to its new pages, which are behind the first `found`. The plan
        makes its copies before it computes anything, so the prefix cache may find the full ones at once."""
        self.host_tier.bring_in(brought, pages[found:])
        for index in range(found, found + len(brought.host_pages)):
            self.pages.register(pages[index], sequence.chain.identities[index])

    # -- growth -----------------------------------------------------------------------------------

    def must_wait(self) -> bool:
        """True if a running sequence has to be preempted, and cannot be before the step in flight is
        committed (rule I: none is preempted meanwhile)."""
        if not self._in_flight:
            self._preemption_awaits_commit = False
            return False
        if self._preemption_awaits_commit:
            return True
        if len(self.running) <= self.pages.available:
            return False
        lacking = len(self._needing_page()) - self.pages.available
        return lacking > 0 and lacking > len(self._reclaimable())

    def _needing_page(self) -> list[Sequence]:
        """The running sequences whose next token needs a new page."""
        size = self._runner.page_size
        return [s for s in self.running.values() if s.planned_len == len(s.pages) * size and s.hold is None]

    def grow(self, builder: PlanBuilder, now: float) -> None:
        """Give a page to every sequence whose next token needs one, preempting others where none is
        available. First their states are saved, where snapshots are due."""
        if self.states is not None:
            self.states.save_due(self.running.values(), self._in_flight, now)
        for sequence in self._needing_page():
            if sequence.status is not Status.RUNNING:
                continue  # it was preempted for one before it
            if not self.pages.available:
                self._free_page_for(sequence, builder, now)
            if sequence.slot is not None:
                page = self._allocate(1, sequence.tenant, now)
                sequence.pages += page
                self.holdings.add(sequence.tenant, slots=0, pages=1)
                builder.grown[sequence.slot] = page
        if self.host_tier.has_copies:
            builder.copied_pages = self.host_tier.copied_pages
        if self.states is not None:
            builder.copied_pages = self.states.copies

    def grow_for_drafts(self, sequence: Sequence, drafts: int, builder: PlanBuilder, now: float) -> int:
        """Give a sequence that decodes pages for drafts, as far as others do not lack them. Returns the
        number of drafts for which it has pages."""
        size, slot = self._runner.page_size, sequence.slot
        assert slot is not None
        lacking = pages_for(sequence.planned_len + 1 + drafts, size) - len(sequence.pages)
        spare = self.pages.available - self._watermark_pages - len(self.running)
        if (given := min(lacking, spare)) > 0:
            pages = self._allocate(given, sequence.tenant, now)
            sequence.pages += pages
            self.holdings.add(sequence.tenant, slots=0, pages=given)
            builder.grown[slot] = builder.grown.get(slot, []) + pages
            if self.host_tier.has_copies:
                builder.copied_pages = self.host_tier.copied_pages
        return min(drafts, len(sequence.pages) * size - sequence.planned_len - 1)

    def _trim(self, sequence: Sequence) -> None:
        """Release the pages that drafts alone needed."""
        needed = pages_for(len(sequence.tokens), self._runner.page_size)
        if surplus := sequence.pages[needed:]:
            self.pages.release(surplus)
            del sequence.pages[needed:]

    def _free_page_for(self, sequence: Sequence, builder: PlanBuilder, now: float) -> None:
        """Preempt others so that a page is available, or `sequence` itself when no other can help."""
        if self._reclaimable():
            self._reclaim(1, builder, now)
            return
        running = self.running.values()
        chosen = choose_victims(running, 1, self._pages_freed, self._restore_s, self.holdings)
        for victim in chosen or [sequence]:
            assert not victim.is_protected(self._config.preemptions_max), "rule C is broken"
            self._preempt(victim, builder, now, Move.PREEMPTED_PAGES)

    # -- preemption -------------------------------------------------------------------------------

    def _pages_freed(self, sequence: Sequence) -> int:
        return self.pages.unshared(sequence.pages)

    def _restore_s(self, sequence: Sequence) -> float:
        if self.states is not None:
            return self.states.restore_s(sequence, self._learner.cost)
        return self.host_tier.restore_s(sequence, self._learner.cost)

    def _reclaimable(self, victims: Iterable[Sequence] = ()) -> set[int]:
        """The pages that become available when `victims` and all that wait with pages release theirs."""
        return self.pages.only_in([s.pages for s in (*self._waiting.with_pages, *victims)])

    def _reclaim(self, pages_needed: int, builder: PlanBuilder, now: float) -> None:
        """Preempt sequences that wait with pages until `pages_needed` are available. The caller knows that
        they hold enough."""
        while self.pages.available < pages_needed:
            victim = choose_waiting(self._waiting.with_pages, self._pages_freed)
            self._preempt(victim, builder, now, Move.PREEMPTED_STALLED)

    def _step_aside(self, victim: Sequence, builder: PlanBuilder, now: float) -> None:
        """Take the slot from a running sequence, and leave it its pages until others need them."""
        assert not self._in_flight, "preempted while a step is in flight: rule I is broken"
        builder.drop(self._release_slot(victim, now), victim)
        self._trim(victim)
        victim.step_aside(now)
        self._waiting.enter(victim)
        self.preemptions += 1
        self.yields += 1
        self._moved.append(Moved(victim.handle, Move.PREEMPTED_SHARE))
        if self._has_states or victim.is_pooled:
            self._give_up_pages(victim, now, Move.PREEMPTED_PAGES)

    def _preempt(self, victim: Sequence, builder: PlanBuilder, now: float, move: Move) -> None:
        """Take pages, and the slot if it has one, from a sequence, with all that was planned for it. The
        prefix cache has what it has computed, as long as nobody needs the pages."""
        if victim.status is Status.RUNNING:
            assert not self._in_flight, "preempted while a step is in flight: rule I is broken"
            builder.drop(self._release_slot(victim, now), victim)
            self._give_up(victim, now, move)
        else:
            self._give_up_pages(victim, now, move)

    def _give_up_pages(self, victim: Sequence, now: float, move: Move) -> None:
        """Take the pages from a sequence that has lost its slot."""
        self._waiting.displace(victim)
        self._give_up(victim, now, move)

    def _give_up(self, victim: Sequence, now: float, move: Move) -> None:
        if has_yielded := victim.status is Status.YIELDED:
            self._may_yield_from = max(now, self._may_yield_from) + self._restore_s(victim)
        if self._config.prefix_cache:
            victim.name_head(self.pages, victim.computed_len)
        self.pages.release(victim.pages)
        victim.preempt(now)
        self._waiting.enter(victim)
        self.preemptions += 1
        if not has_yielded:  # else it was told before
            self._moved.append(Moved(victim.handle, move))

    # -- release ----------------------------------------------------------------------------------

    def stall_paused(self, now: float) -> None:
        """Release the slots, and not the pages, of running sequences that are paused and have nothing in
        flight."""
        for sequence in [s for s in self.running.values() if s.is_paused and not s.in_flight_len]:
            self._release_slot(sequence, now)
            self._trim(sequence)
            sequence.stall(now)
            self._waiting.enter(sequence)
            if self._has_states or sequence.is_pooled:
                self._give_up_pages(sequence, now, Move.PREEMPTED_STALLED)

    def release(self, sequence: Sequence, now: float) -> None:
        """Take back all that a sequence holds, in any status, because it ends."""
        keep_s = self._config.session_keep_s if sequence.has_next_turn else 0.0
        keep_until_s = now + keep_s if keep_s else 0.0
        last = self._in_flight.get(sequence.last_step)
        if last is None:
            self.pages.release(sequence.pages, keep_until_s)
        else:  # rule H: its rows are late, and still write
            last.tables.append((sequence.pages, keep_until_s))
        if sequence.status is Status.RUNNING:
            self._release_slot(sequence, now)
        else:
            self._waiting.leave(sequence)
        if self.states is not None and keep_until_s:
            self.states.keep_until(sequence, keep_until_s)

    def _release_slot(self, sequence: Sequence, now: float) -> int:
        """Take back the slot of a running sequence, and return it. It is free when its pages are: once no row
        in flight is its own (rule H)."""
        slot, last = sequence.slot, self._in_flight.get(sequence.last_step)
        assert slot is not None
        if self.states is not None and last is None:
            self.states.save_left(sequence, self._learner.cost, now)
        del self.running[slot]
        self.holdings.add(sequence.tenant, slots=-1, pages=-len(sequence.pages))
        (self._slots_free if last is None else last.slots).append(slot)
        self._left.append(slot)
        return slot

    def forget(self, sequence: Sequence) -> None:
        """Let no other sequence find the pages of one whose contents are not to be trusted, in any tier."""
        self.pages.forget(sequence.pages)
        self.disk.forget(sequence.chain.identities)
        if self.states is not None:
            self.states.pool.drop(sequence.chain.identities)

    def settle(self, landed: InFlight) -> None:
        """Release what a step held back, at its commit."""
        plan = landed.plan
        if plan.swapped_out or plan.swapped_in:
            self.disk.landed(plan.step, [host_page for _, host_page in plan.swapped_out])
        for table, keep_until_s in landed.tables:
            self.pages.release(table, keep_until_s)
        self._slots_free += landed.slots
        if landed.states:
            assert self.states is not None
            self.states.settle(landed.states)
