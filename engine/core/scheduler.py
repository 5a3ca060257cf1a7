"""Decides each step: who computes what, who enters, who must give way.

    add, abort  ->  plan(now)  ->  [the runner runs the plan]  ->  commit(plan, result, now)  ->  report()

A plan has one token budget, spent in this order:

1. *Room*: every running sequence whose next token needs a new page gets one; when none is available,
   the latest arrival is preempted: it gives all its pages back and recomputes them later, through
   the prefix cache.
2. *Decodes*: one token for each running sequence that has one pending.
3. *Chunks*: pending prompt of the other running sequences, oldest admission first.
4. *Admissions*, by rank: into a free slot, when the whole uncached part fits into available pages
   with a watermark to spare. The first that does not fit ends the admissions, so nothing overtakes
   it for good; in particular nobody takes the pages that a preempted sequence just gave back.

Rules

A. Pages for all known tokens are taken at admission, so only decodes grow, one page at a time.
B. What a sequence has sent, it never sends again: after a preemption its output is part of its
   known tokens and is recomputed, not sampled.
C. A sequence that was preempted `preemptions_max` times is *protected*: from its next admission on,
   nobody is admitted unless all who run, itself included, can grow to their ends. So nobody is
   preempted while it runs, and no sequence is preempted more than `preemptions_max` times.
D. A sequence waits, and others pass it, while another computes the very page that it lacks next:
   the `n` children of one request compute their prompt once. (`PASSED_MAX` of them end the
   admissions, so that planning stays cheap.)

Why it never stops. A sequence whose longest form would not fit into the whole pool is rejected at
the door. When nobody runs, every page is available, no watermark applies, and so the first in rank
is admitted (rule D holds nobody back, as nobody computes). When somebody runs, the budget is at
least one token per slot, and a decode that finds no page gets one from another or gives way itself;
the last one left has the whole pool to itself, so somebody stays. Hence as long as anybody is here,
every plan has rows, and by rule C what they compute is thrown away a bounded number of times. So
everybody finishes.

Nothing here costs time for each step that grows with a sequence's length: a decode touches its
newest token and at most one page.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from engine.core import policy
from engine.core.block_manager import TOKENS, BlockManager, PageChain, pages_for
from engine.core.config import SchedulerConfig
from engine.core.messages import (
    NUMERIC_FAILURE,
    AddSequence,
    CoreStats,
    Finished,
    FinishReason,
    Plan,
    RunnerInfo,
    RunResult,
    SlotStart,
    Started,
    StepOutput,
    TokenLogprobs,
)
from engine.core.sequence import Phase, Sequence, Status

PASSED_MAX: Final = 16
"""Sequences that one plan passes over by rule D."""


@dataclass(slots=True)
class _Batch:
    """A plan in the making."""

    budget_left: int
    seated: list[SlotStart] = field(default_factory=list)
    grown: dict[int, list[int]] = field(default_factory=dict)
    rows: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    """Those of the rows that compute more than one token."""
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)

    def add(self, slot: int, sequence: Sequence, length: int) -> None:
        """A row. It samples when nothing stays pending behind it."""
        assert 1 <= length <= self.budget_left
        self.budget_left -= length
        self.rows.append(sequence)
        if length > 1:
            self.chunks.append(sequence)
        self.slots.append(slot)
        self.positions.append(sequence.computed_len)
        self.lengths.append(length)
        self.samples.append(length == sequence.pending_len)


@dataclass(slots=True)
class _InFlight:
    """What `commit` must know of a plan that is being run."""

    rows: list[Sequence]
    planned_at: float


@dataclass(slots=True)
class _News:
    """What happened since the last report."""

    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    stepped: bool = False


class Scheduler:
    def __init__(self, config: SchedulerConfig, runner: RunnerInfo) -> None:
        config.check_against(runner)
        self._config = config
        self._runner = runner
        self._pages = BlockManager(runner.pages, runner.page_size)
        self._watermark_pages = math.ceil(config.watermark * runner.pages)
        self._slots_free = list(reversed(range(runner.slots)))
        self._sequences: dict[int, Sequence] = {}  # by handle: all that live
        self._waiting: dict[int, Sequence] = {}  # by handle: never admitted yet
        self._preempted: dict[int, Sequence] = {}  # by handle
        self._running: dict[int, Sequence] = {}  # by slot, in the order of admission
        self._left: list[int] = []  # slots vacated since the last plan
        self._in_flight: dict[int, _InFlight] = {}  # by step
        self._news = _News()
        self._step = 0
        self._step_s = 0.0
        self._step_tokens = 0
        self._preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # -- the door ---------------------------------------------------------------------------------

    def add(self, message: AddSequence, now: float) -> None:
        """Queue a sequence, or reject it: too many wait, or it can never be served here."""
        assert message.handle not in self._sequences, "handles are never reused"
        if len(self._waiting) >= self._config.queue_len_max or not self._can_ever_run(message):
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
        )
        self._sequences[sequence.handle] = self._waiting[sequence.handle] = sequence

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

    # -- plan -------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nobody is here."""
        assert not self._in_flight, "a plan is being run"
        batch = _Batch(self._config.step_tokens_max)
        self._make_room(batch, now)
        self._plan_running(batch)
        self._admit(batch, now)
        assert batch.rows or not self._sequences, "somebody is here, and nobody moves"
        if not batch.rows:
            return None
        self._step += 1
        self._in_flight[self._step] = _InFlight(batch.rows, now)
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

    def _make_room(self, batch: _Batch, now: float) -> None:
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

    def _make_way(self, needy: Sequence, batch: _Batch, now: float) -> None:
        """Preempt so that a page is available; `needy` itself when it is the one to go."""
        victims = policy.choose_victims(
            self._running.values(), 1, lambda sequence: self._pages.unshared(sequence.pages)
        )
        for victim in victims or [needy]:
            assert victim.preemptions < self._config.preemptions_max, "rule C is broken"
            batch.grown.pop(self._vacate(victim), None)
            victim.preempt(now)
            self._preempted[victim.handle] = victim
            self._preemptions += 1

    def _plan_running(self, batch: _Batch) -> None:
        prefilling = []
        for slot, sequence in self._running.items():
            if sequence.pending_len == 1:
                batch.add(slot, sequence, 1)
            else:
                prefilling.append((slot, sequence))
        for slot, sequence in prefilling:
            if length := policy.chunk_len(sequence.pending_len, batch.budget_left):
                batch.add(slot, sequence, length)

    def _admit(self, batch: _Batch, now: float) -> None:
        if not self._slots_free:
            return  # before the queue is ranked for nothing
        passed = 0
        for sequence in policy.by_rank([*self._preempted.values(), *self._waiting.values()], now):
            if not (self._slots_free and batch.budget_left) or passed == PASSED_MAX:
                return
            hits = self._match(sequence)
            if self._is_coming(sequence, len(hits), batch):
                passed += 1
            elif self._fits(sequence, hits):
                self._seat(sequence, hits, batch, now)
            else:
                return

    def _match(self, sequence: Sequence) -> list[int]:
        """Cached pages that `sequence` may start from."""
        if not self._config.prefix_cache:
            return []
        pages_len = sequence.reusable_len // self._runner.page_size
        identities = sequence.chain.extend(sequence.tokens, pages_len)
        return self._pages.match(identities[:pages_len])

    def _is_coming(self, sequence: Sequence, hits_len: int, batch: _Batch) -> bool:
        """Whether a chunk of this very plan works towards the next page that `sequence` lacks (rule D)."""
        if hits_len == sequence.reusable_len // self._runner.page_size or not self._config.prefix_cache:
            return False
        lacking = sequence.chain.identities[hits_len]
        return any(lacking in other.chain.identities[hits_len : hits_len + 1] for other in batch.chunks)

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether its known tokens fit now, and leave what those who run may need to grow."""
        known_pages = pages_for(len(sequence.tokens), self._runner.page_size)
        takes = known_pages - len(hits) + self._pages.unreferenced(hits)
        headroom = self._watermark_pages if self._running else 0
        everybody = [sequence, *self._running.values()]
        if any(s.preemptions >= self._config.preemptions_max for s in everybody):  # rule C
            growth = sum(self._pages_max(s) - len(s.pages) for s in everybody) - known_pages
            headroom = max(headroom, growth)
        return takes + headroom <= self._pages.available

    def _pages_max(self, sequence: Sequence) -> int:
        return pages_for(sequence.kv_len_max, self._runner.page_size)

    def _seat(self, sequence: Sequence, hits: list[int], batch: _Batch, now: float) -> None:
        size = self._runner.page_size
        self._pages.acquire(hits)
        pages = hits + self._pages.allocate(pages_for(len(sequence.tokens), size) - len(hits))
        slot = self._slots_free.pop()
        is_first = sequence.status is Status.WAITING
        del self._queue_of(sequence)[sequence.handle]
        sequence.admit(slot, pages, len(hits) * size, now)
        self._running[slot] = sequence
        if is_first:
            self._prefix_query_tokens += sequence.prompt_len
            self._prefix_hit_tokens += sequence.computed_len
            queue_s = sequence.spent_s[Phase.QUEUE]
            self._news.started.append(Started(sequence.handle, sequence.computed_len, queue_s))
        start = SlotStart(slot, sequence.tokens.tolist(), sequence.prompt_len, sequence.sampling)
        batch.seated.append(start)
        batch.grown[slot] = list(pages)
        batch.add(slot, sequence, policy.chunk_len(sequence.pending_len, batch.budget_left))

    # -- commit -----------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: RunResult, now: float) -> None:
        """Take in what a plan brought. Rows of sequences that ended meanwhile bring nothing."""
        flight = self._in_flight.pop(plan.step)
        self._step_s = now - flight.planned_at
        self._step_tokens = sum(plan.lengths)
        self._news.stepped = True
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
        if sequence.status is Status.RUNNING:
            self._vacate(sequence)
        else:
            del self._queue_of(sequence)[sequence.handle]
        del self._sequences[sequence.handle]
        sequence.finish(now)
        self._news.finished.append(sequence.finished(reason))

    def _queue_of(self, sequence: Sequence) -> dict[int, Sequence]:
        return self._preempted if sequence.status is Status.PREEMPTED else self._waiting

    def _vacate(self, sequence: Sequence) -> int:
        """Take back a running sequence's pages and slot. Returns the slot."""
        slot = sequence.slot
        assert slot is not None
        self._pages.release(sequence.pages)
        del self._running[slot]
        self._slots_free.append(slot)
        self._left.append(slot)
        return slot

    # -- report -----------------------------------------------------------------------------------

    def report(self) -> StepOutput | None:
        """Everything since the last report: after each step, and when somebody ended without one."""
        news = self._news
        if not (news.stepped or news.finished):
            return None
        self._news = _News()
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
        return CoreStats(
            waiting=len(self._waiting) + len(self._preempted),
            running=len(self._running),
            pages_free=self._pages.free,
            pages_cached=self._pages.cached,
            pages_owned=self._pages.owned,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            preemptions=self._preemptions,
            step_s=self._step_s,
            step_tokens=self._step_tokens,
        )

    def check(self) -> None:
        """Assert laws 1 and 2 over everything held here. For tests: O(pages + sequences)."""
        self._pages.check([sequence.pages for sequence in self._running.values()])
        slots = [*self._slots_free, *self._running]
        assert sorted(slots) == list(range(self._runner.slots)), "a slot is lost, or owned twice"
        everybody = [*self._waiting.values(), *self._preempted.values(), *self._running.values()]
        assert {sequence.handle: sequence for sequence in everybody} == self._sequences
        assert len(everybody) == len(self._sequences), "a sequence is in two places"
        assert all(sequence.status is Status.WAITING for sequence in self._waiting.values())
        assert all(sequence.status is Status.PREEMPTED for sequence in self._preempted.values())
        for sequence in [*self._waiting.values(), *self._preempted.values()]:
            assert sequence.slot is None
            assert not sequence.pages
            assert sequence.computed_len == 0
        for slot, sequence in self._running.items():
            assert sequence.slot == slot
            assert sequence.status is Status.RUNNING
            held_len = len(sequence.pages) * self._runner.page_size
            assert sequence.pending_len >= 1
            assert sequence.computed_len <= held_len
            assert sequence.preemptions <= self._config.preemptions_max
