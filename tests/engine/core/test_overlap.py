"""Overlapped steps: plans that are made before the step before is committed, and results that are dropped.

The runner (`tests.async_runner`) executes a plan no earlier than it is collected, and asserts at every launch
that no slot and no page is touched that a step in flight uses for another sequence.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any

import pytest

from engine.contract.messages import (
    AbortSequences,
    CoreInput,
    CoreReady,
    FinishReason,
    Plan,
    ServiceClass,
    StopCore,
)
from engine.core.loop import CoreLoop
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import STEPS_AHEAD_MAX
from engine.core.scheduler_config import SchedulerConfig
from tests.async_runner import AsyncRunner, Flight
from tests.bench.engine.core_window import alone, in_slot
from tests.core_laws import check
from tests.engine.core.harness import STEP_S, Harness, greedy
from tests.engine.core.test_loop import BUDGET, ListOutbox, ScriptedInbox, add
from tests.fake_runner import NUMERIC_SEEDS, runner_info, solo
from tests.fakes import VirtualClock

PROMPT = list(range(1, 11))


class Overlapped(Harness):
    """A harness whose `step` launches the next plan, then collects and commits the one before it."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.runner: AsyncRunner = AsyncRunner(
            self.runner.info, fields.get("step_tokens_max", 64), self.held_slots
        )
        self.flying: deque[tuple[Plan, Flight]] = deque()

    @property
    def seated(self) -> dict[int, int]:
        """The slots of running sequences, by handle."""
        found = {}
        for slot in range(self.runner.info.slots):
            try:
                found[in_slot(self.scheduler, slot).handle] = slot
            except KeyError:
                continue
        return found

    def launch(self) -> Plan | None:
        plan = self.plan()
        if plan is not None:
            self.flying.append((plan, self.runner.launch(plan)))
        return plan

    def land(self) -> None:
        plan, flight = self.flying.popleft()
        result = flight.collect()
        self.now += STEP_S
        self.scheduler.commit(plan, result, self.now)
        check(self.scheduler)

    def step(self) -> Plan | None:
        if len(self.flying) > STEPS_AHEAD_MAX:
            self.land()
        plan = self.launch()
        if len(self.flying) > (plan is not None):
            self.land()
        self.read()
        return plan

    def run(self) -> None:
        while self.scheduler.has_work or self.flying or self.grammars.next_at <= self.now:
            self.step()

    @property
    def rows(self) -> int:
        return sum(len(plan.slots) for plan in self.plans)


def stopping(handle: int, after: int) -> dict[str, Any]:
    """Sampling fields with which a sequence of PROMPT + [handle] stops at its token number `after`."""
    tokens = solo([*PROMPT, handle], greedy(after, seed=handle), 50).tokens
    assert tokens[-1] not in tokens[:-1], "choose another"
    return {"seed": handle, "stop_token_ids": (tokens[-1],)}


# -- the loop -------------------------------------------------------------------------------------


class World:
    def __init__(self, *batches: list[CoreInput], overlap: bool) -> None:
        clock = VirtualClock()
        self.inbox, self.outbox = ScriptedInbox(clock, *batches), ListOutbox()
        self.runner = AsyncRunner(runner_info(), BUDGET)
        config = SchedulerConfig(BUDGET)
        self.loop = CoreLoop(self.runner, self.inbox, self.outbox, config, clock, overlap=overlap)

    def tokens(self, handle: int) -> list[int]:
        steps = self.outbox.outputs
        return [t for step in steps for h, t in zip(step.handles, step.tokens, strict=True) if h == handle]


def test_a_step_is_launched_before_the_one_before_it_is_collected() -> None:
    world = World([add(1)], overlap=True)
    world.loop.run()
    assert world.runner.events == [
        ("launch", 1),
        ("launch", 2), ("collect", 1),
        ("launch", 3), ("collect", 2),
        ("launch", 4), ("collect", 3),
        ("collect", 4),
    ]  # fmt: skip
    assert world.tokens(1) == solo([*PROMPT[:5], 1], greedy(4), 50).tokens
    assert [step.step for step in world.outbox.steps] == [1, 2, 3, 4]


def test_the_plain_loop_collects_each_step_before_it_plans_the_next() -> None:
    world = World([add(1, max_tokens=2)], overlap=False)
    world.loop.run()
    assert world.runner.events == [("launch", 1), ("collect", 1), ("launch", 2), ("collect", 2)]


