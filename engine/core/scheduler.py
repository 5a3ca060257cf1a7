"""Decides each step: who computes what, who enters, who must give way.

    add, abort,     ->  plan(now)  ->  [the runner runs  ->  commit(plan, result, now)  ->  report()
    pause, resume                       the plan]

From its plan to its commit a step is *in flight*. The next may be planned and launched meanwhile, so that
the device need not wait for the host (`engine.core.loop`).

A plan first ends those who stayed paused until their deadlines, and takes their slots from those who were
paused since the last one. It has one token budget, spent in this order:

1. *Room*: every running sequence whose next token needs a new page gets one; when none is available,
   somebody is preempted, a stalled sequence before one that runs, and of those the least first
   (`policy.choose_victims`): it gives all its pages back, and is restored later, by whichever is
   cheaper: recomputed through the prefix cache, or from copies in host memory (`engine.core.swap`).
2. *Decodes*: one token for each running sequence that has one pending.
3. *Prompts*, by rank (`engine.core.policy`): what is left of the budget, as far as the learned cost of
   a step says that it keeps to `step_time_target_s`, or to less than twice what its decodes take when
   there is but one prompt (`policy.prompt_room_s`), goes to chunks of those who run and to admissions.
   Somebody is admitted into a free slot, when the whole uncached part fits into available pages with a
   watermark to spare; pages of the stalled count as available, and are taken when nothing else is
   left. The first of a tenant that does not fit ends the admissions of its tenant, of its class and those
   below, so nothing overtakes it for good, and nobody of its class takes the pages that a preempted
   sequence just gave back. In the eldest's turn it ends those of every class. While nobody of its tenant
   runs, it ends those of all tenants; while somebody does, it is its own tenant that makes room. Of this
   budget a part is kept for the prompt that has been computed for longest, so that those above it do not
   hold it up for ever.

Rules

A. Pages for all known tokens are taken at admission, so only decodes grow, one page at a time.
B. What a sequence has sent, it never sends again: after a preemption its output is part of its
   known tokens and is restored, not sampled.
C. A sequence that was preempted `preemptions_max` times is *protected*: from its next admission on,
   nobody is admitted unless all who run, itself included, can grow to their ends, into pages that
   are available or that the stalled hold. So nobody is preempted while it runs, and no sequence is
   preempted more than `preemptions_max` times while it runs, those by rule J aside.
D. A sequence waits, and others pass it, while another computes the very page that it lacks next:
   the `n` children of one request compute their prompt once. (`PASSED_MAX` of them end the
   admissions, so that planning stays cheap.) In its turn the eldest does not wait.
E. A paused sequence is in no plan. What was in flight when the pause came still counts. It harms
   nobody: the slot goes at the next plan at which nothing of it is in flight, as seating it again
   costs no computation; the pages go when somebody lacks them, before anybody who runs is preempted.
   This is not counted against rule C, since it is the reader's doing: each pause costs it its pages
   once at most.
F. Back from a stall it needs a slot, and is admitted as others are (first in rank), except that it
   brings its pages along. So rule C holds for it, too.
G. Who does not fit takes slot and pages from those who run and are of a lower class, if that is
   enough; else nobody is touched. The protected and those admitted by this very plan are spared.
H. A plan with a step in flight goes by lengths, which are known ahead, and not by tokens, which are not:
   the runner finds a token that is coming where the step in flight leaves it. Who comes to `max_tokens` by
   what is in flight gets no further row. Who ends otherwise (by a stop token, an abort, a stall deadline, a
   numeric failure) may leave rows in flight behind; these are *late*, and bring nothing. Its slot and its
   pages are held back until the last step that works on them is committed, and count as taken until then.
   Pages are given to the prefix cache when a commit knows their tokens.
I. Nobody who runs gives way while anything is in flight: its pages would be free only later, and until then
   every plan would find too few and take more. When somebody has to, `plan` returns None, what is in flight
   is committed, and the next plan is made as if steps had never overlapped. So rules C and G hold as they
   stand, and only what a sequence ended with is ever late, never what it will go on from.
J. Seats are shared by tenants. Who does not fit, and of whose tenant less would run with it than of another
   runs now, by their dominant shares (`engine.core.tenants`), takes slot and pages from that other, again if
   that is enough. The eldest of each tenant that runs is spared, and those of a higher class; the protected
   are not: else a tenant of whom all were protected could keep every slot for as long as it likes. After
   one that costs `r` seconds to restore nobody yields for `r` seconds, so restoring takes half of the time
   at most, however often tenants come and go. Where a decode needs a page, the tenant that holds most
   gives way first.

Why it never stops. A sequence whose longest form would not fit into the whole pool is rejected at
the door. Call those who are not paused *willing*. When no one runs, every page is available or held
by the stalled alone, no watermark applies, and so the first in rank of the willing is admitted (rule
D holds nobody back, as nobody computes). When somebody runs, the budget is at least one token per
slot, and a decode that finds no page gets one from a stalled one, from another or gives way itself;
the last one left has the whole pool to itself, so somebody stays. Hence as long as anybody willing
is here, every plan has rows, and by rules C and E what they compute is thrown away a bounded number
of times; by rule J more often, but only while others of its tenant run that came before it, and of a
tenant's the eldest stays. So every one of them finishes, and who stays paused ends at the stall
deadline: with nobody willing there is no plan, and `idle_s` says until when. With steps in flight a plan
may have no rows, or wait by rule I; but then nothing new is launched, what is in flight is committed, and
the argument above holds for the plan after that.

Nothing here costs time for each step that grows with a sequence's length: a decode touches its
newest token and at most one page.

Who does what: `engine.core.room` keeps slots and pages, and knows who gives way to whom;
`engine.core.planner` spends the budget; `engine.core.results` takes in what a step brought;
`engine.core.waiting` keeps the queue. Here is the door, the clock's side, and what binds them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import Final

from engine.core.block_manager import TOKENS, PageChain, pages_for
from engine.core.config import SchedulerConfig
from engine.core.cost import CostLearner
from engine.core.messages import (
    AddSequence,
    CoreStats,
    Finished,
    FinishReason,
    Plan,
    RunnerInfo,
    RunResult,
    StepOutput,
)
from engine.core.planner import Planner
from engine.core.policy import RESPONSE_RATIO, Discipline
from engine.core.results import Results
from engine.core.room import Room
from engine.core.sequence import Sequence, Status
from engine.core.step import Batch, InFlight, News
from engine.core.swap import Preference, if_cheaper
from engine.core.tenants import Seats, TenantCounters
from engine.core.waiting import WaitingRoom

STEPS_AHEAD_MAX: Final = 1
"""Steps in flight while another is planned: one keeps a device busy, more would add late rows."""


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        runner: RunnerInfo,
        discipline: Discipline = RESPONSE_RATIO,
        planner: type[Planner] = Planner,
        prefers_swap: Preference = if_cheaper,
    ) -> None:
        config.check_against(runner)
        self._config = config
        self._runner = runner
        self._sequences: dict[int, Sequence] = {}  # by handle: all that live
        self._paused: dict[int, Sequence] = {}  # by handle, wherever they are, in the order of their pauses
        self._waiting = WaitingRoom(discipline)
        self._learner = CostLearner(runner.page_copy_s)
        self._in_flight: dict[int, InFlight] = {}  # by step, in their order
        self._room = Room(config, runner, self._waiting, self._in_flight, self._learner, prefers_swap)
        self._tenants = TenantCounters()
        self._planner = planner(
            config, runner, self._room, self._waiting, self._tenants, self._learner, self._in_flight
        )
        self._results = Results(config, self._room.pages, self._tenants, self._room.merge)
        self._news = News()
        self._now = 0.0  # when it last planned or committed
        self._step = 0  # the last planned, and the last committed
        self._committed = 0
        self._committed_at = 0.0
        self._step_s = 0.0
        self._step_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether somebody is here who is not paused: the next plan has rows, unless they wait for what is
        in flight."""
        return len(self._sequences) > len(self._paused)

    @property
    def willing(self) -> list[Sequence]:
        """Those who wait for a slot, and for no reader."""
        return self._waiting.willing

    def running(self, slot: int) -> Sequence:
        """Who holds this slot."""
        return self._room.running[slot]

    @property
    def seats(self) -> Seats:
        """What those who run hold, by tenant."""
        return self._room.seats

    def idle_s(self, now: float) -> float:
        """For how long there is nothing to do unless a message comes: until the next stall deadline."""
        if self.has_work or self._in_flight:
            return 0.0
        first = next(iter(self._paused.values()), None)
        return math.inf if first is None else max(0.0, self._deadline(first) - now)

    # -- the door ---------------------------------------------------------------------------------

    def add(self, message: AddSequence, now: float) -> None:
        """Queue a sequence, or reject it: too many wait, or it can never be served here."""
        assert message.handle not in self._sequences, "handles are never reused"
        if self._is_full(len(message.prompt_ids)) or not self._can_ever_run(message):
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
        sequence.expected_len -= self._room.start(sequence).computed_len
        self._sequences[sequence.handle] = sequence
        self._waiting.enter(sequence)

    def _is_full(self, prompt_len: int) -> bool:
        newcomers, tokens = self._waiting.newcomers, self._waiting.newcomer_tokens
        has_too_many = newcomers >= self._config.queue_len_max
        return has_too_many or (newcomers > 0 and tokens + prompt_len > self._config.queue_tokens_max)

    def _can_ever_run(self, message: AddSequence) -> bool:
        prompt, max_tokens = message.prompt_ids, message.sampling.max_tokens
        if not prompt or max_tokens < 1 or min(prompt) < 0 or max(prompt) >= self._runner.vocab_size:
            return False
        total_len = len(prompt) + max_tokens
        fits_pool = pages_for(total_len - 1, self._runner.page_size) <= self._room.pages.total
        return fits_pool and total_len <= self._runner.max_model_len

    def abort(self, handles: Iterable[int], now: float) -> None:
        """End these now, wherever they are; unknown and finished ones are passed over.

        One that is in flight ends at once as well: `commit` drops what it brings, and no plan uses its
        slot and pages before that.
        """
        for handle in handles:
            sequence = self._sequences.get(handle)
            if sequence is not None:
                self._finish(sequence, FinishReason.ABORTED, now)

    # -- readers who fall behind ------------------------------------------------------------------

    def pause(self, handles: Iterable[int], now: float) -> None:
        """Leave these out of every plan from the next on; unknown and finished ones are passed over. Where
        more than `paused_max` are paused then, those who have been for longest end."""
        for handle in handles:
            sequence = self._sequences.get(handle)
            if sequence is not None and not sequence.is_paused:
                sequence.pause(now)
                self._paused[handle] = sequence
                self._news.is_due = True
        while len(self._paused) > self._config.paused_max:
            self._finish(next(iter(self._paused.values())), FinishReason.STALLED, now)

    def resume(self, handles: Iterable[int], now: float) -> None:
        """Take these in again; those who are not paused are passed over."""
        for handle in handles:
            sequence = self._paused.pop(handle, None)
            if sequence is not None:
                sequence.resume(now)

    def _end_overdue(self, now: float) -> None:
        while (first := next(iter(self._paused.values()), None)) and self._deadline(first) <= now:
            self._finish(first, FinishReason.STALLED, now)

    def _deadline(self, paused: Sequence) -> float:
        assert paused.paused_at is not None
        return paused.paused_at + self._config.stall_deadline_s

    # -- plan -------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next step; up to `STEPS_AHEAD_MAX` before it may be in flight.

        None when nobody is here who is not paused, or when all who are must wait until what is in
        flight is committed: then commit, and plan again."""
        assert len(self._in_flight) <= STEPS_AHEAD_MAX
        self._now = now
        self._end_overdue(now)
        self._room.stall_paused(now)
        if self._room.must_wait():
            return None
        batch = Batch(self._config.step_tokens_max)
        self._planner.fill(batch, self._news, now)
        assert self._in_flight or bool(batch.rows) == self.has_work, "somebody is willing, and nobody moves"
        return self._launch(batch, now) if batch.rows else None

    def _launch(self, batch: Batch, now: float) -> Plan:
        """From here on it is in flight."""
        self._step += 1
        swapped_out, swapped_in = self._room.swapper.take_copies()
        plan = Plan(
            step=self._step,
            left=self._room.take_left(),
            seated=batch.seated,
            grown=list(batch.grown.items()),
            slots=batch.slots,
            positions=batch.positions,
            lengths=batch.lengths,
            samples=batch.samples,
            swapped_out=swapped_out,
            swapped_in=swapped_in,
            replaced=self._room.take_replaced(),
        )
        for sequence, length, samples in zip(batch.rows, batch.lengths, batch.samples, strict=True):
            sequence.launch(self._step, length, samples)
        self._in_flight[self._step] = InFlight(plan, batch.rows, batch.chunks, batch.work, now)
        return plan

    # -- commit -----------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: RunResult, now: float) -> None:
        """Take in what the eldest plan in flight brought. Rows of sequences that ended meanwhile bring
        nothing."""
        flight = self._in_flight.pop(plan.step)
        assert all(plan.step < other for other in self._in_flight), "out of order"
        self._step_s = now - max(flight.planned_at, self._committed_at)
        self._step_tokens = sum(plan.lengths)
        self._committed, self._committed_at, self._now = plan.step, now, now
        self._learner.observe(flight.work, self._step_s)
        self._news.is_due = True
        for sequence, reason in self._results.take(flight, result, self._news, now):
            self._finish(sequence, reason, now)
        self._room.settle(flight)

    # -- leaving ----------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._room.vacate(sequence)
        del self._sequences[sequence.handle]
        self._paused.pop(sequence.handle, None)
        sequence.finish(now)
        self._news.finished.append(sequence.finished(reason))

    # -- report -----------------------------------------------------------------------------------

    def report(self) -> StepOutput | None:
        """Everything since the last report: after each step, and whenever a sequence began, ended or was
        paused."""
        news = self._news
        if not (news.is_due or news.started or news.finished):
            return None
        self._news = News()
        has_logprobs = news.logprobs.count(None) < len(news.logprobs)
        return StepOutput(
            step=self._committed,
            handles=news.handles,
            tokens=news.tokens,
            logprobs=news.logprobs if has_logprobs else [],
            prompt_logprobs=news.prompt_logprobs,
            started=news.started,
            finished=news.finished,
            stats=self.stats(),
        )

    def stats(self) -> CoreStats:
        pages, running, swapper = self._room.pages, self._room.running, self._room.swapper
        idle = sum(s.is_paused for s in running.values())  # paused, and no plan was made since
        class_waiting, class_waited_s = self._waiting.by_class(self._now)
        return CoreStats(
            waiting=len(self._sequences) - len(running) - len(self._paused) + idle,
            running=len(running),
            pages_free=pages.free,
            pages_cached=pages.cached,
            pages_owned=pages.owned,
            prefix_query_tokens=self._planner.prefix_query_tokens,
            prefix_hit_tokens=self._planner.prefix_hit_tokens,
            preemptions=self._room.preemptions,
            step_s=self._step_s,
            step_tokens=self._step_tokens,
            stalled=len(self._paused),
            class_waiting=class_waiting,
            class_waited_s=class_waited_s,
            swaps_out=swapper.sequences_out,
            swaps_in=swapper.sequences_in,
            swapped_out_bytes=swapper.pages_out * self._runner.page_bytes,
            swapped_in_bytes=swapper.pages_in * self._runner.page_bytes,
            host_pages_used=swapper.host.used,
            host_pages_free=swapper.host.free,
            waiting_tokens=self._waiting.newcomer_tokens,
        )

    def check(self) -> None:
        """Assert laws 1 and 2 over everything held here. For tests: O(pages + sequences)."""
        self._room.check()
        self._check_flights()
        everybody = [*self._waiting, *self._room.running.values()]
        assert {sequence.handle: sequence for sequence in everybody} == self._sequences
        assert len(everybody) == len(self._sequences), "a sequence is in two places"
        assert self._paused == {s.handle: s for s in everybody if s.is_paused}
        pauses = [self._deadline(sequence) for sequence in self._paused.values()]
        assert pauses == sorted(pauses), "the first is not the first to end"

    def _check_flights(self) -> None:
        """What is in flight is what its sequences know of it, and nobody else is in flight."""
        assert len(self._in_flight) <= STEPS_AHEAD_MAX + 1
        assert list(self._in_flight) == sorted(self._in_flight)
        flying: dict[int, tuple[int, int, int]] = {}
        for step, flight in self._in_flight.items():
            plan = flight.plan
            for sequence, length, samples in zip(flight.rows, plan.lengths, plan.samples, strict=True):
                if sequence.status is Status.FINISHED:
                    continue
                before = flying.get(sequence.handle, (0, 0, 0))
                flying[sequence.handle] = (before[0] + length, before[1] + samples, step)
        for handle, sequence in self._sequences.items():
            length, coming, step = flying.pop(handle, (0, 0, 0))
            assert (sequence.in_flight_len, sequence.coming) == (length, coming)
            assert not step or sequence.last_step == step, "a fence in the wrong place"
        assert not flying, "a row for nobody"
