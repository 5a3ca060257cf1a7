"""Grammars in the scheduler and the loop, on a virtual clock: lateness, errors and ends.

`test_simulation.py` draws them into its worlds; the threads are in `test_grammar_threads.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest

from engine.contract.messages import AbortSequences, CoreInput, FinishReason, SamplingParams
from engine.core.grammars.masks import GRACE_S_MAX, Filled, MatcherStanding
from engine.core.loop import CoreLoop
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Hold
from tests.bench.engine.core_window import alone
from tests.engine.core.harness import STEP_S, Harness, greedy
from tests.engine.core.test_loop import BUDGET, ListOutbox, ScriptedInbox, TickingRunner
from tests.engine.core.test_overlap import Overlapped
from tests.fake_grammars import BAD, FakeGrammars, mask_of
from tests.fake_runner import runner_info, solo
from tests.fakes import VirtualClock

PROMPT = [1, 2, 3, 4, 5]


def long_grammar(tokens: int, sampling: SamplingParams) -> str:
    """A grammar under which this prompt's answer goes on for so many tokens."""
    names = (f"long {number}" for number in range(10_000))
    return next(name for name in names if len(solo(PROMPT, sampling, 50, name).tokens) >= tokens)


def grammar_that(reason: FinishReason, sampling: SamplingParams, tokens_min: int = 2) -> str:
    """A grammar by which the answer ends so, and not at once."""
    for number in range(10_000):
        answer = solo(PROMPT, sampling, 50, name := f"ends {number}")
        if answer.reason is reason and len(answer.tokens) >= tokens_min:
            return name
    raise AssertionError("none")


@pytest.mark.parametrize("kind", [Harness, Overlapped])
def test_a_row_whose_mask_is_late_sits_out_and_delays_nobody(kind: Callable[..., Harness]) -> None:
    late: dict[int, float] = {1: 2.5 * STEP_S}
    h = kind(fill_s=lambda handle: late.get(handle, 0.0))
    h.add(1, PROMPT, greedy(6), grammar=long_grammar(6, greedy(6)))
    h.add(2, PROMPT, greedy(20))
    h.steps(20)
    assert len(h.tokens[2]) >= 18, "the other has a token with every step"
    assert 3 <= len(h.tokens[1]) <= 6, "its own come a few steps apart"
    h.now += 1.0
    while h.scheduler.masks.sequences:
        h.now += STEP_S
        h.step()
    h.run_as_solo()


def test_overlapped_a_row_waits_for_its_last_token() -> None:
    h = Overlapped()
    h.add(1, PROMPT, greedy(8), grammar=long_grammar(8, greedy(8)))
    h.add(2, [7, 8, 9], greedy(8))
    h.launch()
    own = next(s for s in h.scheduler._allocator.running.values() if s.handle == 1)
    assert own.coming
    assert own.hold is Hold.MASK
    plan = h.launch()
    assert plan is not None
    assert len(plan.slots) == 1
    h.land()
    h.land()
    h.run_as_solo()


@pytest.mark.parametrize("kind", [Harness, Overlapped])
def test_a_matcher_in_error_ends_the_sequence_with_an_error(kind: Callable[..., Harness]) -> None:
    sampling = greedy(40)
    h = kind()
    h.add(1, PROMPT, sampling, grammar=grammar_that(FinishReason.GRAMMAR, sampling))
    h.add(2, PROMPT, sampling, grammar=BAD)
    h.add(3, PROMPT, sampling)
    h.run()
    h.assert_tokens_as_solo()
    assert [h.reason(handle) for handle in (1, 2, 3)] == [FinishReason.GRAMMAR] * 2 + [FinishReason.LENGTH]
    assert h.finished[1].grammar_s > 0.0
    assert not h.grammars.matchers


