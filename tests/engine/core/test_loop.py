from __future__ import annotations

from math import inf

import pytest

from engine.contract.messages import (
    AbortSequences,
    AddRequest,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    FinishReason,
    PauseSequences,
    Pending,
    Plan,
    ResumeSequences,
    StepOutput,
    StopCore,
)
from engine.core.loop import CoreLoop, Disconnected, last_words
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler_config import SchedulerConfig
from tests.bench.engine.core_window import alone
from tests.engine.core.harness import STEP_S, greedy
from tests.fake_runner import FakeRunner, runner_info, solo
from tests.fakes import VirtualClock

BUDGET = 64
PROMPT = [1, 2, 3, 4, 5]


class ScriptedInbox:
    """Hands over one batch of messages a call. A call that waits until a deadline waits in vain. With nothing
    left it stops the core, so no test can hang."""

    def __init__(self, clock: VirtualClock, *batches: list[CoreInput]) -> None:
        self._clock = clock
        self._batches = list(batches)
        self.waits_s: list[float] = []

    def receive(self, wait_s: float) -> list[CoreInput]:
        self.waits_s.append(wait_s)
        if 0 < wait_s < inf:
            self._clock.advance(wait_s)
            return []
        while self._batches:
            batch = self._batches.pop(0)
            if batch or not wait_s:
                return batch
        return [StopCore()] if wait_s else []


class ListOutbox:
    def __init__(self) -> None:
        self.messages: list[CoreOutput] = []

    def send(self, message: CoreOutput) -> None:
        self.messages.append(message)

    @property
    def outputs(self) -> list[StepOutput]:
        return [message for message in self.messages if isinstance(message, StepOutput)]

    @property
    def steps(self) -> list[StepOutput]:
        """The outputs that report more than admissions."""
        return [output for output in self.outputs if not output.started]


class TickingRunner(FakeRunner):
    def __init__(self, clock: VirtualClock, fails_at: int | None = None) -> None:
        super().__init__(runner_info(), BUDGET)
        self.clock = clock
        self.fails_at = fails_at

    def launch(self, plan: Plan) -> Pending:
        if plan.step == self.fails_at:
            raise RuntimeError("the device\nis lost")
        self.clock.advance(STEP_S)
        return super().launch(plan)


class World:
    def __init__(self, *batches: list[CoreInput], fails_at: int | None = None) -> None:
        clock = VirtualClock()
        self.inbox, self.outbox = ScriptedInbox(clock, *batches), ListOutbox()
        runner = TickingRunner(clock, fails_at)
        self.loop = CoreLoop(runner, self.inbox, self.outbox, SchedulerConfig(BUDGET), clock)

    def tokens(self, handle: int) -> list[int]:
        return [
            token
            for step in self.outbox.outputs
            for row, token in zip(step.handles, step.tokens, strict=True)
            if row == handle
        ]

    @property
    def ends(self) -> list[tuple[int, FinishReason]]:
        return [(end.handle, end.reason) for step in self.outbox.outputs for end in step.finished]


def add(handle: int, max_tokens: int = 4) -> AddRequest:
    return alone(AddSequence(handle, f"req_{handle}", [*PROMPT, handle], greedy(max_tokens)))


def test_the_loop_sends_ready_first_then_one_message_per_step() -> None:
    world = World([add(1)], [], [add(2)])
    world.loop.run()
    ready, *_ = world.outbox.messages
    assert isinstance(ready, CoreReady)
    assert (ready.runner.pages, ready.runner.page_size, ready.runner.slots) == (64, 4, 8)
    steps = world.outbox.steps
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    for handle in (1, 2):
        assert world.tokens(handle) == solo([*PROMPT, handle], greedy(4), 50).tokens
    assert world.outbox.steps[0].stats.step_s == pytest.approx(STEP_S)


def test_an_admission_is_reported_before_its_prompt_is_computed() -> None:
    """It is charged for its prompt even if its client leaves during that step, which may be long."""
    world = World([add(1, max_tokens=2)], [add(2, max_tokens=1)], fails_at=2)
    with pytest.raises(RuntimeError):
        world.loop.run()
    told = [(output.step, [started.handle for started in output.started]) for output in world.outbox.outputs]
    assert told == [(0, [1]), (1, []), (1, [2])]


