"""Decides each step: who computes what, who enters, who must give way.

    add, abort,     ->  plan(now)  ->  [the runner runs  ->  commit(plan, result, now)  ->  report()
    pause, resume                       the plan]

A plan first ends those whose deadlines have passed, and takes their slots from those who were
paused since the last one. It has one token budget, spent in this order:

1. *Room*: every running sequence whose next token needs a new page gets one; when none is available,
   somebody is preempted, a stalled sequence before one that runs, and of those the least first
   (`policy.choose_victims`): it gives all its pages back and recomputes them later, through the
   prefix cache.
2. *Decodes*: one token for each running sequence that has one pending.
3. *Prompts*, by rank (`engine.core.policy`): what is left of the budget, as far as the learned cost of
   a step says that it keeps to `step_time_target_s`, goes to chunks of those who run and to admissions.
   Somebody is admitted into a free slot, when the whole uncached part fits into available pages with a
   watermark to spare; pages of the stalled count as available, and are taken when nothing else is
   left. The first that does not fit ends the admissions of its class and those below, so nothing
   overtakes it for good, and nobody of its class takes the pages that a preempted sequence just gave
   back. When it is the eldest's turn, it ends all admissions. Of this budget a part is kept for the
   prompt that has been computed for longest, so that those above it do not hold it up for ever.

Rules

A. Pages for all known tokens are taken at admission, so only decodes grow, one page at a time.
B. What a sequence has sent, it never sends again: after a preemption its output is part of its
   known tokens and is recomputed, not sampled.
C. A sequence that was preempted `preemptions_max` times is *protected*: from its next admission on,
   nobody is admitted unless all who run, itself included, can grow to their ends, into pages that
   are available or that the stalled hold. So nobody is preempted while it runs, and no sequence is
   preempted more than `preemptions_max` times while it runs.
D. A sequence waits, and others pass it, while another computes the very page that it lacks next:
   the `n` children of one request compute their prompt once. (`PASSED_MAX` of them end the
   admissions, so that planning stays cheap.) In its turn the eldest does not wait.
E. A paused sequence is in no plan. What was in flight when the pause came still counts. It harms
   nobody: the slot goes at once, as seating it again costs no computation; the pages go when
   somebody lacks them, before anybody who runs is preempted, and this is not counted against rule C,
   since it is the reader's doing: each pause costs it its pages once at most.
F. Back from a stall it needs a slot, and is admitted as others are (first in rank), except that it
   brings its pages along. So rule C holds for it, too.
G. Who does not fit takes slot and pages from those who run and are of a lower class, if that is
   enough; else nobody is touched. The protected and those admitted by this very plan are spared.

Why it never stops. A sequence whose longest form would not fit into the whole pool is rejected at
the door. Call those who are not paused *willing*. When no one runs, every page is available or held
by the stalled alone, no watermark applies, and so the first in rank of the willing is admitted (rule
D holds nobody back, as nobody computes). When somebody runs, the budget is at least one token per
slot, and a decode that finds no page gets one from a stalled one, from another or gives way itself;
the last one left has the whole pool to itself, so somebody stays. Hence as long as anybody willing
is here, every plan has rows, and by rules C and E what they compute is thrown away a bounded number
of times. So every one of them finishes, and who stays paused ends at the stall deadline: with nobody
willing there is no plan, and `idle_s` says until when.

Nothing here costs time for each step that grows with a sequence's length: a decode touches its
newest token and at most one page.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable
from typing import Final

from engine.core import policy
from engine.core.block_manager import TOKENS, BlockManager, PageChain, pages_for
from engine.core.config import SchedulerConfig
from engine.core.cost import CostLearner
from engine.core.deadlines import Deadlines
from engine.core.messages import (
    NUMERIC_FAILURE,
    AddSequence,
    CoreStats,
    Finished,
    FinishReason,
    Plan,
    RunnerInfo,
    RunResult,
    ServiceClass,
    SlotStart,
    Started,
    StepOutput,
    TokenLogprobs,
)
from engine.core.policy import RESPONSE_RATIO, Circumstances, Discipline
from engine.core.sequence import Phase, Sequence, Status
from engine.core.step import Batch, InFlight, News
from engine.core.tenants import TenantCounters
from engine.core.waiting import WaitingRoom

PASSED_MAX: Final = 16
"""Sequences that one plan passes over by rule D."""


class Scheduler:
    def __init__(
        self, config: SchedulerConfig, runner: RunnerInfo, discipline: Discipline = RESPONSE_RATIO
    ) -> None:
        config.check_against(runner)
        self._config = config
        self._runner = runner
        self._pages = BlockManager(runner.pages, runner.page_size)
        self._watermark_pages = math.ceil(config.watermark * runner.pages)
        self._slots_free = list(reversed(range(runner.slots)))
        self._sequences: dict[int, Sequence] = {}  # by handle: all that live
        self._waiting = WaitingRoom(discipline)
        self._running: dict[int, Sequence] = {}  # by slot, in the order of admission
        self._paused: dict[int, Sequence] = {}  # by handle, wherever they are, in the order of their pauses
        self._left: list[int] = []  # slots vacated since the last plan
        self._in_flight: dict[int, InFlight] = {}  # by step
        self._deadlines = Deadlines(self._sequences)
        self._tenants = TenantCounters()
        self._learner = CostLearner()
        self._news = News()
        self._now = 0.0  # when it last planned or committed
        self._step = 0
        self._step_s = 0.0
        self._step_tokens = 0
        self._preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether somebody is here who is not paused: the next plan has rows."""
        return len(self._sequences) > len(self._paused)

    @property
    def willing(self) -> list[Sequence]:
        """Those who wait for a slot, and for no reader."""
        return self._waiting.willing

    def running(self, slot: int) -> Sequence:
        """Who holds this slot."""
        return self._running[slot]

    def idle_s(self, now: float) -> float:
        """For how long there is nothing to plan unless a message comes: until the next deadline."""
        if self.has_work:
            return 0.0
        first = next(iter(self._paused.values()), None)
        stall_at = math.inf if first is None else self._deadline(first)
        return max(0.0, min(stall_at, self._deadlines.next_at) - now)

    # -- the door ---------------------------------------------------------------------------------

    def add(self, message: AddSequence, now: float) -> None:
        """Queue a sequence, or reject it: too many wait, or it can never be served here."""
        assert message.handle not in self._sequences, "handles are never reused"
        if self._waiting.newcomers >= self._config.queue_len_max or not self._can_ever_run(message):
            nothing = Finished(message.handle, FinishReason.REJECTED, 0.0, 0.0, 0.0, 0.0, 0)
            self._news.finished.append(nothing)
            return
        sequence = Sequence(
            handle=message.handle,
            sampling=message.sampling,
            prompt_len=len(message.prompt_ids),
            tokens=array(TOKENS, message.prompt_ids),
            chain=PageChain(message.cache_salt, self._runner.page_size),
            arrived_at=now,
            tenant=message.tenant,
            service_class=message.service_class,
        )
        sequence.expected_len = self._uncached_len(sequence, self._match(sequence))
        self._sequences[sequence.handle] = sequence
        self._waiting.enter(sequence)
        if message.queue_timeout_s is not None:
            self._deadlines.add(now + message.queue_timeout_s, message.handle, FinishReason.QUEUE_TIMEOUT)
        if message.timeout_s is not None:
            self._deadlines.add(now + message.timeout_s, message.handle, FinishReason.TIMEOUT)

    def _can_ever_run(self, message: AddSequence) -> bool:
        prompt, max_tokens = message.prompt_ids, message.sampling.max_tokens
        if not prompt or max_tokens < 1 or min(prompt) < 0 or max(prompt) >= self._runner.vocab_size:
            return False
        total_len = len(prompt) + max_tokens
        fits_pool = pages_for(total_len - 1, self._runner.page_size) <= self._pages.total
        return fits_pool and total_len <= self._runner.max_model_len

    def abort(self, handles: Iterable[int], now: float) -> None:
        """End these now, wherever they are; unknown and finished ones are passed over.

        One that is in flight ends at once as well: `commit` will drop what it brings, and no plan
        can use its slot and pages before that.
        """
        for handle in handles:
            sequence = self._sequences.get(handle)
            if sequence is not None:
                self._finish(sequence, FinishReason.ABORTED, now)

    # -- readers who fall behind ------------------------------------------------------------------

    def pause(self, handles: Iterable[int], now: float) -> None:
        """Leave these out of every plan from the next on; unknown and finished ones are passed over."""
        for handle in handles:
            sequence = self._sequences.get(handle)
            if sequence is not None and not sequence.is_paused:
                sequence.pause(now)
                self._paused[handle] = sequence
                self._news.is_due = True

    def resume(self, handles: Iterable[int], now: float) -> None:
        """Take these in again; those who are not paused are passed over."""
        for handle in handles:
            sequence = self._paused.pop(handle, None)
            if sequence is not None:
                sequence.resume(now)

    def _end_overdue(self, now: float) -> None:
        while (first := next(iter(self._paused.values()), None)) and self._deadline(first) <= now:
            self._finish(first, FinishReason.STALLED, now)
        for handle, reason in self._deadlines.passed(now):
            sequence = self._sequences[handle]
            if reason is FinishReason.TIMEOUT or sequence.status is Status.WAITING:
                self._finish(sequence, reason, now)

    def _deadline(self, paused: Sequence) -> float:
        assert paused.paused_at is not None
        return paused.paused_at + self._config.stall_deadline_s

    def _stall_paused(self, now: float) -> None:
        for sequence in [s for s in self._running.values() if s.is_paused]:
            self._leave_slot(sequence)
            sequence.stall(now)
            self._waiting.enter(sequence)

    # -- plan -------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nobody is here who is not paused."""
        assert not self._in_flight, "a plan is being run"
        self._now = now
        self._end_overdue(now)
        self._stall_paused(now)
        batch = Batch(self._config.step_tokens_max)
        self._make_room(batch, now)
        self._plan_decodes(batch)
        self._spend(batch, now)
        assert bool(batch.rows) == self.has_work, "somebody is willing, and nobody moves"
        if not batch.rows:
            return None
        self._step += 1
        self._in_flight[self._step] = InFlight(batch.rows, batch.work, now)
        left, self._left = self._left, []
        return Plan(
            step=self._step,
            left=left,
            seated=batch.seated,
            grown=list(batch.grown.items()),
            slots=batch.slots,
            positions=batch.positions,
            lengths=batch.lengths,
            samples=batch.samples,
        )

    def _make_room(self, batch: Batch, now: float) -> None:
        """A page for every decode that crosses into a new one, as long as it need not give way."""
        size = self._runner.page_size
        crossing = [s for s in self._running.values() if s.computed_len == len(s.pages) * size]
        for sequence in crossing:
            if sequence.status is not Status.RUNNING:
                continue  # it gave way to one before it
            if not self._pages.available:
                self._make_way(sequence, batch, now)
            if sequence.slot is not None:
                page = self._pages.allocate(1)
                sequence.pages += page
                batch.grown[sequence.slot] = page

    def _make_way(self, needy: Sequence, batch: Batch, now: float) -> None:
        """Preempt so that a page is available; `needy` itself when it is the one to go."""
        if self._reclaimable():
            self._reclaim(1, now)
            return
        victims = policy.choose_victims(
            self._running.values(), 1, lambda sequence: self._pages.unshared(sequence.pages)
        )
        for victim in victims or [needy]:
            assert victim.preemptions < self._config.preemptions_max, "rule C is broken"
            batch.drop(self._leave_slot(victim), victim)
            self._preempt(victim, now)

    def _reclaimable(self, victims: Iterable[Sequence] = ()) -> set[int]:
        """Pages that become available when these victims and all stalled sequences give theirs back."""
        return self._pages.only_in([s.pages for s in (*self._waiting.stalled.values(), *victims)])

    def _reclaim(self, pages_needed: int, now: float) -> None:
        """Let stalled sequences give their pages back until so many are available. They hold enough."""
        while self._pages.available < pages_needed:
            victim = policy.choose_stalled(
                self._waiting.stalled.values(), lambda sequence: self._pages.unshared(sequence.pages)
            )
            self._waiting.leave(victim)
            self._preempt(victim, now)

    def _preempt(self, victim: Sequence, now: float) -> None:
        self._pages.release(victim.pages)
        victim.preempt(now)
        self._waiting.enter(victim)
        self._preemptions += 1

    def _plan_decodes(self, batch: Batch) -> None:
        for slot, sequence in self._running.items():
            if sequence.pending_len == 1:
                batch.add(slot, sequence, 1)
            else:
                sequence.expected_len = sequence.pending_len
                batch.chunks.append(sequence)

    def _spend(self, batch: Batch, now: float) -> None:
        """What the decodes left, by rank: on chunks of those who run, and on admissions."""
        circumstances = self._circumstances(now)
        room_s = self._config.step_time_target_s - circumstances.cost.seconds(batch.work)
        position = max((sequence.computed_len for sequence in batch.chunks), default=0)
        batch.budget_left = policy.prompt_budget(batch.budget_left, room_s, circumstances.cost, position)
        batch.keep(policy.kept_for_eldest(batch.budget_left))
        if self._slots_free or self._is_outranked():  # else the queue would be ranked for nothing
            self._admit(batch, circumstances)
        for sequence in self._waiting.rank(batch.unplanned, circumstances):
            batch.add_chunk(sequence)

    def _admit(self, batch: Batch, circumstances: Circumstances) -> None:
        blocked: ServiceClass | None = None
        passed = 0
        for candidate in self._waiting.candidates(batch.unplanned, circumstances):
            sequence = candidate.sequence
            if not batch.budget_left or passed == PASSED_MAX or blocked is max(ServiceClass):
                return
            if sequence.status is Status.RUNNING:
                batch.add_chunk(sequence)
                continue
            if blocked is not None and sequence.service_class <= blocked and not candidate.in_turn:
                continue
            start = sequence.pages or self._match(sequence)
            sequence.expected_len = self._uncached_len(sequence, start)
            if not candidate.in_turn and self._is_coming(sequence, len(start), batch):
                passed += 1
            elif self._fits(sequence, start) or self._displace(sequence, start, batch, circumstances.now):
                self._seat(sequence, start, batch, circumstances.now)
            elif candidate.in_turn:
                return
            else:
                blocked = sequence.service_class

    def _circumstances(self, now: float) -> Circumstances:
        competing = {sequence.tenant for sequence in self._waiting.willing}
        return Circumstances(now, self._learner.cost, self._tenants.leads(competing))

    def _is_outranked(self) -> bool:
        """Whether somebody who waits is of a higher class than somebody who runs."""
        highest = max((s.service_class for s in self._waiting.willing), default=min(ServiceClass))
        return any(s.service_class < highest for s in self._running.values())

    def _displace(self, sequence: Sequence, start: list[int], batch: Batch, now: float) -> bool:
        """Preempt some who run and are of lower classes, so that this one fits; nobody, when all of them
        would not be enough (rule G)."""
        seated = {started.slot for started in batch.seated}
        lower = [
            other
            for slot, other in self._running.items()
            if other.service_class < sequence.service_class
            and other.preemptions < self._config.preemptions_max
            and slot not in seated
        ]
        if not lower or not self._fits(sequence, start, lower):
            return False
        ordered = policy.by_expendability(lower, lambda other: self._pages.unshared(other.pages))
        victims: list[Sequence] = []
        while not self._fits(sequence, start, victims):
            victims.append(ordered[len(victims)])
        for victim in victims.copy():  # the first are the least, and a later one may do alone
            fewer = [other for other in victims if other is not victim]
            if self._fits(sequence, start, fewer):
                victims = fewer
        for victim in victims:
            batch.drop(self._leave_slot(victim), victim)
            self._preempt(victim, now)
        return True

    def _uncached_len(self, sequence: Sequence, start: list[int]) -> int:
        return len(sequence.tokens) - len(start) * self._runner.page_size

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached pages that `sequence` may start from."""
        if not self._config.prefix_cache:
            return []
        pages_len = sequence.reusable_len // self._runner.page_size
        identities = sequence.chain.extend(sequence.tokens, pages_len)
        return self._pages.match(identities[:pages_len])

    def _is_coming(self, sequence: Sequence, hits_len: int, batch: Batch) -> bool:
        """Whether a chunk of this very plan works towards the next page that `sequence` lacks (rule D)."""
        if sequence.pages or not self._config.prefix_cache:
            return False
        if hits_len == sequence.reusable_len // self._runner.page_size:
            return False
        lacking = sequence.chain.identities[hits_len]
        return any(lacking in other.chain.identities[hits_len : hits_len + 1] for other in batch.chunks)

    def _fits(self, sequence: Sequence, start: list[int], victims: Collection[Sequence] = ()) -> bool:
        """Whether there is a slot, its known tokens fit now, and leave what those who run may need to
        grow: when these victims are preempted, and the stalled give way."""
        if not (self._slots_free or victims):
            return False
        known_pages = pages_for(len(sequence.tokens), self._runner.page_size)
        takes = known_pages - len(start) + self._pages.unreferenced(start)
        running = [other for other in self._running.values() if other not in victims]
        headroom = self._watermark_pages if running else 0
        everybody = [sequence, *running]
        if any(s.preemptions >= self._config.preemptions_max for s in everybody):  # rule C
            growth = sum(self._pages_max(s) - len(s.pages) for s in everybody)
            headroom = max(headroom, growth - (known_pages - len(sequence.pages)))
        lacking = takes + headroom - self._pages.available
        return lacking <= 0 or lacking <= len(self._reclaimable(victims) - set(start))

    def _pages_max(self, sequence: Sequence) -> int:
        return pages_for(sequence.kv_len_max, self._runner.page_size)

    def _seat(self, sequence: Sequence, start: list[int], batch: Batch, now: float) -> None:
        """Admit it. Its table starts with these pages: its own when it was stalled, else the cache's."""
        size, status = self._runner.page_size, sequence.status
        computed_len = sequence.computed_len if status is Status.STALLED else len(start) * size
        self._waiting.admit(sequence)
        if status is not Status.STALLED:
            self._pages.acquire(start)
        fresh = pages_for(len(sequence.tokens), size) - len(start)
        self._reclaim(fresh, now)
        pages = start + self._pages.allocate(fresh)
        slot = self._slots_free.pop()
        sequence.admit(slot, pages, computed_len, now)
        self._running[slot] = sequence
        if status is Status.WAITING:
            self._prefix_query_tokens += sequence.prompt_len
            self._prefix_hit_tokens += computed_len
            self._tenants.charge(sequence.tenant, sequence.prompt_len - computed_len)
            queue_s = sequence.spent_s[Phase.QUEUE]
            self._news.started.append(Started(sequence.handle, computed_len, queue_s))
        seated = SlotStart(slot, sequence.tokens.tolist(), sequence.prompt_len, sequence.sampling)
        batch.seated.append(seated)
        batch.grown[slot] = list(pages)
        batch.chunks.append(sequence)
        batch.add_chunk(sequence)

    # -- commit -----------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: RunResult, now: float) -> None:
        """Take in what a plan brought. Rows of sequences that ended meanwhile bring nothing."""
        self._now = now
        flight = self._in_flight.pop(plan.step)
        self._step_s = now - flight.planned_at
        self._step_tokens = sum(plan.lengths)
        self._learner.observe(flight.work, self._step_s)
        self._news.is_due = True
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, flight.rows, result.prompt_logprobs)
        assert len(result.tokens) == sum(plan.samples)
        logprobs = result.logprobs or [None] * len(result.tokens)
        sampled = zip(result.tokens, logprobs, strict=True)
        for sequence, length, samples in zip(flight.rows, plan.lengths, plan.samples, strict=True):
            brought = next(sampled) if samples else None
            if sequence.status is not Status.RUNNING:
                continue
            self._advance(sequence, length)
            if brought is not None:
                self._take_token(sequence, *brought, now)

    def _advance(self, sequence: Sequence, length: int) -> None:
        """The row's tokens are computed; pages that they fill can be found from now on."""
        size = self._runner.page_size
        full_before = sequence.computed_len // size
        sequence.computed_len += length
        full = sequence.computed_len // size
        if full > full_before and self._config.prefix_cache:
            identities = sequence.chain.extend(sequence.tokens, full)
            for page in range(full_before, full):
                self._pages.register(sequence.pages[page], identities[page])

    def _take_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> None:
        if token == NUMERIC_FAILURE:
            self._pages.forget(sequence.pages)  # whatever broke it must not spread to its prefix's heirs
            self._finish(sequence, FinishReason.NUMERIC, now)
            return
        sequence.append(token, now)
        self._tenants.charge(sequence.tenant, 1)
        news, sampling = self._news, sequence.sampling
        news.handles.append(sequence.handle)
        news.tokens.append(token)
        news.logprobs.append(logprobs)
        if token in sampling.stop_token_ids:
            self._finish(sequence, FinishReason.STOP, now)
        elif sequence.output_len == sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH, now)

    def _take_prompt_logprobs(
        self, plan: Plan, rows: list[Sequence], columns: list[tuple[int, list[TokenLogprobs]]]
    ) -> None:
        """Pass on what was not sent before: a preempted sequence computes positions a second time."""
        row_of = {slot: row for row, slot in enumerate(plan.slots)}
        for slot, entries in columns:
            row = row_of[slot]
            sequence, start = rows[row], plan.positions[row]
            fresh = entries[max(0, sequence.prompt_logprobs_sent - start) :]
            if sequence.status is Status.RUNNING and fresh:
                self._news.prompt_logprobs.append((sequence.handle, fresh))
                sequence.prompt_logprobs_sent = start + len(entries)

    # -- leaving ----------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._pages.release(sequence.pages)
        if sequence.status is Status.RUNNING:
            self._leave_slot(sequence)
        else:
            self._waiting.leave(sequence)
        del self._sequences[sequence.handle]
        self._paused.pop(sequence.handle, None)
        sequence.finish(now)
        self._news.finished.append(sequence.finished(reason))

    def _leave_slot(self, sequence: Sequence) -> int:
        """Take a running sequence's slot back, and return it."""
        slot = sequence.slot
        assert slot is not None
        del self._running[slot]
        self._slots_free.append(slot)
        self._left.append(slot)
        return slot

    # -- report -----------------------------------------------------------------------------------

    def report(self) -> StepOutput | None:
        """Everything since the last report: after each step, and when without one somebody ended or was
        paused."""
        news = self._news
        if not (news.is_due or news.finished):
            return None
        self._news = News()
        has_logprobs = any(entry is not None for entry in news.logprobs)
        return StepOutput(
            step=self._step,
            handles=news.handles,
            tokens=news.tokens,
            logprobs=news.logprobs if has_logprobs else [],
            prompt_logprobs=news.prompt_logprobs,
            started=news.started,
            finished=news.finished,
            stats=self.stats(),
        )

    def stats(self) -> CoreStats:
        idle = sum(s.is_paused for s in self._running.values())  # paused, and no plan was made since
        class_waiting, class_waited_s = self._waiting.by_class(self._now)
        return CoreStats(
            waiting=len(self._sequences) - len(self._running) - len(self._paused) + idle,
            running=len(self._running),
            pages_free=self._pages.free,
            pages_cached=self._pages.cached,
            pages_owned=self._pages.owned,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            step_s=self._step_s,
            step_tokens=self._step_tokens,
            stalled=len(self._paused),
            class_waiting=class_waiting,
            class_waited_s=class_waited_s,
        )

    def check(self) -> None:
        """Assert laws 1 and 2 over everything held here. For tests: O(pages + sequences)."""
        queued = list(self._waiting)
        everybody = [*queued, *self._running.values()]
        self._pages.check([sequence.pages for sequence in everybody])
        slots = [*self._slots_free, *self._running]
        assert sorted(slots) == list(range(self._runner.slots)), "a slot is lost, or owned twice"
        assert {sequence.handle: sequence for sequence in everybody} == self._sequences
        assert len(everybody) == len(self._sequences), "a sequence is in two places"
        assert self._paused == {s.handle: s for s in everybody if s.is_paused}
        pauses = [self._deadline(sequence) for sequence in self._paused.values()]
        assert pauses == sorted(pauses), "the first is not the first to end"
        for status, queue in self._waiting.queues.items():
            for sequence in queue.values():
                assert sequence.status is status
                assert sequence.slot is None
                assert bool(sequence.pages) == (status is Status.STALLED)
        for slot, sequence in self._running.items():
            assert sequence.slot == slot
            assert sequence.status is Status.RUNNING
        for sequence in everybody:
            assert sequence.pending_len >= 1
            assert sequence.computed_len <= len(sequence.pages) * self._runner.page_size
            assert sequence.preemptions <= self._config.preemptions_max
