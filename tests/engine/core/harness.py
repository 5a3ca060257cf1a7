"""A scheduler and a fake runner, stepped by the test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from engine.contract.messages import (
    Finished,
    FinishReason,
    Plan,
    RunnerInfo,
    SamplingParams,
    ServiceClass,
    Started,
    StepOutput,
    TimedStep,
    TokenLogprobs,
)
from engine.core.estimate.cost import StepCost
from engine.core.queue.newcomers import AddSequence
from engine.core.queue.policy import RESPONSE_RATIO, Discipline
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Hold
from tests.core_laws import check
from tests.fake_grammars import FakeGrammars
from tests.fake_runner import FakeRunner, Solo, runner_info, solo

STEP_S = 0.01


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    """Sampling parameters with a seed that causes no numeric failure."""
    return SamplingParams(**{"seed": 1, "max_tokens": max_tokens, **fields})  # type: ignore[arg-type]


COPIES_ARE_CHEAP = StepCost(page_s=1e-9)


def knowing(scheduler: Scheduler, cost: StepCost) -> Scheduler:
    """Let a scheduler know this cost of a step, and learn no other, as from steps that all take the same
    time."""
    scheduler._learner._cost = cost
    scheduler._learner.observe = lambda work, seconds: 0.0  # type: ignore[method-assign]
    return scheduler


def guessing(info: RunnerInfo, most: int, share: float) -> RunnerInfo:
    """A runner that guesses so many tokens of a row, at such a part of a decode's time each."""
    return msgspec.structs.replace(info, drafts_max=most, guesses_max=most, guess_share=share)


class Harness:
    """`settings`: further ones of the scheduler's."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        slots: int = 8,
        max_model_len: int = 256,
        step_tokens_max: int = 64,
        queue_len_max: int = 100,
        watermark: float = 0.0,
        preemptions_max: int = 3,
        prefix_cache: bool = True,
        discipline: Discipline = RESPONSE_RATIO,
        host_pages: int = 0,
        gap_target_s: float = math.inf,
        timed_steps: tuple[TimedStep, ...] = (),
        fill_s: Callable[[int], float] = lambda handle: 0.0,
        state_bytes: int = 0,
        state_places: int = 0,
        guesses: tuple[int, float] = (0, 0.0),
        **settings: Any,
    ) -> None:
        config = SchedulerConfig(
            step_tokens_max=step_tokens_max,
            queue_len_max=queue_len_max,
            watermark=watermark,
            preemptions_max=preemptions_max,
            prefix_cache=prefix_cache,
            gap_targets_s=(gap_target_s,) * len(ServiceClass),
            **settings,
        )
        info = runner_info(
            pages=pages, page_size=page_size, slots=slots, max_model_len=max_model_len, host_pages=host_pages
        )
        info = msgspec.structs.replace(
            info, timed_steps=timed_steps, state_bytes=state_bytes, state_places=state_places
        )
        info = guessing(info, *guesses)
        self.now = 100.0
        grammars = self.grammars = FakeGrammars(lambda: self.now, info.vocab_size, fill_s)
        self.scheduler = Scheduler(config, info, discipline, grammars=grammars)
        self.runner = FakeRunner(info, step_tokens_max, self.held_slots)
        self.messages: dict[int, AddSequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.scores: dict[int, list[float]] = {}
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}
        self.plans: list[Plan] = []

    def add(
        self,
        handle: int,
        prompt_ids: list[int],
        sampling: SamplingParams,
        cache_salt: bytes = b"",
        *,
        tenant: str = "",
        service_class: ServiceClass = ServiceClass.DEFAULT,
        first_token_s: float = math.inf,
        grammar: str = "",
        has_next_turn: bool = False,
    ) -> None:
        message = AddSequence(
            handle,
            f"req_{handle}",
            prompt_ids,
            sampling,
            cache_salt,
            tenant,
            service_class,
            first_token_s,
            grammar,
            has_next_turn,
        )
        self.take(message)

    def held_slots(self) -> list[int]:
        """The slots that nothing can be computed for."""
        running = self.scheduler._allocator.running
        return [slot for slot, s in running.items() if s.hold in (Hold.PAUSED, Hold.MASK)]

    def take(self, message: AddSequence) -> None:
        self.messages[message.handle] = message
        self.tokens[message.handle] = []
        self.prompt_logprobs[message.handle] = []
        self.scheduler.add(message, self.now)

    def abort(self, *handles: int) -> None:
        self.scheduler.abort(handles, self.now)
        check(self.scheduler)

    def pause(self, *handles: int) -> None:
        self.scheduler.pause(handles, self.now)
        check(self.scheduler)

    def resume(self, *handles: int) -> None:
        self.scheduler.resume(handles, self.now)
        check(self.scheduler)

    def plan(self) -> Plan | None:
        plan = self.scheduler.plan(self.now)
        check(self.scheduler)
        if plan is not None:
            self.plans.append(plan)
        return plan

    def finish_step(self, plan: Plan) -> None:
        """Run and commit a plan."""
        result = self.runner.run(plan)
        self.now += STEP_S
        self.scheduler.commit(plan, result, self.now)
        check(self.scheduler)

    def step(self) -> Plan | None:
        """Plan, run and commit one step, and record what it reports."""
        plan = self.plan()
        if plan is not None:
            self.finish_step(plan)
        self.read()
        return plan

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self) -> None:
        """Make steps until no sequence is left that is not paused."""
        while self.scheduler.has_work or self.grammars.next_at <= self.now:
            self.step()
        self.read()

    def run_as_solo(self) -> None:
        """Run to the end, where each sequence has the tokens of its solo run and no page is held."""
        self.run()
        self.assert_all_as_solo()

    def read(self) -> StepOutput | None:
        output = self.scheduler.report()
        if output is None:
            return None
        for handle, token in zip(output.handles, output.tokens, strict=True):
            assert handle not in self.finished
            self.tokens[handle].append(token)
        for handle, entries in output.prompt_logprobs:
            self.prompt_logprobs[handle] += entries
        for handle, scores in output.scores:
            assert handle not in self.scores
            self.scores[handle] = scores
        for started in output.started:
            assert started.handle not in self.started
            self.started[started.handle] = started
        for finished in output.finished:
            assert finished.handle not in self.finished, "finished twice"
            self.finished[finished.handle] = finished
        return output

    def reason(self, handle: int) -> FinishReason:
        return self.finished[handle].reason

    def solo(self, handle: int) -> Solo:
        message = self.messages[handle]
        return solo(message.prompt_ids, message.sampling, self.runner.info.vocab_size, message.grammar)

    def assert_all_as_solo(self) -> None:
        """Assert that each sequence has the tokens of its solo run, and that all pages were released."""
        self.assert_tokens_as_solo()
        stats = self.scheduler.stats()
        assert (stats.pages_owned, stats.host_pages_used) == (0, 0)

    def assert_tokens_as_solo(self) -> None:
        for handle in self.messages:
            alone = self.solo(handle)
            assert (self.tokens[handle], self.reason(handle)) == (alone.tokens, alone.reason)
            assert self.prompt_logprobs[handle] == alone.prompt_logprobs
            assert self.scores.get(handle, []) == alone.scores
