"""Decides each step: which sequences compute what, which are admitted, which are preempted. Batching is
continuous: every step has a batch of its own, of decodes and chunks of prefills.

    add, abort,     ->  plan(now)  ->  [the runner runs  ->  commit(plan, result, now)  ->  report()
    pause, resume                       the plan]

From its plan to its commit a step is *in flight*. The next may be planned and launched meanwhile, so that
the device need not wait for the host (`engine.core.loop`).

A plan first ends the sequences that stayed paused until their stall deadlines, and takes the slots of
those that were paused since the last plan. It has one token budget, spent in this order:

1. *Growth* (`engine.core.step.allocator`): every running sequence whose next token needs a new page gets one.
   When none is available a sequence is preempted (`engine.core.step.victims`): it releases all its pages into
   the prefix cache, and is restored later from what is left there and in host memory
   (`engine.core.step.host_tier`).
2. *Decodes* (`engine.core.step.planner`): one token for each running sequence that has one pending, and the
   drafts behind it that pay (`engine.core.step.drafting`).
3. *Prompts* (`engine.core.step.planner`), by rank (`engine.core.queue.policy`): chunks of running sequences
   (chunked prefill), and admissions from the waiting queue (`engine.core.queue.waiting`), for as much of the
   step as prompts may take (`engine.core.estimate.pace`).

At the commit, `engine.core.step.results` takes in what the step brought. This module is the door, the clock's
side, and what binds the others.

The rules, each in full at the head of the module that keeps it:

    A  allocator   pages for all known tokens are taken at admission; only decodes grow
    B  sequence    a token that was sent is never sent again
    C  allocator   a sequence is preempted a bounded number of times
    D  planner     a sequence waits while another computes the page that it lacks next
    E  allocator   a paused sequence is in no plan, and loses its slot, and its pages if they are needed
    F  allocator   a stalled sequence that is resumed brings its pages along
    G  victims     a sequence that does not fit may preempt those of lower classes
    H  step        a plan beside a step in flight goes by lengths; rows of ended sequences bring nothing
    I  allocator   no running sequence is preempted while a step is in flight
    J  victims     tenants share the slots; a tenant that holds more yields to one that holds less
    K  allocator   what fills no page is copied from a sequence that has computed it
    L  allocator   a sequence whose model keeps a state by slot gives up its pages with its slot

Why it never stops. A sequence whose longest form would not fit into the whole pool is rejected when it is
added. When no sequence runs, every page is available or held by stalled ones alone, no watermark applies, and
so the first in rank of those that are due is admitted (rule D passes over none, as none computes). What keeps
a sequence from being due, `Sequence.hold` says, and nothing else may keep it from every plan. When one runs,
the budget is at least one token per slot, and a decode that finds no page gets one from a stalled sequence,
from another running one or is preempted itself; the last one left has the whole pool to itself, so one keeps
running. Hence as long as any sequence is due, every plan has rows, and by rules C and E what they compute is
thrown away a bounded number of times; by rule J more often, but only while others of its tenant run that came
before it, and the oldest of a tenant stays. So every sequence finishes that becomes due again and again, as
each does that is not paused; and one that stays paused ends at the stall deadline: and one whose mask is
coming gets it, or ends. When none is due there is no plan, and `idle_s` says until when. Nor is there one
when all that run lack their masks, and so keep pages and slots from those that are due; but only until one
comes. With steps in flight a plan may have no rows, or wait by rule I; but then nothing new is launched, what
is in flight is committed, and the argument above holds for the plan after that.

No step takes time that grows with a sequence's length: a decode touches its newest token and at most one
page.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from engine.contract.messages import (
    CoreStats,
    DiskCounts,
    Finished,
    FinishReason,
    Plan,
    RunnerInfo,
    RunResult,
    SamplingParams,
    ServiceClass,
    StateCounts,
    StepOutput,
)
from engine.contract.packing import unpacked
from engine.contract.records import Lack
from engine.core.estimate.cost import CostLearner
from engine.core.grammars.masks import Grammars, Masks
from engine.core.pages.block_manager import pages_for
from engine.core.pages.tiers import PageDisk
from engine.core.queue.deadlines import DeadlineQueue
from engine.core.queue.newcomers import AddSequence, Prompt
from engine.core.queue.policy import RESPONSE_RATIO, Discipline
from engine.core.queue.tenants import TenantCounters
from engine.core.queue.waiting import WaitingQueue
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import NEVER, Hold, Sequence, Status
from engine.core.step.allocator import Allocator
from engine.core.step.drafting import Drafting
from engine.core.step.flight import InFlight
from engine.core.step.plan_builder import PlanBuilder
from engine.core.step.planner import Planner
from engine.core.step.results import Results, StepBook, lack_of

FETCH_POLL_S: Final = 0.001
"""The time between two looks at what comes from disk while there is nothing else to do, in seconds."""
NO_SEQUENCES: Final = (0,) * len(ServiceClass)
NO_WAITS_S: Final = (0.0,) * len(ServiceClass)
NO_DISK: Final = DiskCounts()
NO_STATES: Final = StateCounts()
STEPS_AHEAD_MAX: Final = 1
"""Steps that may be in flight while another is planned: one keeps a device busy, more would add late rows."""


class Scheduler:
    """Plans and commits steps, and keeps all sequences that have not ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: RunnerInfo,
        discipline: Discipline = RESPONSE_RATIO,
        disk: PageDisk | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        config.check_against(runner)
        config = config.fitting(runner)
        self._config = config
        self._runner = runner
        self._sequences: dict[int, Sequence] = {}  # by handle: all that have not ended
        self._paused: dict[int, Sequence] = {}  # by handle, in any status, in the order of their pauses
        self._waiting = WaitingQueue(discipline)
        self._learner = CostLearner(runner.state_copy_s or runner.page_copy_s, runner.timed_steps)
        self._in_flight: dict[int, InFlight] = {}  # by step number, in order
        self._deadlines = DeadlineQueue()
        self._allocator = Allocator(config, runner, self._waiting, self._in_flight, self._learner, disk)
        self.masks: Final = Masks(grammars)
        self._lacks_masks = False
        """True if the last plan had no rows because all that run lack their masks, and others find no room
        beside them."""
        self._fetching: dict[int, tuple[Sequence, float]] = {}
        """Newcomers that wait for pages from disk, and the times at which they stop waiting, by handle."""
        self._book = StepBook(self._allocator)
        self._tenants = TenantCounters()
        self._planner = Planner(
            config, runner, self._allocator, self._waiting, self._tenants, self._learner, self._in_flight
        )
        drafts_max = min(config.drafts_max, runner.drafts_max)
        self._drafting = (
            Drafting(config, runner, self._allocator, self._learner, drafts_max, in_flight=self._in_flight)
            if drafts_max
            else None
        )
        self._planner.drafting = self._drafting
        self._results = Results(config, self._allocator.pages, self._tenants, self._allocator.forget)
        self._news = StepOutput()  # what came since the last report
        self._is_due = False
        """True if a report is due in any case, since a step was committed or a sequence was paused."""
        self.newest = 0
        """The newest handle that was added with all before it, for whoever reads the counts. A loop that
        keeps some back says which."""
        self._now = 0.0  # of the last plan or commit
        self._step = 0  # the number of the last step that was planned
        self._committed = 0  # and of the last that was committed
        self._committed_at = 0.0
        self._step_s = 0.0
        self._step_tokens = 0

    @property
    def has_work(self) -> bool:
        """True if any sequence is due: then the next plan has rows, unless they wait for a step in flight."""
        return any(sequence.hold is None for sequence in self._sequences.values())

    def idle_s(self, now: float) -> float:
        """The time until there is something to do without a new message, in seconds: 0.0 while there is work,
        else until the next deadline of a sequence that is paused or waits for its first mask, infinite when
        there is none. While one waits for the disk, `FETCH_POLL_S` at most. A mask that comes ends the wait
        before."""
        if self._in_flight or (self.has_work and not self._lacks_masks):
            return 0.0
        first = next(iter(self._paused.values()), None)
        until = math.inf if first is None else self._deadline(first)
        if self.masks.sequences:
            until = min(until, self.masks.first_token_by)
        idle_s = max(0.0, until - now)
        return min(idle_s, FETCH_POLL_S) if self._fetching else idle_s

    # -- adding and aborting ----------------------------------------------------------------------

    def add(self, message: AddSequence, now: float) -> None:
        """Queue a sequence, or reject it when too many wait or when it can never run here."""
        assert message.handle not in self._sequences, "handles are never reused"
        self.newest = message.handle
        prompt = Prompt.of(message.prompt_ids)
        if prompt is None or self._is_full(len(prompt)) or not self._can_ever_run(prompt, message.sampling):
            self.refuse(message.handle, FinishReason.REJECTED)
            return
        sequence = Sequence(
            handle=message.handle,
            sampling=message.sampling,
            prompt_len=len(prompt),
            tokens=prompt.tokens,
            chain=prompt.chain(message.cache_salt, self._runner.page_size),
            arrived_at=now,
            tenant=message.tenant,
            service_class=message.service_class,
            has_next_turn=message.has_next_turn,
            first_token_by=now + message.first_token_s,
            prediction=message.prediction,
            named_len=0 if message.sampling.vector_len else message.shared_len or NEVER,
        )
        if self._drafting is not None and not message.grammar:
            sequence.drafts_from = sequence.prompt_len
        sequence.expected_len -= self._allocator.find_prefix(sequence).computed_len
        coming_len, compute_s = self._allocator.fetch(sequence)
        sequence.expected_len -= coming_len
        self._tenants.enter(sequence.tenant)
        if message.first_token_s < math.inf:
            expected_s = self._planner.first_token_s(sequence, now, message.first_token_s)
            if expected_s > message.first_token_s:
                self._tenants.leave(sequence.tenant)
                self.refuse(message.handle, FinishReason.TOO_LATE, expected_s)
                return
            self._deadlines.add(sequence.first_token_by, sequence.handle)
            self._deadlines.forget(self._sequences, len(self._sequences))
        self._wake(now)
        self._sequences[sequence.handle] = sequence
        self._waiting.enter(sequence)
        if self._planner.outlook is not None:
            self._planner.outlook.add(sequence)
        if coming_len:
            self._fetching[sequence.handle] = sequence, now + compute_s
        if message.grammar and not sequence.is_only_read:
            self.masks.open(sequence, message.grammar)

    def refuse(self, handle: int, reason: FinishReason, expected_s: float = 0.0) -> None:
        """End a sequence that is not queued."""
        self._news.finished.append(Finished(handle, reason, 0.0, 0.0, 0.0, 0.0, 0, 0.0, expected_s))

    def _wake(self, now: float) -> None:
        """Note that a sequence comes that can be computed, in case there was none."""
        if not (self.has_work or self._in_flight):
            self._book.wake(now)

    def _is_full(self, prompt_len: int) -> bool:
        newcomers, tokens = self._waiting.newcomers, self._waiting.newcomer_tokens
        has_too_many = newcomers >= self._config.queue_len_max
        return has_too_many or (newcomers > 0 and tokens + prompt_len > self._config.queue_tokens_max)

    def _can_ever_run(self, prompt: Prompt, sampling: SamplingParams) -> bool:
        if not prompt or sampling.max_tokens < 0 or prompt.highest >= self._runner.vocab_size:
            return False
        if sampling.vector_len > (0 if sampling.max_tokens else self._runner.vector_len):
            return False
        if sampling.scored and (
            sampling.max_tokens or max(unpacked(sampling.scored)) >= self._runner.vocab_size
        ):
            return False
        total_len = len(prompt) + sampling.max_tokens
        computed_len = max(len(prompt), total_len - 1)
        fits_pool = pages_for(computed_len, self._runner.page_size) <= self._allocator.pages.total
        return fits_pool and total_len <= self._runner.max_model_len

    def abort(self, handles: Iterable[int], now: float) -> None:
        """End these sequences now, in any status; unknown and finished handles are passed over.

        One with rows in flight ends at once as well: `commit` drops what they bring, and no plan uses its
        slot and pages before that.
        """
        for handle in handles:
            sequence = self._sequences.get(handle)
            if sequence is not None:
                self._finish(sequence, FinishReason.ABORTED, now)

    # -- pausing ----------------------------------------------------------------------------------

    def pause(self, handles: Iterable[int], now: float) -> None:
        """Leave these sequences out of every plan from the next on; unknown and finished handles are passed
        over. Where more than `paused_max` are paused then, some end: of the tenant that has the most of
        them, those that have been for longest."""
        for handle in handles:
            sequence = self._sequences.get(handle)
            if sequence is not None and not sequence.is_paused:
                self._planner.outlook = None
                sequence.pause(now)
                self._paused[handle] = sequence
                self._is_due = True
        if (excess := len(self._paused) - self._config.paused_max) > 0:
            held = Counter(sequence.tenant for sequence in self._paused.values())
            for _ in range(excess):
                most = max(held.values())
                first = next(sequence for sequence in self._paused.values() if held[sequence.tenant] == most)
                held[first.tenant] -= 1
                self._finish(first, FinishReason.STALLED, now)

    def resume(self, handles: Iterable[int], now: float) -> None:
        """Plan these sequences again; handles that are not paused are passed over."""
        self._wake(now)
        self._planner.outlook = None
        for handle in handles:
            sequence = self._paused.pop(handle, None)
            if sequence is not None:
                sequence.resume(now)

    def lift_deadlines(self, handles: Iterable[int]) -> None:
        """Let the first tokens of these sequences come at any time; unknown handles are passed over."""
        for handle in handles:
            if (sequence := self._sequences.get(handle)) is not None:
                sequence.first_token_by = math.inf

    def _end_overdue(self, now: float) -> None:
        """End the sequences whose stall deadline has passed, and those whose first token is of no use any
        more."""
        while (first := next(iter(self._paused.values()), None)) and self._deadline(first) <= now:
            self._finish(first, FinishReason.STALLED, now)
        for handle in self._deadlines.passed(now) if self._deadlines.heap else ():
            late = self._sequences.get(handle)
            if late is None or late.first_token_by > now:
                continue
            if not late.output_len and not late.coming:
                self._finish(late, FinishReason.TOO_LATE, now)

    def _deadline(self, paused: Sequence) -> float:
        assert paused.paused_at is not None
        return paused.paused_at + self._config.stall_deadline_s

    # -- plan -------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The plan of the next step; up to `STEPS_AHEAD_MAX` steps before it may be in flight.

        None when no sequence is due, or when all that could run must wait until the step in flight is
        committed: then commit, and plan again. Or all of those that run lack their masks, and hold what those
        that wait need: then plan again once a mask is there.
        """
        assert len(self._in_flight) <= STEPS_AHEAD_MAX
        self._now, self._planner.outlook = now, None
        self._end_overdue(now)
        self._take_fetched(now)
        if self.masks.sequences:
            self._take_masks(now)
        self._allocator.stall_paused(now)
        if self._allocator.must_wait():
            return None
        if self._in_flight and self._drafting is not None and self._drafting.waits():
            return None
        self._allocator.lack = Lack.NOTHING
        builder = PlanBuilder(self._config.step_tokens_max, states=self._allocator.states)
        self._planner.fill(builder, self._news, now)
        self._lacks_masks = False
        if builder.rows:
            return self._launch(builder, now)
        if not self._in_flight and self.has_work:
            self._lacks_masks = any(s.hold is Hold.MASK for s in self._allocator.running.values())
            assert self._lacks_masks, "there is work, and the plan has none"
        return None

    def note_host(self, seconds: float) -> None:
        """Note the host's time for a step that has been committed: its plan, launch and commit."""
        if self._drafting is not None:
            self._drafting.note_host(seconds)

    def await_masks(self) -> None:
        """Wait a moment for masks that are about to come (`engine.core.grammars.masks`, rule 1). To be called
        before a plan while `masks.sequences` has any."""
        self.masks.wait(self._step_s, len(self._sequences))

    def _take_fetched(self, now: float) -> None:
        """Let newcomers go on whose pages came from disk, or did not come in time
        (`engine.core.pages.tiers`)."""
        disk = self._allocator.disk
        if not disk.is_there:
            return
        disk.take_done()
        for handle, (sequence, until) in list(self._fetching.items()):
            assert sequence.awaits is not None
            is_coming = disk.is_coming(sequence.awaits)
            if is_coming and now < until:
                continue
            if is_coming:
                disk.is_late()
            self._wake(now)
            del self._fetching[handle]
            sequence.awaits = None

    def _take_masks(self, now: float) -> None:
        """Let sequences go on whose masks came, and end those whose grammars failed, or are complete."""
        for sequence, reason in self.masks.take_filled():
            if reason is not None:
                self._finish(sequence, reason, now)
            elif sequence.status is Status.WAITING:
                self._wake(now)

    def _launch(self, builder: PlanBuilder, now: float) -> Plan:
        """Make the plan, and count its step as in flight from here on."""
        self._step += 1
        tier = self._allocator.host_tier
        swapped_out, swapped_in = tier.take_copies(self._step) if tier.has_copies else ([], [])
        states = self._allocator.states
        saved, restored = ([], []) if states is None else states.take_copies(self._step)
        plan = Plan(
            step=self._step,
            left=self._allocator.take_left(),
            seated=builder.seated,
            grown=list(builder.grown.items()),
            slots=builder.slots,
            positions=builder.positions,
            lengths=builder.lengths,
            wants=builder.wants,
            swapped_out=swapped_out,
            swapped_in=swapped_in,
            forked=self._allocator.take_forked(),
            masks=self.masks.of(builder.rows, builder.wants, builder.lengths) if self.masks.sequences else [],
            drafts=builder.drafts,
            guesses=builder.asked_guesses,
            saved=saved,
            restored=restored,
        )
        for sequence, length, want in zip(builder.rows, builder.lengths, builder.wants, strict=True):
            sequence.launch(self._step, length, want)
        is_queue_empty = len(self._sequences) == len(self._allocator.running)
        waits = not is_queue_empty and any(sequence.hold is None for sequence in self._waiting)
        lack = lack_of(self._allocator, waits=waits)
        self._in_flight[self._step] = InFlight(plan, builder.rows, builder.prefills, builder.work, now, lack)
        return plan

    # -- commit -----------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: RunResult, now: float) -> None:
        """Take in the result of the oldest plan in flight. Rows of sequences that ended meanwhile bring
        nothing, as they are late (rule H)."""
        flight = self._in_flight.pop(plan.step)
        self._planner.outlook = None
        assert all(plan.step < other for other in self._in_flight), "out of order"
        self._step_s = now - max(flight.planned_at, self._committed_at)
        self._step_tokens = sum(plan.lengths)
        self._committed, self._committed_at, self._now = plan.step, now, now
        expected_s = self._learner.observe(flight.work, self._step_s)
        self._book.commit(flight, self._step_s, expected_s, now)
        self._is_due = True
        for sequence, reason in self._results.take(flight, result, self._news, now):
            self._finish(sequence, reason, now)
        if self._results.matched:
            matched, self._results.matched = self._results.matched, []
            self.masks.advance(matched, self._foreseen(matched) if self._drafting is not None else {})
        self._allocator.settle(flight)

    def _foreseen(self, matched: list[tuple[int, int]]) -> dict[int, list[int]]:
        """The drafts of sequences with grammars, by handle: they are made before
        their masks are filled, as each needs one."""
        assert self._drafting is not None
        sequences = {handle: self._sequences[handle] for handle, _ in matched}
        found = ((handle, self._drafting.foresee(sequence)) for handle, sequence in sequences.items())
        return {handle: drafts for handle, drafts in found if drafts is not None}

    # -- ending -----------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        assert not (sequence.coming and reason is FinishReason.LENGTH), "a row beyond the last token"
        self._planner.outlook = None
        self._allocator.release(sequence, now)
        del self._sequences[sequence.handle]
        self._tenants.leave(sequence.tenant)
        self._paused.pop(sequence.handle, None)
        self._fetching.pop(sequence.handle, None)
        if sequence.handle in self.masks.sequences:
            self.masks.close(sequence.handle)
        if self._drafting is not None:
            self._drafting.leave(sequence)
        sequence.finish(now)
        self._news.finished.append(sequence.finished(reason))

    # -- report -----------------------------------------------------------------------------------

    @property
    def has_ends(self) -> bool:
        """True if a sequence ended since the last report."""
        return bool(self._news.finished)

    def report(self) -> StepOutput | None:
        """The news since the last report; None when no step was committed and no sequence began, ended
        or was paused."""
        news = self._news
        if not (self._is_due or news.started or news.finished):
            return None
        self._news, self._is_due = StepOutput(), False
        if news.logprobs.count(None) == len(news.logprobs):
            news.logprobs.clear()
        return msgspec.structs.replace(
            news,
            step=self._committed,
            stats=self.stats(),
            moved=self._allocator.take_moved(),
            record=self._book.take(),
        )

    def stats(self) -> CoreStats:
        allocator, tier = self._allocator, self._allocator.host_tier
        pages, running = allocator.pages, allocator.running
        free, cached, host = pages.free, pages.cached, tier.host
        host_free, host_kept = (host.free, host.kept) if host.total else (0, 0)
        class_waiting, class_waited_s, class_tokens = NO_SEQUENCES, NO_WAITS_S, [*NO_SEQUENCES]
        if any(self._waiting.queues.values()):
            class_waiting, class_waited_s, class_tokens = self._waiting.by_class(self._now)
        paused_running = 0  # paused, and no plan was made since
        for sequence in running.values():
            if sequence.paused_at is not None:
                paused_running += 1
            elif (rest := len(sequence.tokens) - sequence.computed_len) > 1:  # 1 is a decode
                class_tokens[sequence.service_class] += rest
        return CoreStats(
            waiting=len(self._sequences) - len(running) - len(self._paused) + paused_running,
            running=len(running),
            pages_free=free,
            pages_cached=cached,
            pages_owned=pages.total - free - cached,
            prefix_query_tokens=self._planner.prefix_query_tokens,
            prefix_hit_tokens=self._planner.prefix_hit_tokens,
            preemptions=allocator.preemptions,
            step_s=self._step_s,
            step_tokens=self._step_tokens,
            stalled=len(self._paused),
            class_waiting=class_waiting,
            class_waited_s=class_waited_s,
            swaps_in=allocator.copied_back,
            swapped_out_bytes=tier.pages_out * self._runner.page_bytes,
            swapped_in_bytes=tier.pages_in * self._runner.page_bytes,
            host_pages_used=host.total - host_free - host_kept,
            host_pages_free=host_free,
            host_pages_kept=host_kept,
            prefix_host_tokens=self._planner.prefix_host_tokens,
            prefix_disk_tokens=self._planner.prefix_disk_tokens,
            disk=allocator.disk.counts() if allocator.disk.is_there else NO_DISK,
            waiting_tokens=self._waiting.newcomer_tokens,
            class_tokens=tuple(class_tokens),
            newest=self.newest,
            yields=allocator.yields,
            pages_kept=len(pages.cached_pages.kept),
            kept_found=pages.cached_pages.kept_found,
            kept_evicted=pages.cached_pages.kept_evicted,
            states=NO_STATES if allocator.states is None else allocator.states.counts(),
        )
