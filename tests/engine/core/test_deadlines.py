"""First-token deadlines: met, refused at once or hurried, within what a tenant may harm others by."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from engine.contract.messages import FinishReason
from engine.core.estimate.cost import StepCost
from engine.core.queue import deadlines
from engine.core.queue.deadlines import (
    HURRY_PART,
    HURRY_S,
    HURRY_SHARE,
    LOOKED_AT_MAX,
    DeadlineQueue,
    HurryCredits,
    Rate,
)
from engine.core.step.plan_builder import PlanBuilder
from engine.core.step.planner import HURRIED_OF
from tests.bench.engine.virtual import Engine, Outcome, Request
from tests.core_laws import check
from tests.effort import some
from tests.engine.core.harness import Harness, greedy
from tests.engine.core.sequences import sequence
from tests.engine.core.test_long_prompts import CALM_STEPS, RUNNERS, beside_streams, decodes_s

SLOW = RUNNERS["474M on two cores"]


def beside(
    first_token_s: float, prompt_len: int = 8000, *more: Request
) -> tuple[Outcome, list[Outcome], list[Outcome]]:
    """The outcomes of a long prompt with this deadline, of `more` that come with it, and of eight streams."""
    at_s = CALM_STEPS * decodes_s(SLOW, 100)
    long = Request(at_s, prompt_len, 2, first_token_s=first_token_s)
    (outcome, *others), streams = beside_streams(Engine(SLOW), long, *[replace(r, at_s=at_s) for r in more])
    return outcome, others, streams


@pytest.mark.parametrize(
    "first_token_s", some([10.0, 90.0, 100.0, 300.0, 60.0, 80.0, 95.0, 105.0, 110.0, 120.0], 4)
)
def test_a_long_prompt_is_answered_in_time_or_refused_at_once(first_token_s: float) -> None:
    outcome, _, _ = beside(first_token_s)
    if outcome.reason is FinishReason.TOO_LATE:
        assert math.isnan(outcome.first_token_s)
        assert outcome.end_s < 1.0, "it was refused late"
        assert first_token_s < outcome.expected_s < 130.0
    else:
        assert outcome.first_token_s <= first_token_s
        assert first_token_s >= 60.0


def test_a_prompt_in_a_hurry_lengthens_steps_for_a_bounded_time_only() -> None:
    calm, _, _ = beside(math.inf)
    assert 90.0 < calm.first_token_s < 120.0
    hurried, _, streams = beside(calm.first_token_s - 8.0)
    assert hurried.reason is FinishReason.LENGTH
    assert hurried.first_token_s <= calm.first_token_s - 8.0
    usual_s = 2.05 * decodes_s(SLOW, 900)
    longer_s = sum(max(0.0, gap - usual_s) for gap in streams[0].gaps_s)
    assert 1.0 < longer_s <= HURRY_S + hurried.first_token_s / HURRY_PART
    assert streams[0].gap_s_max <= decodes_s(SLOW, 900) / (1.0 - HURRY_SHARE)


def test_a_deadline_changes_no_rank() -> None:
    """A shorter prompt that comes with a long one in a hurry is answered first, and hardly later."""
    short = Request(0.0, 300, 2)
    _, (without,), _ = beside(math.inf, 8000, short)
    _, (beside_hurry,), _ = beside(96.0, 8000, short)
    assert beside_hurry.first_token_s <= 1.5 * without.first_token_s


def test_a_queue_that_takes_too_long_is_counted() -> None:
    at_s = CALM_STEPS * decodes_s(SLOW, 100)
    crowd = [Request(at_s, 500, 2) for _ in range(40)]
    late = Request(at_s, 800, 2, first_token_s=30.0)
    outcomes, _ = beside_streams(Engine(SLOW), *crowd, late)
    assert outcomes[-1].reason is FinishReason.TOO_LATE
    alone, _, _ = beside(30.0, 800)
    assert alone.reason is FinishReason.LENGTH
    assert alone.first_token_s < 10.0


def test_a_sequence_ends_when_its_first_token_is_of_no_use_any_more() -> None:
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(50))
    h.step()
    h.add(2, [2] * 4, greedy(3), first_token_s=0.2)
    h.steps(19)
    assert 2 not in h.finished
    h.step()
    h.step()
    assert h.reason(2) is FinishReason.TOO_LATE
    assert h.finished[2].expected_s == 0.0
    h.run()
    assert h.reason(1) is FinishReason.LENGTH


def test_nor_does_it_end_once_its_deadline_was_lifted() -> None:
    """Its request has begun with another choice."""
    h = Harness(slots=1)
    h.add(1, [1] * 4, greedy(50))
    h.step()
    h.add(2, [2] * 4, greedy(3), first_token_s=0.2)
    h.add(3, [2] * 4, greedy(3), first_token_s=0.2)
    h.scheduler.lift_deadlines([2, 99])
    h.run()
    assert (h.reason(2), h.reason(3)) == (FinishReason.LENGTH, FinishReason.TOO_LATE)


def test_a_first_token_that_is_on_its_way_is_not_too_late() -> None:
    h = Harness()
    h.add(1, [1] * 4, greedy(3), first_token_s=5.0)
    first = h.plan()
    assert first is not None
    h.now += 10.0
    second = h.plan()
    assert second is not None
    h.finish_step(first)
    h.finish_step(second)
    h.run()
    assert h.reason(1) is FinishReason.LENGTH


def test_what_is_refused_as_too_late_is_no_sequence_of_its_tenant() -> None:
    h = Harness()
    h.add(1, [1] * 4, greedy(3), tenant="late", first_token_s=0.0)
    check(h.scheduler)
    h.run()
    assert h.reason(1) is FinishReason.TOO_LATE


def test_a_first_token_in_time_is_all_that_counts() -> None:
    h = Harness()
    h.add(1, [1] * 4, greedy(50), first_token_s=0.1)
    h.run()
    assert h.reason(1) is FinishReason.LENGTH


def test_what_a_tenant_spends_comes_back() -> None:
    purse = HurryCredits()
    assert purse.left_s("a", 5.0) == HURRY_S
    purse.spend("a", 4.0, 5.0)
    purse.spend("a", 0.0, 5.0)
    assert purse.left_s("a", 5.0) == HURRY_S - 4.0
    assert purse.left_s("b", 5.0) == HURRY_S
    assert purse.left_s("a", 5.0 + HURRY_PART) == HURRY_S - 3.0
    purse.spend("b", 1.0, 5.0 + 5 * HURRY_PART)
    assert set(purse._spent) == {"b"}, "who has everything back is forgotten"


def test_deadlines_of_the_ended_are_forgotten() -> None:
    waiting = DeadlineQueue()
    for handle in range(1000):
        waiting.add(float(handle), handle)
    waiting.forget({1, 2, 999}, 3)
    assert waiting.passed(500.0) == [1, 2]
    assert waiting.passed(1000.0) == [999]


@pytest.mark.parametrize("name", RUNNERS)
@pytest.mark.parametrize("target_s", [0.02, 0.1])
def test_the_estimate_of_a_prompt_is_near_what_it_takes(name: str, target_s: float) -> None:
    cost = RUNNERS[name]
    engine = Engine(cost, gap_targets_s=(target_s,) * 3)
    (prompt,), _ = beside_streams(engine, Request(CALM_STEPS * decodes_s(cost, 100), 4000, 2))
    own_s = decodes_s(cost, 60 + CALM_STEPS)
    prompts_s = max(target_s / 1.02 - own_s, own_s / 1.02)
    rate = Rate(own_s, prompts_s, 8, 2048)
    assert deadlines.prefill_s(cost, rate, 0, 4000) == pytest.approx(prompt.first_token_s, rel=0.12)


def test_the_estimate_of_a_runner_that_costs_nothing_is_nothing() -> None:
    free = StepCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert deadlines.prefill_s(free, Rate(0.0, 1.0, 0, 100), 0, 1000) == 0.0


def test_nothing_is_hurried_where_nothing_streams() -> None:
    rate = Rate(0.1, 0.4, 0, 100)
    assert deadlines.hurried(rate, 0.1) is rate
    estimate_s = deadlines.first_token_s(SLOW, rate, rate, [100], 0, 100, HURRY_S)
    assert estimate_s == pytest.approx(SLOW.chunk_s(0, 100) + deadlines.prefill_s(SLOW, rate, 0, 100))


@pytest.mark.parametrize("streams", [0, 8])
@pytest.mark.parametrize("rivals", [[], [1], [1, 1, 1], [10] * 200, [1, 5, 2000], [300, 3000]])
def test_no_estimate_is_above_the_most_that_it_can_be(streams: int, rivals: list[int]) -> None:
    rate = Rate(0.01, 0.02, streams, 2048)
    for cost in (SLOW, *RUNNERS.values()):
        most_s = deadlines.first_token_most_s(cost, rate, rivals, 7, 100)
        fast = deadlines.hurried(rate, 0.1)
        for before in (rivals, rivals[1:], []):
            assert deadlines.first_token_s(cost, rate, fast, before, 7, 100, HURRY_S) <= most_s * (1 + 1e-9)


# -- attacks ------------------------------------------------------------------------------------------


def lines_of(work: Callable[[], None]) -> int:
    """The lines of Python that this executes."""
    lines = 0

    def count(_: FrameType, event: str, __: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    tracer = sys.gettrace()  # that which measures coverage, for instance
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(tracer)
    return lines


@pytest.mark.parametrize("first_token_s", [0.001, 1e6])
def test_an_estimate_costs_no_more_in_a_flood(first_token_s: float) -> None:
    """One tenant asks thousands of times, with deadlines of a millisecond, or of eleven days: each time costs
    the same, however many wait."""
    h = Harness(slots=2, queue_len_max=10_000)
    for handle in (1, 2):
        h.add(handle, [1] * 8, greedy(100))
    h.steps(3)
    for handle in range(3, 3 + 2 * LOOKED_AT_MAX):
        h.add(handle, [1] * 8, greedy(2), tenant=f"t{handle % 5}")

    def flood(first: int) -> None:
        for handle in range(first, first + 25):
            h.add(handle, [1] * 8, greedy(2), tenant="thief", first_token_s=first_token_s)

    little = lines_of(lambda: flood(1000))
    for handle in range(2000, 5000):
        h.add(handle, [1] * 8, greedy(2), tenant="thief")
    much = lines_of(lambda: flood(6000))
    assert much <= 1.1 * little
    refused = first_token_s < 1.0
    assert h.scheduler.stats().waiting == 2 * LOOKED_AT_MAX + 3000 + (0 if refused else 50)


def test_estimates_of_those_that_come_together_look_at_what_runs_once() -> None:
    """Between two plans, each of a crowd's estimates costs the same, however much runs and waits."""

    def lines_of_a_crowd(slots: int) -> int:
        h = Harness(slots=slots, queue_len_max=10_000, pages=4 * slots)
        for handle in range(1, 2 * slots + 1):
            h.add(handle, [handle % 7] * 4, greedy(100))
        h.steps(2)
        h.add(1000, [1] * 4, greedy(2), first_token_s=1e6)

        def come() -> None:
            for handle in range(2000, 2025):
                h.add(handle, [1] * 4, greedy(2), first_token_s=1e6)

        return lines_of(come)

    assert lines_of_a_crowd(64) <= 1.1 * lines_of_a_crowd(2)