def test_the_loop_waits_for_input_only_without_work() -> None:
    world = World([add(1, max_tokens=2)], [], [], [add(2, max_tokens=1)])
    world.loop.run()
    # idle; decode of 1 is due; idle: an empty batch is not handed to one that waits; idle
    assert world.inbox.waits_s == [inf, 0, inf, inf]
    assert [step.step for step in world.outbox.steps] == [1, 2, 3]


def test_news_without_a_step_is_reported_at_once() -> None:
    world = World([add(1), AbortSequences([1, 99])], [alone(AddSequence(2, "req_2", [], greedy(1)))])
    world.loop.run()
    assert world.ends == [(1, FinishReason.ABORTED), (2, FinishReason.REJECTED)]
    assert [(step.step, step.tokens) for step in world.outbox.steps] == [(0, []), (0, [])]


def test_a_paused_sequence_is_in_no_plan_and_resumes_where_it_was() -> None:
    world = World([add(1), add(2)], [PauseSequences([1])], [], [], [ResumeSequences([1, 99])])
    world.loop.run()
    assert [len(step.handles) for step in world.outbox.steps] == [1, 1, 1, 1, 2, 1, 1]
    assert [step.stats.stalled for step in world.outbox.steps] == [0, 1, 1, 1, 0, 0, 0]
    for handle in (1, 2):
        assert world.tokens(handle) == solo([*PROMPT, handle], greedy(4), 50).tokens


def test_with_paused_sequences_alone_the_loop_waits_for_the_first_stall_deadline() -> None:
    world = World([add(1), add(2)], [], [PauseSequences([2])], [PauseSequences([1, 7])])
    world.loop.run()
    deadline_s = SchedulerConfig().stall_deadline_s
    assert world.inbox.waits_s == pytest.approx([inf, 0, 0, 0, deadline_s - STEP_S, STEP_S, inf])
    assert world.ends == [(2, FinishReason.STALLED), (1, FinishReason.STALLED)]
    assert [len(world.tokens(handle)) for handle in (1, 2)] == [3, 1]
    paused, *_, end = world.outbox.steps[3:]
    assert (paused.step, paused.stats.stalled, paused.tokens) == (3, 2, []), "told at once, without a step"
    assert (end.stats.pages_owned, end.stats.stalled) == (0, 0)


def test_abort_cancels_before_the_next_plan() -> None:
    world = World([add(1, max_tokens=9), add(2)], [AbortSequences([1])])
    world.loop.run()
    assert len(world.tokens(1)) == 1
    assert world.ends == [(1, FinishReason.ABORTED), (2, FinishReason.LENGTH)]
    assert world.outbox.steps[-1].stats.pages_owned == 0


def test_stop_ends_the_loop_with_work_left() -> None:
    world = World([add(1)], [StopCore(), add(2)])
    world.loop.run()
    assert len(world.outbox.steps) == 1


def test_a_runner_that_fails_is_reported_and_raised() -> None:
    world = World([add(1)], fails_at=3)
    with pytest.raises(RuntimeError, match="is lost"):
        world.loop.run()
    failed = world.outbox.messages[-1]
    assert isinstance(failed, CoreFailed)
    assert failed.message.startswith("RuntimeError at ")
    assert "test_loop.py" in failed.message
    assert failed.message.endswith("the device is lost")
    assert len(world.outbox.steps) == 2


def test_last_words_are_one_line_of_bounded_length() -> None:
    words = last_words(ValueError("a\nb" * 10_000))
    assert words.startswith("ValueError: a ba b")
    assert len(words) == 500
    assert "\n" not in words


def test_the_loop_ends_when_the_api_process_is_gone() -> None:
    class Gone:
        def receive(self, wait_s: float) -> list[CoreInput]:
            raise Disconnected("gone")

    world = World()
    loop = CoreLoop(TickingRunner(VirtualClock()), Gone(), world.outbox, SchedulerConfig(BUDGET))
    loop.run()
    assert [type(message) for message in world.outbox.messages] == [CoreReady]
