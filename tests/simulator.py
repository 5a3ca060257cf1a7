"""Runs the real scheduler on a fake runner in virtual time: seeded, so every failure can be replayed.

    report = simulate(seed, SimConfig(...))

The world and its messages are drawn by `tests.worlds`. A broken law is an AssertionError:

- whenever anything happens, that no page, slot or sequence is lost or in two places (`tests.core_laws`; in
  large worlds, and in usual runs, now and then);
- at every plan, all that `FakeRunner` checks, and that nothing is computed for a paused sequence;
- at every admission, that no waiting sequence was passed by more later arrivals than the bound of
  `engine.core.queue.policy` allows;
- whenever a sequence yields its slot, that it was not the oldest of its tenant, and that one of another
  tenant and of no lower class was admitted;
- at the end, that every sequence ended exactly once, that its tokens are those of its solo run, that its
  times add up, that it ended at a deadline if it came to one and only then, and that all pages were released.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from engine.contract.messages import (
    AbortSequences,
    Finished,
    FinishReason,
    PauseSequences,
    Plan,
    ResumeSequences,
    Started,
    StateCounts,
    StepOutput,
    TokenLogprobs,
)
from engine.contract.packing import TOKENS
from engine.core.drafts.drafter import Drafts
from engine.core.queue.newcomers import AddSequence
from engine.core.queue.policy import age
from engine.core.scheduler import Scheduler
from engine.core.sequence import Hold, Sequence
from engine.core.step.drafting import drafter_for
from tests.bench.engine.core_window import draft_by, in_slot
from tests.bench.engine.virtual import TurnWatch
from tests.core_laws import check
from tests.effort import drawn
from tests.fake_disk import FakeDisk
from tests.fake_drafts import FakeDrafts
from tests.fake_grammars import FakeGrammars, random_delays
from tests.fake_runner import FakeRunner, runner_info, solo
from tests.worlds import VECTOR_LEN, Message, SimConfig, draw_messages

PAGES_CHECKED_ALWAYS = 16
"""Pages up to which a world is checked whenever anything happens, or every third time in a usual run: what is
lost stays lost. Larger ones are checked more rarely, since a check takes time in proportion to the pages."""


@dataclass(slots=True)
class Life:
    """One sequence as the API process sees it."""

    message: AddSequence
    arrived_at: float
    aborted_at: float | None = None
    """The time of its first abort before its end; None when there was none."""
    paused_at: float | None = None
    in_flight: int = 0
    """Steps in flight when it was paused, each of which may bring it one more token."""
    overdue: dict[FinishReason, float] = field(default_factory=dict)
    """The time of the first plan after a deadline, by the reason with which the deadline ends it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    predicted: int = 0
    """The tokens of its prediction that were right, as they were told step by step."""
    mispredicted: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: bytes = b""
    scores: list[float] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one simulation."""

    lives: list[Life]
    steps: int
    computed_tokens: int
    preemptions: int
    yields: int
    swaps_in: int
    hit_tokens: int
    host_tokens: int
    disk_tokens: int
    kept_found: int
    kept_evicted: int
    states: StateCounts
    elapsed_s: float

    @property
    def output_tokens(self) -> int:
        return sum(len(life.tokens) for life in self.lives)

    @property
    def owed_tokens(self) -> int:
        """The tokens that are charged and were not in the cache: of each request what the cache lacked of its
        prompt, once, the output, and what was under way for a caller that ended it. The first output token
        comes with the prompt's last, which are one."""
        under_way = sum(end.late_tokens for end in self.ends if end.reason.is_callers)
        return sum(map(max, self._lacked.values())) + self.output_tokens + under_way

    @property
    def uncharged_tokens(self) -> int:
        """The tokens that are computed and named as charged to nobody."""
        late = sum(end.late_tokens for end in self.ends if not end.reason.is_callers)
        again = sum(end.again_tokens for end in self.ends)
        wrong = sum(end.drafted - end.accepted for end in self.ends)
        return late + again + wrong + sum(sum(lacks) - max(lacks) for lacks in self._lacked.values())

    @property
    def ends(self) -> list[Finished]:
        return [life.finished for life in self.lives if life.finished is not None]

    @property
    def _lacked(self) -> dict[str, list[int]]:
        """What the cache lacked of the prompt of each choice that began, but for its last token where one is
        sampled behind that, by request."""
        lacked: dict[str, list[int]] = {}
        for life in self.lives:
            if life.started is not None:
                is_sampled = life.message.sampling.max_tokens > 0
                lacks = len(life.message.prompt_ids) - is_sampled - life.started.cached_len
                lacked.setdefault(life.message.request_id, []).append(lacks)
        return lacked

    @property
    def displaced(self) -> int:
        """How often a sequence that had no slot lost its pages."""
        return self.preemptions - sum(life.finished.preemptions for life in self.lives if life.finished)

    @property
    def preemptions_most(self) -> int:
        """The most preemptions of one sequence while it ran."""
        return max(life.finished.preemptions for life in self.lives if life.finished)

    @property
    def drafted(self) -> int:
        return sum(end.drafted for end in self.ends)

    @property
    def accepted(self) -> int:
        return sum(end.accepted for end in self.ends)

    @property
    def predicted(self) -> int:
        return sum(life.predicted for life in self.lives)

    @property
    def mispredicted(self) -> int:
        return sum(life.mispredicted for life in self.lives)

    @property
    def reasons(self) -> Counter[FinishReason]:
        return Counter(life.finished.reason for life in self.lives if life.finished)