@pytest.mark.parametrize("change", ["pause", "resume", "abort", "step"])
def test_an_estimate_knows_what_has_changed_since_the_last(change: str) -> None:
    h = Harness(slots=2)
    for handle in (1, 2, 3):
        h.add(handle, [handle] * 8, greedy(100))
    h.steps(3)
    if change == "resume":
        h.scheduler.pause([3], h.now)
    h.add(4, [4] * 8, greedy(2), first_token_s=1e6)
    match change:
        case "pause":
            h.scheduler.pause([3], h.now)
        case "resume":
            h.scheduler.resume([3], h.now)
        case "abort":
            h.scheduler.abort([3], h.now)
        case _:
            h.steps(1)
    planner = h.scheduler._planner
    kept = planner.outlook
    assert kept is None or kept == planner._look_out()
    h.add(5, [5] * 8, greedy(2), first_token_s=1e6)
    assert planner.outlook == planner._look_out()


def test_those_who_state_short_deadlines_delay_no_other_tenant() -> None:
    """A thousand requests that want their first tokens within a millisecond are refused as they come, and
    what they wait behind is untouched; a thousand that can wait for eleven days are served by rank."""
    at_s = CALM_STEPS * decodes_s(SLOW, 100)
    victim = Request(at_s, 300, 2, tenant="victim", first_token_s=30.0)
    (calm, *_), _ = beside_streams(Engine(SLOW), victim)
    hopeless = [Request(at_s, 50, 2, tenant="thief", first_token_s=0.001) for _ in range(1000)]
    outcomes, streams = beside_streams(Engine(SLOW), *hopeless, victim)
    assert {outcome.reason for outcome in outcomes[:-1]} == {FinishReason.TOO_LATE}
    assert outcomes[-1].first_token_s <= 1.01 * calm.first_token_s
    assert max(stream.gap_s_max for stream in streams) <= 2.05 * decodes_s(SLOW, 1100)


def test_of_the_running_prompts_those_that_have_run_for_longest_may_be_hurried() -> None:
    planner = Harness().scheduler._planner
    rate = Rate(0.1, 0.1, 8, 64)
    for place, is_hurried in ((0, True), (HURRIED_OF - 1, True), (HURRIED_OF, False)):
        prefills = [sequence(handle, 0.0, prompt_len=600) for handle in range(HURRIED_OF + 2)]
        prefills[place].first_token_by = 0.5  # which its 600 tokens would miss
        builder = PlanBuilder(tokens_left=64, prefills=prefills)
        planner._hurry(builder, rate, drafts_s=0.0, now=0.0)
        assert (builder.hurried is prefills[place]) == is_hurried
        assert (builder.hurried is not None) == is_hurried
