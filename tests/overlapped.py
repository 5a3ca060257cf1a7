"""The random worlds of `tests.simulator`, with one step in flight while the next is planned.

    report = simulate_overlapped(seed, SimConfig(...))

The same laws hold, with messages at the same kinds of moments and at some more: aborts and pauses also come
between a plan and its launch, between launches, and with two steps in flight.
"""

from __future__ import annotations

import random

import msgspec

from engine.contract.messages import Plan
from tests.async_runner import AsyncRunner, Flight
from tests.simulator import Report, _Simulation
from tests.worlds import SimConfig


def simulate_overlapped(seed: int, config: SimConfig) -> Report:
    """Run one world to its end. Raises AssertionError when a law is broken."""
    return OverlappedSimulation(random.Random(seed), config).run()


class OverlappedSimulation(_Simulation):
    def __init__(self, rng: random.Random, config: SimConfig) -> None:
        super().__init__(rng, config)
        self._runner: AsyncRunner = AsyncRunner(
            self._runner.info, config.scheduler.step_tokens_max, self._held_slots
        )
        if (drafting := self._scheduler._drafting) is not None:
            drafting.runner = msgspec.structs.replace(drafting.runner, is_async=True)
        self._flying: tuple[Plan, Flight] | None = None
        self._uncommitted = 0

    @property
    def runner(self) -> AsyncRunner:
        return self._runner

    def _pause(self, handles: list[int], *, in_flight: int) -> None:
        super()._pause(handles, in_flight=self._uncommitted)

    def _step(self) -> None:
        self._before_plan()
        following = self._launch_next()
        if self._flying is not None:
            self._land(*self._flying)
        is_due = self._flying is not None
        self._flying = following
        assert self._report() or not is_due, "a step without a report"

    def _launch_next(self) -> tuple[Plan, Flight] | None:
        plan = self._plan()
        if plan is None:
            return None
        self._uncommitted += 1
        self._check_plan(plan)
        flight = self._runner.launch(plan)
        self._disturb()
        self._steps += 1
        self._computed_tokens += sum(plan.lengths)
        return plan, flight

    def _land(self, plan: Plan, flight: Flight) -> None:
        self._disturb()
        result = flight.collect()
        self._now += self._step_s(plan)
        self._disturb()
        self._scheduler.commit(plan, result, self._now)
        self._uncommitted -= 1
        self._check_laws()