def simulate(seed: int, config: SimConfig) -> Report:
    """Run one world to its end. Raises AssertionError when a law is broken."""
    return _Simulation(random.Random(seed), config).run()


class _Simulation:
    def __init__(self, rng: random.Random, config: SimConfig) -> None:
        self._rng = rng
        self._config = config
        info = runner_info(
            pages=config.pages,
            page_size=config.page_size,
            slots=config.slots,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            host_pages=config.host_pages,
            state_bytes=config.state_bytes,
            state_places=config.state_places,
            page_copy_s=config.page_copy_s,
            drafts_max=config.drafts_max,
            vector_len=VECTOR_LEN,
            state_windows=config.state_windows,
            guesses_max=config.guesses_max,
        )
        self._now = 0.0
        self._held = set[int]()
        """The slots that the last plan could compute nothing for."""
        self._runner = FakeRunner(info, config.scheduler.step_tokens_max, self._held_slots)
        disk = FakeDisk(random.Random(config.requests), lambda: self._runner) if config.disk else None
        self._grammars = FakeGrammars(
            lambda: self._now, config.vocab_size, random_delays(random.Random(config.requests))
        )
        self._scheduler = Scheduler(config.scheduler, info, disk=disk, grammars=self._grammars)
        if config.drafts_max:
            draft_by(self._scheduler, self._drafter_of)
        self.disk = disk
        self._watch = TurnWatch(self._scheduler)
        self._moments_per_check = drawn(3, whole=1) + config.pages // PAGES_CHECKED_ALWAYS
        self._moments = 0
        self._lives: dict[int, Life] = {}
        self._unfinished: dict[int, Life] = {}
        self._yields = Counter[int]()
        self._ran: list[Sequence] = []
        """The sequences that ran before the plan."""
        self._steps = 0
        self._computed_tokens = 0

    def run(self) -> Report:
        events = draw_messages(self._rng, self._config)
        at = 0
        while at < len(events) or self._next_at() < math.inf:
            deadline = self._next_at()
            self._now = max(self._now, min(deadline, events[at][0] if at < len(events) else math.inf))
            while at < len(events) and events[at][0] <= self._now:
                self._deliver(events[at][1])
                at += 1
            self._step()
        self._check_end()
        stats = self._scheduler.stats()
        return Report(
            lives=list(self._lives.values()),
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            preemptions=stats.preemptions,
            yields=self._yields.total(),
            swaps_in=stats.swaps_in,
            hit_tokens=stats.prefix_hit_tokens,
            host_tokens=stats.prefix_host_tokens,
            disk_tokens=stats.prefix_disk_tokens,
            kept_found=stats.kept_found,
            kept_evicted=stats.kept_evicted,
            states=stats.states,
            elapsed_s=self._now,
        )

    def _next_at(self) -> float:
        """The time until which nothing happens without a message."""
        return min(self._now + self._scheduler.idle_s(self._now), self._grammars.next_at)

    def _drafter_of(self, sequence: Sequence) -> Drafts:
        message, config = self._lives[sequence.handle].message, self._config
        if sequence.prediction is not None:
            return drafter_for(sequence)
        alone = solo(message.prompt_ids, message.sampling, config.vocab_size, message.grammar)
        return FakeDrafts(
            [*message.prompt_ids, *alone.tokens],
            message.sampling.stop_token_ids,
            config.vocab_size,
            config.right_share,
            random.Random(sequence.handle),
        )

    def _held_slots(self) -> set[int]:
        return self._held

    # -- one step ---------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        match message:
            case AddSequence():
                message = self._predicting(message)
                life = Life(message, self._now)
                self._lives[message.handle] = self._unfinished[message.handle] = life
                self._scheduler.add(message, self._now)
            case AbortSequences(handles):
                self._abort(handles)
            case PauseSequences(handles):
                self._pause(handles, in_flight=0)
            case ResumeSequences(handles):
                self._resume(handles)

    def _predicting(self, message: AddSequence) -> AddSequence:
        """The message with what its caller predicts, if it predicts anything: an answer that is nearly right,
        or is not."""
        config = self._config
        rng = random.Random(message.handle)  # of its own: the worlds are the same without
        if not config.drafts_max or rng.random() >= config.prediction_share or not _fits(message, config):
            return message
        answer = solo(message.prompt_ids, message.sampling, config.vocab_size, message.grammar).tokens
        wrong = rng.choice([0.0, 0.1, 0.5, 1.0])
        told = [rng.randrange(config.vocab_size) if rng.random() < wrong else token for token in answer]
        del told[: rng.choice([0, 0, 3])]
        return msgspec.structs.replace(message, prediction=array(TOKENS, told))

    def _check_laws(self) -> None:
        self._moments += 1
        if self._moments % self._moments_per_check == 0:
            check(self._scheduler)

    def _living(self, handles: list[int]) -> list[Life]:
        return [self._unfinished[handle] for handle in handles if handle in self._unfinished]

    def _abort(self, handles: list[int]) -> None:
        for life in self._living(handles):
            if life.aborted_at is None:
                life.aborted_at = self._now
        self._scheduler.abort(handles, self._now)
        self._check_laws()

    def _pause(self, handles: list[int], *, in_flight: int) -> None:
        for life in self._living(handles):
            if life.paused_at is None:
                life.paused_at, life.in_flight = self._now, in_flight
        self._scheduler.pause(handles, self._now)
        self._check_laws()

    def _resume(self, handles: list[int]) -> None:
        for life in self._living(handles):
            life.paused_at = None
        self._scheduler.resume(handles, self._now)
        self._check_laws()

    def _step(self) -> None:
        self._before_plan()
        plan = self._plan()
        if plan is not None:
            self._check_plan(plan)
            self._disturb()
            result = self._runner.run(plan)
            self._now += self._step_s(plan)
            self._steps += 1
            self._computed_tokens += sum(plan.lengths)
            self._disturb()
            self._scheduler.commit(plan, result, self._now)
            self._check_laws()
        assert self._report() or plan is None, "a step without a report"

    def _plan(self) -> Plan | None:
        plan = self._scheduler.plan(self._now)
        held = (Hold.PAUSED, Hold.MASK, Hold.DRAFTS)
        self._held = {s.slot for s in self._running() if s.hold in held and s.slot is not None}
        self._check_laws()
        if self._scheduler.has_ends:  # as the loop does: they end now, and not with the step
            self._report()
        return plan

    def _report(self) -> bool:
        output = self._scheduler.report()
        if output is not None:
            self._record(output)
        return output is not None

    def _before_plan(self) -> None:
        self._note_overdue()
        self._watch.before_plan()
        self._ran = self._running()

    def _step_s(self, plan: Plan) -> float:
        copies = len(plan.swapped_out) + len(plan.swapped_in)
        computed_s = self._config.token_s * sum(plan.lengths)
        return self._config.step_base_s + computed_s + self._config.page_copy_s * copies

    def _note_overdue(self) -> None:
        for life in self._unfinished.values():
            if life.paused_at is None or life.aborted_at is not None:
                continue
            if life.paused_at + self._config.scheduler.stall_deadline_s <= self._now:
                life.overdue.setdefault(FinishReason.STALLED, self._now)

    def _check_plan(self, plan: Plan) -> None:
        seated = {start.slot for start in plan.seated}
        for slot in {*plan.slots, *seated, *(slot for slot, _ in plan.grown)}:
            life = self._lives[in_slot(self._scheduler, slot).handle]
            assert life.paused_at is None, "a row is planned for a paused sequence"
        self._watch.after_plan(plan)
        assert self._watch.worst <= 1.0, "a sequence starves"
        self._check_yields(plan)

    def _check_yields(self, plan: Plan) -> None:
        """Assert rule J as far as it is visible from outside."""
        ran = [*self._ran, *self._running()]
        seated = [in_slot(self._scheduler, start.slot) for start in plan.seated]
        for sequence in [*self._scheduler._waiting, *seated]:
            if sequence.yields == self._yields[sequence.handle]:
                continue
            self._yields[sequence.handle] = sequence.yields
            assert any(s.tenant == sequence.tenant and age(s) < age(sequence) for s in ran)
            assert any(
                s.tenant != sequence.tenant and s.service_class >= sequence.service_class for s in seated
            )

    def _running(self) -> list[Sequence]:
        return list(self._scheduler._allocator.running.values())

    def _disturb(self) -> None:
        """Deliver messages that come while a step is in flight."""
        rng, config = self._rng, self._config

        def some(least: int) -> list[int]:
            return [rng.randint(least, len(self._lives) + 1) for _ in range(2)]

        if rng.random() < config.in_flight_abort_share:
            self._abort(some(0))
        if rng.random() < config.in_flight_pause_share:
            living = list(self._unfinished)
            self._pause([*some(0), rng.choice(living)] if living else some(0), in_flight=1)
        if rng.random() < config.in_flight_pause_share:
            paused = [handle for handle, life in self._lives.items() if life.paused_at is not None]
            self._resume([*some(0), *paused[:: rng.randint(1, 3)]])

    def _record(self, output: StepOutput) -> None:
        assert len(output.handles) == len(output.tokens)
        assert self._config.drafts_max or len(output.handles) == len(set(output.handles))
        assert len(output.logprobs) in (0, len(output.tokens))
        for started in output.started:
            life = self._open(started.handle)
            assert life.started is None, "started twice"
            assert 0 <= started.cached_len < len(life.message.prompt_ids)
            life.started = started
        for handle, entries in output.prompt_logprobs:
            self._open(handle).prompt_logprobs += entries
        for handle, vector in output.vectors:
            assert not self._open(handle).vector
            self._lives[handle].vector = vector
        for handle, scores in output.scores:
            life = self._open(handle)
            assert not life.scores, "scored twice"
            assert handle in {finished.handle for finished in output.finished}
            life.scores = scores
        for row, (handle, token) in enumerate(zip(output.handles, output.tokens, strict=True)):
            life = self._open(handle)
            assert life.started is not None
            assert life.paused_at is None or life.in_flight, "a token for a paused sequence"
            if row + 1 == len(output.handles) or output.handles[row + 1] != handle:
                life.in_flight -= life.paused_at is not None  # this was one of these tokens
            life.tokens.append(token)
            if output.logprobs and (logprobs := output.logprobs[row]) is not None:
                life.logprobs.append(logprobs)
        for handle, right, wrong in output.predicted:
            life = self._open(handle)
            life.predicted, life.mispredicted = life.predicted + right, life.mispredicted + wrong
        for finished in output.finished:
            life = self._open(finished.handle)
            life.finished, life.finished_at = finished, self._now
            del self._unfinished[finished.handle]

    def _open(self, handle: int) -> Life:
        life = self._lives[handle]
        assert life.finished is None, "something came after the end"
        return life

    # -- the end ----------------------------------------------------------------------------------

    def _check_end(self) -> None:
        check(self._scheduler)
        stats = self._scheduler.stats()
        assert (stats.waiting, stats.running, stats.pages_owned) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == self._config.pages, "not all pages came back"
        assert stats.host_pages_used <= (len(self.disk.jobs) if self.disk is not None else 0)
        assert not self._grammars.matchers, "a matcher is left"
        for life in self._lives.values():
            self._check_life(life)

    def _check_prediction(self, life: Life, finished: Finished) -> None:
        """Assert that no more of a prediction is charged than it has, and what is told of it is what was
        verified."""
        assert life.mispredicted == finished.mispredicted
        assert life.mispredicted <= len(life.message.prediction or ())
        assert life.predicted <= min(finished.accepted, len(life.tokens))
        assert life.mispredicted <= finished.drafted - finished.accepted

    def _check_life(self, life: Life) -> None:
        message, finished = life.message, life.finished
        assert finished is not None, "a sequence never ended"
        self._check_prediction(life, finished)
        spent_s = finished.queue_s + finished.prefill_s + finished.decode_s
        spent_s += finished.preempted_s + finished.stalled_s
        assert math.isclose(spent_s, _ended_at(life) - life.arrived_at, abs_tol=1e-9), "times do not add up"
        if finished.reason is FinishReason.REJECTED:
            queue_may_be_full = self._config.scheduler.queue_len_max < len(self._lives)
            assert queue_may_be_full or not _fits(message, self._config)
            assert not life.tokens
            return
        assert _fits(message, self._config)
        alone = solo(message.prompt_ids, message.sampling, self._config.vocab_size, message.grammar)
        overdue = finished.reason in life.overdue
        assert overdue == bool(life.overdue), "a deadline is not where it was"
        if overdue or finished.reason is FinishReason.ABORTED:
            assert life.tokens == alone.tokens[: len(life.tokens)]
            assert life.logprobs == alone.logprobs[: len(life.logprobs)]
            assert life.prompt_logprobs == alone.prompt_logprobs[: len(life.prompt_logprobs)]
            assert not life.scores
            return
        assert life.scores == alone.scores
        assert finished.reason is alone.reason
        assert life.vector == alone.vector
        assert life.tokens == alone.tokens
        assert life.logprobs == alone.logprobs
        if life.tokens or finished.reason is not FinishReason.GRAMMAR:  # else it may have ended at once
            assert life.prompt_logprobs == alone.prompt_logprobs


def _fits(message: AddSequence, config: SimConfig) -> bool:
    total_len = len(message.prompt_ids) + message.sampling.max_tokens
    computed_len = max(total_len - 1, len(message.prompt_ids))
    return total_len <= config.max_model_len and computed_len <= config.kv_tokens


def _ended_at(life: Life) -> float:
    """The time of a sequence's end: aborts and rejections happen between two reports, stall deadlines at a
    plan."""
    assert life.finished is not None
    if life.finished.reason is FinishReason.REJECTED:
        return life.arrived_at
    if life.finished.reason is FinishReason.ABORTED:
        assert life.aborted_at is not None, "ended as aborted without an abort"
        return life.aborted_at
    return life.overdue.get(life.finished.reason, life.finished_at)
