"""The real scheduler on a runner that only takes virtual time: an hour's traffic in seconds.

    outcomes = run(requests, engine)

Every decision is the scheduler's own; a step takes the time that `Engine.cost` gives, and tokens mean
nothing.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final
from unittest import mock

from engine.contract.messages import (
    FinishReason,
    Plan,
    RunnerInfo,
    RunResult,
    SamplingParams,
    ServiceClass,
    StepOutput,
    TimedStep,
    Want,
)
from engine.core.drafts.drafter import Drafts, Proposal
from engine.core.drafts.price import CHANCE_MAX
from engine.core.estimate.cost import StepCost, Work
from engine.core.queue.newcomers import AddSequence
from engine.core.queue.policy import OLDEST_EVERY, RESPONSE_RATIO, Discipline
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence as Admitted
from engine.core.sequence import Status
from engine.core.step.planner import Planner
from tests.bench.engine.core_window import draft_by, due, holdings, in_slot, is_following

VOCAB_SIZE: Final = 1000
SAMPLED: Final = 0
"""The token that all answers consist of."""
DRAFTS_MAX: Final = 15
UNBOUNDED: Final = 1_000_000
UNBOUNDED_GAPS: Final = (math.inf,) * len(ServiceClass)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that arrives at `at_s` of virtual time."""

    at_s: float
    prompt_len: int
    output_len: int
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.DEFAULT
    first_token_s: float = math.inf
    """The time from its arrival after which its first token is of no use, in seconds."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The runner's model, and the scheduler's settings."""

    cost: StepCost
    pages: int = 8192
    page_size: int = 64
    slots: int = 256
    step_tokens_max: int = 2048
    gap_targets_s: tuple[float, ...] = (0.1,) * len(ServiceClass)
    prompt_share: float = 0.5
    host_pages: int = 0
    """Pages in host memory, behind a prefix cache. 0: neither, and a preempted sequence is computed again."""
    discipline: Discipline = RESPONSE_RATIO
    planner: type[Planner] = Planner
    noise: float = 0.0
    """The largest share of its time by which a step takes longer or shorter, at random."""
    noise_seed: int = 1
    drafter_of: Callable[[Admitted], Drafts] | None = None
    """What sequences draft by; None: nothing is."""
    warm_cost: StepCost | None = None
    """The cost of the steps that are timed while warming up; None: as of all others."""
    is_measured: bool = True
    """False if no step is timed while warming up."""