@pytest.mark.parametrize("overlap", [False, True])
def test_ready_reports_whether_steps_overlap(overlap: bool) -> None:
    world = World(overlap=overlap)
    world.loop.run()
    ready = world.outbox.messages[0]
    assert isinstance(ready, CoreReady)
    assert ready.overlap is overlap


def test_the_loop_does_not_wait_for_messages_while_a_late_row_is_in_flight() -> None:
    stops = alone(AddSequence(1, "req_1", [*PROMPT, 1], greedy(20, **stopping(1, after=2))))
    world = World([stops], overlap=True)
    world.loop.run()
    assert world.inbox.waits_s == [inf, 0, 0, 0, inf], "the last 0 is for a step without a living sequence"
    assert world.runner.events[-1] == ("collect", 3)
    assert len(world.tokens(1)) == 2
    assert world.outbox.steps[-1].stats.pages_owned == 0


def test_abort_with_a_step_in_flight_cancels_at_once_and_frees_pages_at_its_commit() -> None:
    world = World([add(1)], [], [AbortSequences([1])], [], overlap=True)
    world.loop.run()
    assert world.runner.events[-1] == ("collect", 2)
    assert [end.reason for step in world.outbox.outputs for end in step.finished] == [FinishReason.ABORTED]
    assert world.outbox.steps[-1].stats.pages_owned == 0


def test_the_loop_can_be_stopped_with_a_step_in_flight() -> None:
    world = World([add(1)], [StopCore()], overlap=True)
    world.loop.run()
    assert world.runner.events == [("launch", 1)]


# -- late rows ------------------------------------------------------------------------------------


def test_a_stop_token_leaves_one_late_row_whose_result_is_dropped() -> None:
    h = Overlapped()
    h.add(1, [*PROMPT, 1], greedy(20, **stopping(1, after=3), logprobs=1))
    h.add(2, [*PROMPT, 2], greedy(9, seed=2, logprobs=1))
    while 1 not in h.finished:
        plan = h.step()
    assert plan is not None
    assert h.reason(1) is FinishReason.STOP
    late = set(plan.slots) - set(h.seated.values())
    assert len(late) == 1, "its row is in flight still"
    assert h.finished[1].late_tokens == 1
    held = h.scheduler.stats()
    following = h.step()
    assert following is not None
    assert following.left == list(late)
    assert held.pages_owned > h.scheduler.stats().pages_owned, "given back with the late row, not before"
    h.run_as_solo()


def test_no_row_is_planned_behind_the_last_token() -> None:
    h = Overlapped()
    h.add(1, PROMPT, greedy(5))
    h.run_as_solo()
    assert (h.rows, h.finished[1].late_tokens) == (5, 0)
    assert h.runner.overlaps == 4