def test_a_token_that_the_matcher_does_not_take_is_an_error() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(8), grammar=long_grammar(8, greedy(8)))
    plan = h.plan()
    assert plan is not None
    forbidden = next(t for t in range(50) if not plan.masks[0][t // 8] >> t % 8 & 1)
    plan.masks[0] = mask_of([forbidden], 50)  # a sampler that is wrong
    h.finish_step(plan)
    h.step()
    assert h.tokens[1] == [forbidden]
    assert h.reason(1) is FinishReason.GRAMMAR


def test_a_complete_grammar_ends_the_sequence_where_no_end_token_may() -> None:
    """It waits for no token of the model's own end, which its request ignores; with stops it ends by one."""
    sampling = greedy(40)
    grammar = grammar_that(FinishReason.STOP, sampling)
    stopping = greedy(40, stop_token_ids=(0,))
    h = Harness()
    h.add(1, PROMPT, sampling, grammar=grammar)
    h.add(2, PROMPT, stopping, grammar=grammar)
    h.run_as_solo()
    assert h.reason(2) is FinishReason.STOP
    assert h.tokens[2][-1] == 0


def test_max_tokens_within_a_document_is_length() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(3), grammar=long_grammar(6, greedy(6)))
    h.run()
    assert h.reason(1) is FinishReason.LENGTH
    assert len(h.tokens[1]) == 3


def test_a_newcomer_waits_for_its_grammar_until_its_deadline_and_holds_nothing() -> None:
    h = Harness(fill_s=lambda handle: math.inf)
    h.add(1, PROMPT, greedy(4), first_token_s=0.5, grammar="slow")
    assert h.step() is None
    assert not h.scheduler.has_work
    assert h.scheduler.idle_s(h.now) == pytest.approx(0.5)
    assert h.scheduler.stats().pages_owned == 0
    h.now += 0.6
    h.step()
    assert h.reason(1) is FinishReason.TOO_LATE
    assert not h.grammars.matchers


def test_who_lacks_a_mask_keeps_its_slot_and_nobody_spins_meanwhile() -> None:
    h = Harness(slots=1, fill_s=lambda handle: 0.0 if not h.tokens[1] else 10 * STEP_S)
    h.tokens = {1: []}
    h.add(1, PROMPT, greedy(3), grammar=long_grammar(3, greedy(3)))
    h.step()
    h.add(2, PROMPT, greedy(1))
    h.tokens[1].append(0)  # from here on masks are late
    h.step()
    assert h.step() is None
    assert h.scheduler.has_work, "a slot would do"
    assert h.scheduler.idle_s(h.now) == math.inf
    h.now += 20 * STEP_S
    assert h.step() is not None


class Grammars(FakeGrammars):
    """Masks that come while the loop waits."""

    def __init__(self, clock: VirtualClock, late_s: float) -> None:
        super().__init__(clock.monotonic, 50, lambda handle: late_s)
        self._clock = clock

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._clock.advance(min(seconds, max(0.0, self.next_at - self._clock.monotonic()), 1.0))


class Inbox(ScriptedInbox):
    """Rings when a mask comes, as a thread does."""

    def __init__(self, clock: VirtualClock, grammars: FakeGrammars, *batches: list[CoreInput]) -> None:
        super().__init__(clock, *batches)
        self._grammars = grammars
        self.rings = 0

    def receive(self, wait_s: float) -> list[CoreInput]:
        if wait_s and (at := self._grammars.next_at) < math.inf:
            self.rings += 1
            self._clock.advance(max(0.0, at - self._clock.monotonic()))
            return []
        return super().receive(wait_s)


@pytest.mark.parametrize("late_s", [STEP_S / 20, STEP_S * 3])
def test_the_loop_sleeps_until_a_mask_is_there(late_s: float) -> None:
    """For those that are about to come a plan waits; for others where nothing else is due."""
    clock = VirtualClock()
    grammars = Grammars(clock, late_s)
    added = alone(AddSequence(1, "req", PROMPT, greedy(5), grammar=long_grammar(5, greedy(5))))
    inbox, outbox = Inbox(clock, grammars, [added]), ListOutbox()
    CoreLoop(TickingRunner(clock), inbox, outbox, SchedulerConfig(BUDGET), clock, grammars=grammars).run()
    tokens = [token for step in outbox.outputs for token in step.tokens]
    assert tokens == solo(PROMPT, greedy(5), 50, long_grammar(5, greedy(5))).tokens
    assert max(grammars.waits_s) <= GRACE_S_MAX
    assert inbox.rings <= 6, "it looks once for each mask"


def test_an_abort_finds_a_sequence_whose_mask_is_coming() -> None:
    clock = VirtualClock()
    grammars = FakeGrammars(clock.monotonic, 50, lambda handle: math.inf)
    added = alone(AddSequence(1, "req", PROMPT, greedy(5), grammar="slow"))
    inbox, outbox = ScriptedInbox(clock, [added], [AbortSequences([1])]), ListOutbox()
    CoreLoop(TickingRunner(clock), inbox, outbox, SchedulerConfig(BUDGET), clock, grammars=grammars).run()
    assert [end.reason for step in outbox.outputs for end in step.finished] == [FinishReason.ABORTED]
    assert not grammars.matchers


def test_a_mask_that_comes_after_the_end_is_dropped() -> None:
    h = Harness()
    h.add(1, PROMPT, greedy(5), grammar=long_grammar(5, greedy(5)))
    h.abort(1)
    h.grammars.take_filled = lambda: [Filled(1, b"\xff", MatcherStanding.GOES_ON, 0.0)]  # type: ignore[method-assign]
    h.add(2, PROMPT, greedy(2), grammar="another")
    assert h.step() is None
    h.abort(2)


def test_an_engine_whose_tokenizer_no_matcher_reads_fails_grammars_and_nothing_else() -> None:
    scheduler = Scheduler(SchedulerConfig(BUDGET), runner_info())
    scheduler.add(AddSequence(1, "req", PROMPT, greedy(5), grammar="any"), 0.0)
    scheduler.add(AddSequence(2, "req", PROMPT, greedy(5)), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.slots) == 1
    report = scheduler.report()
    assert report is not None
    assert [(end.handle, end.reason) for end in report.finished] == [(1, FinishReason.GRAMMAR)]


def test_steps_without_grammars_call_nothing_for_them() -> None:
    h = Harness()
    for handle in (1, 2):
        h.add(handle, [handle] * 5, greedy(40))
    h.steps(3)
    called: set[str] = set()

    def watch(frame: object, event: str, argument: object) -> None:
        called.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        for _ in range(5):
            assert h.scheduler.idle_s(h.now) == 0.0
            plan = h.scheduler.plan(h.now)
            assert plan is not None
            h.scheduler.commit(plan, h.runner.run(plan), h.now)
            assert h.scheduler.report() is not None
    finally:
        sys.setprofile(before)
    assert any(name.endswith("engine/core/scheduler.py") for name in called)
    assert not [name for name in called if "core/grammars" in name]
    assert all(not plan.masks for plan in h.plans)