@dataclass(slots=True)
class Outcome:
    """The times of one request, in seconds of virtual time."""

    request: Request
    first_token_s: float = math.nan
    """Time from its arrival to its first token."""
    end_s: float = math.nan
    """Time from its arrival to its end."""
    gaps_s: array[float] = field(default_factory=lambda: array("d"), repr=False)
    """Times between its tokens."""
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    reason: FinishReason | None = None
    expected_s: float = 0.0
    """The estimate with which it was refused as too late."""
    _last_token_at: float = field(default=math.nan, repr=False)

    def on_token(self, now: float) -> None:
        if math.isnan(self.first_token_s):
            self.first_token_s = now - self.request.at_s
        else:
            self.gaps_s.append(now - self._last_token_at)
        self._last_token_at = now

    @property
    def gap_s_max(self) -> float:
        return max(self.gaps_s, default=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """The outcomes of one traffic under one discipline."""

    outcomes: list[Outcome]
    makespan_s: float
    steps: int
    bound_use: float
    """The most that any sequence used of its bound on waiting (`engine.core.queue.policy`), as a share; 1
    reaches it."""


class TurnWatch:
    """Counts for each waiting sequence how many later arrivals were admitted before it, and how many earlier
    ones were admitted, which is what its bound on waiting depends on.

    Later arrivals of another tenant count only in plans before and after which none of its own tenant ran. A
    sequence that leaves the queue, is paused or follows another is counted anew after that.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue: dict[int, tuple[float, Status, str]] = {}
        self._tenants: set[str] = set()
        """The tenants that ran sequences before the plan or after it."""
        self._passed_by: dict[int, int] = {}
        self._older_admitted: dict[int, int] = {}
        self.worst: float = 0.0

    def before_plan(self) -> None:
        self._queue = {s.handle: (s.arrived_at, s.status, s.tenant) for s in due(self._scheduler)}
        self._statuses = {s.handle: s.status for s in self._scheduler._waiting}
        self._tenants = set(holdings(self._scheduler).slots)
        self._forget_others()

    def _forget_others(self) -> None:
        for counts in (self._passed_by, self._older_admitted):
            for handle in counts.keys() - self._queue.keys():
                del counts[handle]

    def after_plan(self, plan: Plan) -> None:
        seated = [in_slot(self._scheduler, start.slot) for start in plan.seated]
        self._tenants |= holdings(self._scheduler).slots.keys()
        waiting = [s for s in due(self._scheduler) if not is_following(self._scheduler, s)]
        here = {s.handle for s in (*waiting, *seated)}
        self._queue = {handle: entry for handle, entry in self._queue.items() if handle in here}
        self._forget_others()
        for admitted in seated:
            self._queue.pop(admitted.handle, None)
            status = self._statuses.get(admitted.handle, Status.PREEMPTED)  # it may have become due meanwhile
            self._passed_by.pop(admitted.handle, None)
            self._older_admitted.pop(admitted.handle, None)
            self._count(admitted, brings_pages=status is Status.STALLED)

    def _count(self, admitted: Admitted, *, brings_pages: bool) -> None:
        for other, (arrived_at, status, tenant) in self._queue.items():
            if status is Status.STALLED:
                continue
            if (admitted.arrived_at, admitted.handle) < (arrived_at, other):
                self._older_admitted[other] = self._older_admitted.get(other, 0) + 1
            elif not brings_pages and (tenant == admitted.tenant or tenant not in self._tenants):
                passed_by = self._passed_by[other] = self._passed_by.get(other, 0) + 1
                bound = (OLDEST_EVERY - 1) * (self._older_admitted.get(other, 0) + 1)
                self.worst = max(self.worst, passed_by / bound)


def run(requests: Sequence[Request], engine: Engine, awaited: slice = slice(None)) -> Run:
    """Serve these requests, which are in the order of their arrival, until those that are awaited have
    ended."""
    return _Virtual(requests, engine).run(awaited)


def tokens_per_second(streams: int, steps: int, engine: Engine, prompt_len: int = 2) -> float:
    """The tokens per second of so many streams in the first steps in which they are together, and none of
    them ends."""
    requests = [Request(0.0, prompt_len, 2 * DRAFTS_MAX * (steps + streams))] * streams
    virtual = _Virtual(requests, engine)
    for handle, request in enumerate(requests):
        virtual.add(handle, request)
    while any(math.isnan(outcome.first_token_s) for outcome in virtual.outcomes):
        virtual.step()
    began_at, had = virtual.now, sum(len(outcome.gaps_s) for outcome in virtual.outcomes)
    for _ in range(steps):
        virtual.step()
    return (sum(len(outcome.gaps_s) for outcome in virtual.outcomes) - had) / (virtual.now - began_at)


class _Virtual:
    def __init__(self, requests: Sequence[Request], engine: Engine) -> None:
        len_max = max(request.prompt_len + request.output_len for request in requests)
        info = RunnerInfo(
            engine.pages,
            engine.page_size,
            engine.slots,
            len_max,
            VOCAB_SIZE,
            "virtual",
            load_s=0.0,
            warmup_s=0.0,
            host_pages=engine.host_pages,
            page_copy_s=engine.cost.page_s if engine.host_pages else 0.0,
            timed_steps=timed_steps(engine.warm_cost or engine.cost) if engine.is_measured else (),
            drafts_max=DRAFTS_MAX if engine.drafter_of else 0,
        )
        config = SchedulerConfig(
            step_tokens_max=engine.step_tokens_max,
            queue_len_max=UNBOUNDED,
            prefix_cache=engine.host_pages > 0,
            gap_targets_s=engine.gap_targets_s,
            prompt_share=engine.prompt_share,
        )
        self._cost, self._noise, self._rng = engine.cost, engine.noise, random.Random(engine.noise_seed)
        with mock.patch("engine.core.scheduler.Planner", engine.planner):
            self._scheduler = Scheduler(config, info, engine.discipline)
        if engine.drafter_of is not None:
            draft_by(self._scheduler, engine.drafter_of)
        self._watch = TurnWatch(self._scheduler)
        self._requests = requests
        self.outcomes = [Outcome(request) for request in requests]
        self.now = 0.0
        self._steps = 0

    def run(self, awaited: slice) -> Run:
        arrived, left = 0, self.outcomes[awaited]
        while left:
            if not self._scheduler.has_work:
                self.now = max(self.now, self._requests[arrived].at_s)
            while arrived < len(self._requests) and self._requests[arrived].at_s <= self.now:
                self.add(arrived, self._requests[arrived])
                arrived += 1
            self.step()
            while left and not math.isnan(left[-1].end_s):
                left.pop()
        return Run(self.outcomes, self.now, self._steps, self._watch.worst)

    def add(self, handle: int, request: Request) -> None:
        self._scheduler.add(_message(handle, request), request.at_s)

    def step(self) -> None:
        self._watch.before_plan()
        plan = self._scheduler.plan(self.now)
        if plan is not None:
            self._watch.after_plan(plan)
            copied_pages = len(plan.swapped_out) + len(plan.swapped_in)
            work = replace(work_of(plan), copied_pages=copied_pages)
            self.now += self._cost.seconds(work) * (1.0 + self._noise * self._rng.uniform(-1.0, 1.0))
            self._steps += 1
            self._scheduler.commit(plan, RunResult([SAMPLED] * plan.sampled, [], []), self.now)
        output = self._scheduler.report()
        if output is not None:
            self._record(output)

    def _record(self, output: StepOutput) -> None:
        for handle in output.handles:
            self.outcomes[handle].on_token(self.now)
        for finished in output.finished:
            outcome = self.outcomes[finished.handle]
            outcome.end_s = self.now - outcome.request.at_s
            outcome.preemptions = finished.preemptions
            outcome.drafted, outcome.accepted = finished.drafted, finished.accepted
            outcome.reason, outcome.expected_s = finished.reason, finished.expected_s


def work_of(plan: Plan, rows: Iterable[int] | None = None, longer: int | None = None) -> Work:
    """The work of a plan, or of these of its rows, of which row `longer` has one token more."""
    verifying = [i for i, want in enumerate(plan.wants) if want is Want.VERIFY]
    drafts = dict(zip(verifying, plan.drafts, strict=True))
    asked = range(len(plan.slots)) if rows is None else rows
    others = [i for i in asked if i not in drafts]
    work = Work.of(
        [plan.positions[i] for i in others],
        [plan.lengths[i] + (i == longer) for i in others],
        seats=len(plan.seated) if rows is None else 0,
    )
    own = [i for i in asked if i in drafts]
    return work.verifying([plan.positions[i] for i in own], [drafts[i] for i in own])


class DraftedAs(Enum):
    """The token of which all drafts consist."""

    RIGHT = SAMPLED
    WRONG = SAMPLED + 1


@dataclass(slots=True)
class SureDrafts:
    """Implements `engine.core.drafts.drafter.Drafts`: as many as may be, of whose chance it is always as
    sure."""

    kind: DraftedAs
    size: int = 1
    pause: int = 1
    read_len: int = 0
    has_read: bool = True

    def look(self, tokens: array[int], most: int, read_max: int) -> Proposal | None:
        return Proposal([self.kind.value] * most, CHANCE_MAX, 0)

    def forced(self) -> Proposal:
        return Proposal([], CHANCE_MAX, 0)

    def take(self, draft: Proposal) -> None:
        """Learns nothing."""

    def pass_over(self) -> None:
        """Learns nothing."""

    def learn(self, drafts: int, right: int) -> int:
        return 0


def timed_steps(cost: StepCost) -> tuple[TimedStep, ...]:
    """The timings of a runner of this cost while it warms up (`engine.runtime.start.starting`)."""
    shapes = [([64], [1]), ([64] * 8, [1] * 8), ([0], [64]), ([0], [256]), ([1024], [16]), ([1024], [1])]
    return tuple(
        TimedStep(positions, lengths, cost.seconds(Work.of(positions, lengths)))
        for positions, lengths in shapes
    )


def _message(handle: int, request: Request) -> AddSequence:
    return AddSequence(
        handle,
        f"req_{handle}",
        [1] * request.prompt_len,
        SamplingParams(seed=1, max_tokens=request.output_len),
        str(handle).encode(),  # its own salt: nothing is shared
        tenant=request.tenant,
        service_class=request.service_class,
        first_token_s=request.first_token_s,
    )