def test_a_row_behind_a_numeric_failure_is_dropped_and_its_pages_forgotten() -> None:
    h = Overlapped()
    prompt = [*PROMPT, 7]
    seed = next(
        s
        for s in range(0, NUMERIC_SEEDS * 400, NUMERIC_SEEDS)
        if solo(prompt, greedy(20, seed=s), 50).reason is FinishReason.NUMERIC
        and 2 <= len(solo(prompt, greedy(20, seed=s), 50).tokens) <= 6
    )
    h.add(1, prompt, greedy(20, seed=seed))
    h.run_as_solo()
    assert h.rows == len(h.tokens[1]) + h.finished[1].late_tokens
    assert h.finished[1].late_tokens == 2, "the row that failed, and a late one"
    assert h.scheduler.stats().pages_cached == 0, "its pages are no prefix of others"


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode"])
@pytest.mark.parametrize("stage", ["before plan", "planned", "launched", "collected", "committed"])
def test_abort_cancels_a_sequence_at_any_stage(state: str, stage: str) -> None:
    h = Overlapped(slots=2, step_tokens_max=8, pages=24)
    victim, others = 1, (2, 3, 4)
    h.add(victim, [*PROMPT, 1, 2, 3], greedy(20))
    if state == "decode":
        while not h.tokens[victim]:
            h.step()
    for handle in others:
        h.add(handle, [*PROMPT, handle], greedy(6, seed=handle))
    if state == "prefill":
        h.launch()
    if stage == "before plan":
        h.abort(victim)
    plan = h.plan()
    if stage == "planned":
        h.abort(victim)
    if plan is not None:
        h.flying.append((plan, h.runner.launch(plan)))
    if stage == "launched":
        h.abort(victim)
    if stage == "collected":
        first, flight = h.flying.popleft()
        result = flight.collect()
        h.abort(victim)
        h.scheduler.commit(first, result, h.now)
        check(h.scheduler)
    elif h.flying:
        h.land()
    h.abort(victim, victim)  # the second time changes nothing
    h.read()
    before = list(h.tokens[victim])
    h.run()
    assert h.reason(victim) is FinishReason.ABORTED
    assert h.tokens[victim] == before == h.solo(victim).tokens[: len(before)]
    for handle in others:
        assert (h.tokens[handle], h.reason(handle)) == (h.solo(handle).tokens, h.solo(handle).reason)
    stats = h.scheduler.stats()
    assert (stats.pages_owned, stats.running, stats.waiting) == (0, 0, 0)


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_what_is_in_flight_at_an_abort_is_told_as_late(in_flight: int) -> None:
    h = Overlapped()
    h.add(1, PROMPT, greedy(20))
    for _ in range(in_flight):
        h.launch()
    h.abort(1)
    while h.flying:
        h.land()
    h.read()
    assert (h.tokens[1], h.finished[1].late_tokens) == ([], in_flight)


def test_late_prompt_logprobs_are_dropped() -> None:
    h = Overlapped(step_tokens_max=8)
    h.add(1, list(range(30)), greedy(4, prompt_logprobs=1))
    h.step()
    h.launch()
    h.abort(1)
    h.read()
    sent = list(h.prompt_logprobs[1])
    h.land()
    h.land()
    h.read()
    assert h.prompt_logprobs[1] == sent == []


# -- fences ---------------------------------------------------------------------------------------


def test_a_slot_is_not_handed_on_before_the_late_row_is_committed() -> None:
    h = Overlapped(slots=1)
    for handle in range(1, 5):
        h.add(handle, [*PROMPT, handle], greedy(20, **stopping(handle, after=2)))
    h.run_as_solo()
    seating = [plan.step for plan in h.plans if plan.seated]
    assert len(seating) == 4
    for step in seating[1:]:
        at = h.runner.events.index(("launch", step))
        assert h.runner.events[at - 1] == ("collect", step - 1), "nothing of the last owner is in flight"


def test_pages_of_an_ended_sequence_are_not_free_before_its_late_row_is_committed() -> None:
    h = Overlapped(pages=8, prefix_cache=False)
    h.add(1, [1] * 12, greedy(9))
    h.launch()
    h.add(2, [2] * 24, greedy(2))
    h.abort(1)
    owned = h.scheduler.stats().pages_owned
    assert h.launch() is None, "it would fit, if not for the pages that are still written"
    h.land()
    assert owned > h.scheduler.stats().pages_owned == 0
    h.run()
    assert h.tokens[2] == h.solo(2).tokens


def test_a_page_is_found_by_others_only_when_its_tokens_are_known() -> None:
    h = Overlapped(page_size=4, step_tokens_max=64)
    h.add(1, [*PROMPT, 1], greedy(3))
    h.launch()
    h.add(2, [*PROMPT, 2, 2], greedy(3))
    second = h.launch()
    assert second is not None
    assert not second.seated, "it waits for what the other computes (rule D)"
    h.land()
    third = h.launch()
    assert third is not None
    assert third.seated
    h.run_as_solo()
    assert h.started[2].cached_len == 8


def test_sequences_with_one_prompt_compute_it_once() -> None:
    plain, overlapped = Harness(step_tokens_max=16), Overlapped(step_tokens_max=16)
    for h in (plain, overlapped):
        for child in range(1, 5):
            h.add(child, [9] * 40, greedy(4, seed=child))
        h.run_as_solo()
    computed = [sum(sum(plan.lengths) for plan in h.plans) for h in (plain, overlapped)]
    assert computed[0] == computed[1]


