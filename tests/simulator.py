"""Runs the real scheduler on a fake runner in virtual time: seeded, so every failure can be replayed.

    report = simulate(seed, SimConfig(...))

Requests arrive at random, share prefixes, come as several children of one prompt, and are aborted at
random moments: while they wait, run, are preempted, are in flight, after they ended, or never having
been. At moments as random their readers fall behind and catch up, some of them never.

Whenever anything happens laws 1 and 2 are checked (`Scheduler.check`; in large worlds only now and
then), and every plan is (`FakeRunner`), which computes nothing for a sequence that is paused; at every
admission, that nobody who waits was passed by more of those who came later than the bound of
`engine.core.policy` says; whenever a sequence yields its seat, that it was not the eldest of its tenant, and
that one of another tenant and of no lower class was seated; at the end, that every sequence ended exactly
once, that its tokens are those of its solo run (law 3), that its times add up, that it ended at a deadline
if it came to one and only then, and that all pages came back. A broken law is an AssertionError.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

from engine.bench.virtual import TurnWatch
from engine.core.config import SchedulerConfig
from engine.core.messages import (
    AbortSequences,
    AddSequence,
    Finished,
    FinishReason,
    PauseSequences,
    Plan,
    ResumeSequences,
    SamplingParams,
    ServiceClass,
    Started,
    StepOutput,
    TokenLogprobs,
)
from engine.core.policy import age
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.swap import Preference, if_cheaper
from tests.fake_runner import FakeRunner, runner_info, solo

UNBOUNDED_QUEUE = SchedulerConfig(step_tokens_max=16, queue_len_max=1_000_000, stall_deadline_s=0.5)

PAGES_CHECKED_ALWAYS = 16
"""Worlds of fewer pages are checked whenever anything happens, larger ones the more rarely the larger they
are: a check costs as much as there are pages."""

Message = AddSequence | AbortSequences | PauseSequences | ResumeSequences

Swaps = Literal["if cheaper", "always"]
PREFERENCES: Final[dict[Swaps, Preference]] = {"if cheaper": if_cheaper, "always": lambda _: True}
"""Who is swapped, of those for whom there are host pages."""
PAGE_COPY_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class SimConfig:
    requests: int = 60
    """Each brings 1 to `n_max` sequences."""
    n_max: int = 3
    pages: int = 40
    page_size: int = 4
    host_pages: int = 0
    """For those who are preempted, next to computing them again."""
    swaps: Swaps = "if cheaper"
    slots: int = 6
    vocab_size: int = 50
    prompt_len_max: int = 40
    max_tokens_max: int = 24
    max_model_len: int = 56
    """Prompts are as long as `prompt_len_max` all the same, so some are rejected."""
    prefixes: int = 4
    """Distinct beginnings that prompts share; lengths are random, some end on a page."""
    salts: int = 2
    tenants: int = 1
    classes: int = 1
    """Service classes that requests are of."""
    arrival_gap_s: float = 0.02
    abort_share: float = 0.2
    """Sequences that are aborted at a random moment."""
    in_flight_abort_share: float = 0.02
    """Steps during which some handle is aborted, known or not."""
    pause_share: float = 0.3
    """Sequences whose reader falls behind at random moments."""
    in_flight_pause_share: float = 0.02
    """Steps during which some handle is paused, and of those during which some is resumed."""
    lost_share: float = 0.1
    """Of the pauses, those that nothing ends."""
    prompt_logprobs_share: float = 0.15
    logprobs_share: float = 0.3
    step_base_s: float = 0.005
    token_s: float = 0.0005
    scheduler: SchedulerConfig = UNBOUNDED_QUEUE

    @property
    def kv_tokens(self) -> int:
        return self.pages * self.page_size


def random_config(seed: int) -> SimConfig:
    """A world nobody would think of. Some cannot serve a single prompt."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8, 16])
    max_model_len = rng.randint(8, 80)
    context_pages = max_model_len // page_size
    slots = rng.randint(1, 12)
    return SimConfig(
        requests=rng.randint(4, 40),
        n_max=rng.randint(1, 6),
        pages=max(2, rng.randint(context_pages // 2, context_pages * 4 + 2)),
        page_size=page_size,
        slots=slots,
        host_pages=rng.choice([0, 3, 1000]),
        swaps=rng.choice(list(PREFERENCES)),
        vocab_size=rng.choice([10, 50, 1000]),
        prompt_len_max=rng.randint(1, 60),
        max_tokens_max=rng.randint(1, 40),
        max_model_len=max_model_len,
        prefixes=rng.randint(1, 5),
        salts=rng.randint(1, 2),
        tenants=rng.choice([1, 2, 5]),
        classes=rng.randint(1, 3),
        arrival_gap_s=rng.choice([0.0005, 0.005, 0.05]),
        abort_share=rng.random() * rng.choice([0.0, 0.3, 1.0]),
        in_flight_abort_share=rng.random() * rng.choice([0.0, 0.3]),
        pause_share=rng.random() * rng.choice([0.0, 0.5, 1.0]),
        in_flight_pause_share=rng.random() * rng.choice([0.0, 0.3, 1.0]),
        lost_share=rng.random() * rng.choice([0.0, 0.2, 1.0]),
        prompt_logprobs_share=rng.random() * rng.choice([0.0, 0.3, 1.0]),
        scheduler=SchedulerConfig(
            step_tokens_max=slots + rng.choice([0, 1, 5, 40]),
            queue_len_max=rng.choice([3, *[1_000_000] * 3]),
            watermark=rng.choice([0.0, 0.01, 0.1, 0.5]),
            preemptions_max=rng.randint(1, 4),
            prefix_cache=rng.random() < 0.8,
            stall_deadline_s=rng.choice([0.001, 0.1, 5.0]),
        ),
    )


@dataclass(slots=True)
class Life:
    """What the API process saw of one sequence."""

    message: AddSequence
    arrived_at: float
    aborted_at: float | None = None
    """When first, if before its end."""
    paused_at: float | None = None
    in_flight: int = 0
    """Steps that were being run when it was paused, each of which may bring it one more token."""
    overdue: dict[FinishReason, float] = field(default_factory=dict)
    """By deadline: when first a step was planned after it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    lives: list[Life]
    steps: int
    computed_tokens: int
    preemptions: int
    yields: int
    swaps_out: int
    swaps_in: int
    hit_tokens: int
    elapsed_s: float

    @property
    def output_tokens(self) -> int:
        return sum(len(life.tokens) for life in self.lives)

    @property
    def displaced(self) -> int:
        """How often a stalled sequence gave its pages to others."""
        return self.preemptions - sum(life.finished.preemptions for life in self.lives if life.finished)

    @property
    def preemptions_most(self) -> int:
        """Of any one sequence."""
        return max(life.finished.preemptions for life in self.lives if life.finished)

    @property
    def reasons(self) -> Counter[FinishReason]:
        return Counter(life.finished.reason for life in self.lives if life.finished)


def simulate(seed: int, config: SimConfig) -> Report:
    """One run to the end. Raises AssertionError when a law is broken."""
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
            page_copy_s=PAGE_COPY_S,
        )
        self._runner = FakeRunner(info, config.scheduler.step_tokens_max)
        self._scheduler = Scheduler(config.scheduler, info, prefers_swap=PREFERENCES[config.swaps])
        self._watch = TurnWatch(self._scheduler)
        self._moments_per_check = 1 + config.pages // PAGES_CHECKED_ALWAYS
        self._moments = 0
        self._now = 0.0
        self._lives: dict[int, Life] = {}
        self._unfinished: dict[int, Life] = {}
        self._yields = Counter[int]()
        self._ran: list[Sequence] = []
        """Who ran before the plan."""
        self._steps = 0
        self._computed_tokens = 0

    def run(self) -> Report:
        events = self._events()
        at = 0
        while at < len(events) or self._scheduler.idle_s(self._now) < math.inf:
            deadline = self._now + self._scheduler.idle_s(self._now)
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
            swaps_out=stats.swaps_out,
            swaps_in=stats.swaps_in,
            hit_tokens=stats.prefix_hit_tokens,
            elapsed_s=self._now,
        )

    # -- the workload -----------------------------------------------------------------------------

    def _events(self) -> list[tuple[float, Message]]:
        """Arrivals, aborts, pauses and resumptions, in the order of their times."""
        rng, config = self._rng, self._config
        events: list[tuple[float, Message]] = []
        prefixes = [self._random_ids(rng.randint(1, config.prompt_len_max)) for _ in range(config.prefixes)]
        now, handle = 0.0, 0
        for _ in range(config.requests):
            now += rng.expovariate(1 / config.arrival_gap_s)
            prompt_ids = self._prompt(prefixes)
            salt = bytes([rng.randrange(config.salts)])
            for _ in range(rng.randint(1, config.n_max)):
                handle += 1
                events.append((now, self._add(handle, prompt_ids, salt)))
                if rng.random() < config.abort_share:
                    later = now + rng.expovariate(1 / 0.3)
                    events += [(later, AbortSequences([handle]))] * rng.randint(1, 2)
                if rng.random() < config.pause_share:
                    events += self._pauses(handle, now)
        return sorted(events, key=lambda event: event[0])

    def _add(self, handle: int, prompt_ids: list[int], salt: bytes) -> AddSequence:
        rng, config = self._rng, self._config
        return AddSequence(
            handle,
            f"req_{handle}",
            prompt_ids,
            self._sampling(),
            salt,
            tenant=f"tenant_{rng.randrange(config.tenants)}",
            service_class=rng.choice(list(ServiceClass)[: config.classes]),
        )

    def _pauses(self, handle: int, now: float) -> list[tuple[float, Message]]:
        rng, events = self._rng, list[tuple[float, Message]]()
        for _ in range(rng.randint(1, 4)):
            now += rng.expovariate(1 / 0.1)
            events += [(now, PauseSequences([handle]))] * rng.randint(1, 2)
            if rng.random() < self._config.lost_share:
                break
            now += rng.expovariate(1 / 0.1)
            events += [(now, ResumeSequences([handle]))] * rng.randint(1, 2)
        return events

    def _random_ids(self, length: int) -> list[int]:
        return [self._rng.randrange(self._config.vocab_size) for _ in range(length)]

    def _prompt(self, prefixes: list[list[int]]) -> list[int]:
        rng = self._rng
        prefix = rng.choice(prefixes) if rng.random() < 0.6 else []
        if prefix and rng.random() < 0.3:
            return prefix  # the same prompt again, maybe ending on a page
        return prefix + self._random_ids(rng.randint(1, max(1, self._config.prompt_len_max - len(prefix))))

    def _sampling(self) -> SamplingParams:
        rng, config = self._rng, self._config
        max_tokens = rng.randint(1, config.max_tokens_max)
        return SamplingParams(
            seed=rng.randrange(2**64),
            max_tokens=max_tokens,
            stop_token_ids=tuple(range(rng.randrange(4))),
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            logprobs=rng.randrange(3) if rng.random() < config.logprobs_share else None,
            prompt_logprobs=rng.randrange(3) if rng.random() < config.prompt_logprobs_share else None,
        )

    # -- one step ---------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        match message:
            case AddSequence():
                life = Life(message, self._now)
                self._lives[message.handle] = self._unfinished[message.handle] = life
                self._scheduler.add(message, self._now)
            case AbortSequences(handles):
                self._abort(handles)
            case PauseSequences(handles):
                self._pause(handles, in_flight=0)
            case ResumeSequences(handles):
                self._resume(handles)

    def _check_laws(self) -> None:
        self._moments += 1
        if self._moments % self._moments_per_check == 0:
            self._scheduler.check()

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
        plan = self._scheduler.plan(self._now)
        self._check_laws()
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
        output = self._scheduler.report()
        assert plan is None or output is not None, "a step without a report"
        if output is not None:
            self._record(output)

    def _before_plan(self) -> None:
        self._note_overdue()
        self._watch.before_plan()
        self._ran = self._running()

    def _step_s(self, plan: Plan) -> float:
        copies = len(plan.swapped_out) + len(plan.swapped_in)
        computed_s = self._config.token_s * sum(plan.lengths)
        return self._config.step_base_s + computed_s + PAGE_COPY_S * copies

    def _note_overdue(self) -> None:
        for life in self._unfinished.values():
            if life.paused_at is None or life.aborted_at is not None:
                continue
            if life.paused_at + self._config.scheduler.stall_deadline_s <= self._now:
                life.overdue.setdefault(FinishReason.STALLED, self._now)

    def _check_plan(self, plan: Plan) -> None:
        seated = {start.slot for start in plan.seated}
        for slot in {*plan.slots, *seated, *(slot for slot, _ in plan.grown)}:
            life = self._lives[self._scheduler.running(slot).handle]
            assert life.paused_at is None, "something is planned that nobody reads"
        self._watch.after_plan(plan)
        assert self._watch.worst <= 1.0, "somebody starves"
        self._check_yields(plan)

    def _check_yields(self, plan: Plan) -> None:
        """Rule J of the scheduler, as far as it is seen from outside."""
        ran = [*self._ran, *self._running()]
        seated = [self._scheduler.running(start.slot) for start in plan.seated]
        for sequence in [*self._scheduler.unpaused, *seated]:
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
        """Messages that come while a step is being run."""
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
        assert len(output.handles) == len(output.tokens) == len(set(output.handles))
        assert len(output.logprobs) in (0, len(output.tokens))
        for started in output.started:
            life = self._open(started.handle)
            assert life.started is None, "started twice"
            assert 0 <= started.cached_len < len(life.message.prompt_ids)
            life.started = started
        for handle, entries in output.prompt_logprobs:
            self._open(handle).prompt_logprobs += entries
        for row, (handle, token) in enumerate(zip(output.handles, output.tokens, strict=True)):
            life = self._open(handle)
            assert life.started is not None
            assert life.paused_at is None or life.in_flight, "a token that nobody reads"
            life.in_flight -= life.paused_at is not None  # there was one of these
            life.tokens.append(token)
            if output.logprobs and (logprobs := output.logprobs[row]) is not None:
                life.logprobs.append(logprobs)
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
        self._scheduler.check()
        stats = self._scheduler.stats()
        assert (stats.waiting, stats.running, stats.pages_owned) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == self._config.pages, "not all pages came back"
        assert (stats.host_pages_used, stats.host_pages_free) == (0, self._config.host_pages)
        for life in self._lives.values():
            self._check_life(life)

    def _check_life(self, life: Life) -> None:
        message, finished = life.message, life.finished
        assert finished is not None, "a sequence never ended"
        spent_s = finished.queue_s + finished.prefill_s + finished.decode_s
        spent_s += finished.preempted_s + finished.stalled_s
        assert math.isclose(spent_s, _ended_at(life) - life.arrived_at, abs_tol=1e-9), "times do not add up"
        if finished.reason is FinishReason.REJECTED:
            queue_may_be_full = self._config.scheduler.queue_len_max < len(self._lives)
            assert queue_may_be_full or not _fits(message, self._config)
            assert not life.tokens
            return
        assert _fits(message, self._config)
        alone = solo(message.prompt_ids, message.sampling, self._config.vocab_size)
        overdue = finished.reason in life.overdue
        assert overdue == bool(life.overdue), "a deadline is not where it was"
        if overdue or finished.reason is FinishReason.ABORTED:
            assert life.tokens == alone.tokens[: len(life.tokens)]
            assert life.logprobs == alone.logprobs[: len(life.logprobs)]
            assert life.prompt_logprobs == alone.prompt_logprobs[: len(life.prompt_logprobs)]
            return
        assert finished.reason is alone.reason
        assert life.tokens == alone.tokens
        assert life.logprobs == alone.logprobs
        assert life.prompt_logprobs == alone.prompt_logprobs


def _fits(message: AddSequence, config: SimConfig) -> bool:
    total_len = len(message.prompt_ids) + message.sampling.max_tokens
    return total_len <= config.max_model_len and total_len - 1 <= config.kv_tokens


def _ended_at(life: Life) -> float:
    """Aborts and rejections take place between two reports, stall deadlines when a step is planned."""
    assert life.finished is not None
    if life.finished.reason is FinishReason.REJECTED:
        return life.arrived_at
    if life.finished.reason is FinishReason.ABORTED:
        assert life.aborted_at is not None, "aborted by nobody"
        return life.aborted_at
    return life.overdue.get(life.finished.reason, life.finished_at)
