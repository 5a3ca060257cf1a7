"""A fake runner that computes beside the host, as a GPU does, and as late as possible: a plan is executed
when it is collected, so no result can be used before that.

Overlapped steps are hard because a plan is made while an earlier one still works. So at every launch this
compares the pages and slots of the new plan with those that steps in flight read and write, and asserts that
no sequence gets a slot or a page that is still in use for another, or reads a page that is not written yet:
rules H and I (`engine.core.step.flight`, `engine.core.step.allocator`) seen from the runner's side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

from engine.contract.messages import Plan, RunnerInfo, RunResult
from tests.fake_runner import FakeRunner, no_slots


@dataclass(slots=True)
class Occupant:
    """The sequence in a slot, as the host knows it at a launch."""

    number: int
    table: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Flight:
    """A launched plan that is not collected yet."""

    runner: AsyncRunner
    plan: Plan
    held: frozenset[int]
    """Slots that nothing could be computed for at the launch."""
    reads: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The numbers of the occupants that read a page, by page."""
    writes: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The numbers of the occupants that write a page, by page."""

    def collect(self) -> RunResult:
        return self.runner.execute(self)


class AsyncRunner(FakeRunner):
    def __init__(
        self, info: RunnerInfo, step_tokens_max: int, held: Callable[[], Collection[int]] = no_slots
    ) -> None:
        super().__init__(info, step_tokens_max, held)
        self.in_flight: list[Flight] = []
        self.events: list[tuple[str, int]] = []
        """Pairs of "launch" or "collect" and a step number."""
        self.overlaps = 0
        """Launches while another step was in flight."""
        self._occupants: dict[int, Occupant] = {}
        self._numbers: Iterator[int] = count()

    def launch(self, plan: Plan) -> Flight:
        flight = Flight(self, plan, frozenset(self._held()))
        self._occupy(plan)
        self._trace(flight)
        for other in self.in_flight:
            _assert_apart(flight, other)
        self.overlaps += bool(self.in_flight)
        self.in_flight.append(flight)
        self.events.append(("launch", plan.step))
        return flight

    def execute(self, flight: Flight) -> RunResult:
        assert self.in_flight[0] is flight, "collected out of order"
        result = self.run(flight.plan)
        del self.in_flight[0]
        self.events.append(("collect", flight.plan.step))
        return result

    def _occupy(self, plan: Plan) -> None:
        for slot in plan.left:
            del self._occupants[slot]
        for start in plan.seated:
            used = [slot for flight in self.in_flight for slot in flight.plan.slots]
            assert start.slot not in used, "admitted into a slot in which a step in flight works for another"
            self._occupants[start.slot] = Occupant(next(self._numbers))
        for slot, pages in plan.grown:
            self._occupants[slot].table += pages

    def _trace(self, flight: Flight) -> None:
        plan, size = flight.plan, self.info.page_size
        for slot, position, length in zip(plan.slots, plan.positions, plan.lengths, strict=True):
            owner = self._occupants[slot]
            last = (position + length - 1) // size
            for page in owner.table[: last + 1]:
                flight.reads[page].add(owner.number)
            for page in owner.table[position // size : last + 1]:
                flight.writes[page].add(owner.number)

    def _idle(self, plan: Plan) -> set[int]:
        """Slots that need no row: those of sequences that are held or have their last token keep their
        slots until the steps in flight are committed."""
        idle = set(self.in_flight[0].held)
        for slot, state in self.slots.items():
            if len(state.tokens) - state.start.prompt_len == state.start.sampling.max_tokens:
                idle.add(slot)
        return idle - set(plan.slots)


def _assert_apart(flight: Flight, before: Flight) -> None:
    for page, owners in flight.writes.items():
        others = before.reads[page] | before.writes[page]
        assert others <= owners, "a page is written that a step in flight uses for another"
    for page, owners in flight.reads.items():
        assert before.writes[page] <= owners, "a page is read that a step in flight writes for another"
    # A plan makes its copies before it computes: a plan behind it comes after these copies.
    for page, _ in flight.plan.swapped_out:
        assert not before.writes[page], "a page is copied that a step in flight writes"
    for _, page in flight.plan.swapped_in:
        assert not before.reads[page], "a page is copied onto that a step in flight uses"
    for _, page, _ in flight.plan.forked:
        assert not before.reads[page] | before.writes[page], (
            "a page becomes a fork that a step in flight uses"
        )