def test_abort_cancels_one_of_several_choices_in_its_final_step() -> None:
    h = Overlapped()
    for child in (1, 2, 3):
        h.add(child, [9] * 9, greedy(4, seed=child))
    while len(h.tokens[2]) < 3:
        h.step()
    assert h.flying, "its last token is coming"
    h.abort(2, 12)
    h.run()
    assert h.reason(2) is FinishReason.ABORTED
    assert len(h.tokens[2]) == 3
    for child in (1, 3):
        assert h.tokens[child] == h.solo(child).tokens


# -- giving way -----------------------------------------------------------------------------------


def test_no_running_sequence_is_preempted_while_a_step_is_in_flight() -> None:
    h = Overlapped(pages=8)
    h.add(1, [1] * 8, greedy(20))
    h.add(2, [2] * 8, greedy(20))
    while (plan := h.step()) is not None:
        pass
    assert h.scheduler.stats().preemptions == 0, "the plan waits"
    assert not h.flying
    plan = h.launch()
    assert plan is not None
    assert h.scheduler.stats().preemptions == 1
    h.run_as_solo()


def test_overlapped_steps_preempt_no_more_than_plain_ones_in_a_tight_pool() -> None:
    """None is preempted because the pages of the last victim are not free yet."""
    plain, overlapped = Harness(pages=14, slots=6), Overlapped(pages=14, slots=6)
    for h in (plain, overlapped):
        for handle in range(1, 7):
            h.add(handle, [handle] * 6, greedy(18, seed=handle))
        h.run_as_solo()
    counts = [h.scheduler.stats().preemptions for h in (plain, overlapped)]
    assert 0 < counts[1] <= counts[0] + 1
    assert overlapped.runner.overlaps > len(overlapped.plans) / 2


def test_a_higher_class_preempts_at_the_first_plan_without_a_step_in_flight() -> None:
    h = Overlapped(slots=1)
    h.add(1, PROMPT, greedy(30), service_class=ServiceClass.FLEX)
    h.steps(4)
    h.add(2, [*PROMPT, 2], greedy(3), service_class=ServiceClass.PRIORITY)
    plans = [h.step() for _ in range(3)]
    assert [plan is None for plan in plans] == [False, True, False]
    assert plans[2] is not None
    assert plans[2].seated
    h.run_as_solo()
    assert h.finished[1].preemptions == 1


def test_a_resubmitted_prompt_that_ends_on_a_page_leaves_a_token_to_compute() -> None:
    h = Overlapped(pages=9)
    for handle in (1, 2, 3):
        h.add(handle, [5] * 12, greedy(8, seed=handle))
    h.run_as_solo()
    assert h.scheduler.stats().prefix_hit_tokens > 0


# -- readers who fall behind ----------------------------------------------------------------------


@pytest.mark.parametrize("flights", [1, 2])
def test_tokens_in_flight_at_a_pause_still_count(flights: int) -> None:
    h = Overlapped()
    h.add(1, PROMPT, greedy(9))
    h.add(2, [*PROMPT, 2], greedy(20))
    h.steps(3)
    if flights == 2:
        h.launch()
    before = len(h.tokens[1])
    h.pause(1)
    h.steps(4)
    assert len(h.tokens[1]) == before + flights
    assert 1 not in h.seated
    h.resume(1)
    h.run_as_solo()


def test_a_pause_that_ends_before_the_commit_costs_one_plan() -> None:
    h = Overlapped()
    h.add(1, PROMPT, greedy(9))
    h.add(2, [*PROMPT, 2], greedy(9))
    h.steps(3)
    slot = h.seated[1]
    h.pause(1)
    plan = h.step()
    assert plan is not None
    assert slot not in plan.slots
    h.resume(1)
    h.run_as_solo()
    assert sum(len(plan.seated) for plan in h.plans) == 2, "it kept its seat"


def test_prompt_logprobs_of_chunks_in_flight_come_once_and_in_order() -> None:
    h = Overlapped(step_tokens_max=8)
    h.add(1, list(range(30)), greedy(4, prompt_logprobs=2))
    h.add(2, list(range(9)), greedy(9, seed=2))
    h.run_as_solo()


def test_a_steps_duration_counts_from_the_commit_before_it() -> None:
    """Its plan was made a step earlier; the cost of a step is learned from the time between commits."""
    h = Overlapped()
    h.add(1, PROMPT, greedy(6))
    h.steps(5)
    assert h.scheduler.stats().step_s == pytest.approx(STEP_S)
