"""The record of each step: what it computed, what it took, and what those that waited for it lacked.

A record has counts and times alone, so that it may be told to whoever had a sequence in the step or waited
for it. Each also has sums over all steps before it: whoever keeps the record of two steps knows what all
between them did together, however many these were.

The core makes one at every commit, and sends it along with the step's tokens. It is kept, and searched, by
the API process (`engine.api.steps`).
"""

from __future__ import annotations

from typing import Final

from engine.core.allocator import Allocator
from engine.core.cost import CostLearner
from engine.core.messages import Lack, ServiceClass, StepRecord, StepSums
from engine.core.step import InFlight

CLASSES: Final = tuple(ServiceClass)


class StepBook:
    """Makes the records of steps, in the order of their commits."""

    def __init__(self, allocator: Allocator, learner: CostLearner) -> None:
        self._allocator: Final = allocator
        self._learner: Final = learner
        self._ended_at = 0.0
        """The last commit, or the moment after it at which there was work again."""
        self._sums = StepSums()
        self._record: StepRecord | None = None

    def wake(self, now: float) -> None:
        """Note that there is work again after a time without any."""
        self._ended_at = now

    def commit(self, flight: InFlight, step_s: float, now: float) -> None:
        """Make the record of a step that is committed now and took `step_s`."""
        work, allocator, before = flight.work, self._allocator, self._sums
        interval_s, self._ended_at = max(now - self._ended_at, step_s), now
        prompts = len(flight.rows) - work.decode_rows
        classes = [row.service_class for row in flight.rows[: work.decode_rows]]
        lacking_s = list(before.lacking_s)
        lacking_s[flight.lack] += interval_s
        self._sums = StepSums(
            before.seconds + step_s,
            before.host_s + interval_s - step_s,
            before.prompts + prompts,
            before.prompt_tokens + work.prompt_tokens,
            before.decodes + work.decode_rows,
            tuple(lacking_s),
        )
        pages = allocator.pages
        self._record = StepRecord(
            flight.plan.step,
            interval_s,
            step_s,
            self._learner.forecast_s(work),
            prompts,
            work.prompt_tokens,
            tuple([classes.count(each) for each in CLASSES]),
            work.copied_pages,
            flight.lack,
            allocator.holders,
            100 * pages.owned // pages.total,
            self._sums,
        )

    def take(self) -> StepRecord | None:
        """The record of the step that was committed since the last call. None when none was."""
        record, self._record = self._record, None
        return record


def lack_of(allocator: Allocator, *, waits: bool) -> Lack:
    """The reason why sequences still wait once a plan is made; `waits` says whether any does."""
    if not waits:
        return Lack.NOTHING
    return allocator.lack or (Lack.TURN if allocator.has_free_slot else Lack.SLOTS)
