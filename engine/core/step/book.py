"""The record of each step: what it computed, what it took, and what those that waited for it lacked.

A record has counts and times alone, so that it may be told to whoever had a sequence in the step or waited
for it. The core makes one at every commit, and sends it along with the step's tokens. It is kept, added up
and searched by the API process (`engine.api.told.steps`), when a request asks.

A record is made in every step and read for few of them, so it has what the step knows already: nothing is
added up, and the classes of the decodes are counted anew only when others decode.
"""

from __future__ import annotations

from typing import Final

from engine.contract.messages import ServiceClass
from engine.contract.records import Lack, StepRecord
from engine.core.step.allocator import Allocator
from engine.core.step.flight import InFlight

CLASSES: Final = tuple(ServiceClass)
NO_DECODES: Final = (0,) * len(CLASSES)


class StepBook:
    """Makes the records of steps, in the order of their commits."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator: Final = allocator
        self._ended_at = 0.0
        """The last commit, or the moment after it at which there was work again."""
        self._slots: list[int] = []
        """The slots of the last step that was counted; empty where some of its rows did not decode."""
        self._decodes = NO_DECODES
        """The decodes of the last step that was counted, by class."""
        self._single_prompts = 0
        """The rows of that step that computed one token of a prompt, as where all others were cached. To the
        cost of a step they are decodes; whoever reads a record is to know them from streams."""
        self._record: StepRecord | None = None

    def wake(self, now: float) -> None:
        """Note that there is work again after a time without any."""
        self._ended_at = now

    def commit(self, flight: InFlight, step_s: float, expected_s: float, now: float) -> None:
        """Make the record of a step that is committed now and took `step_s`, where `expected_s` was expected
        before it was made."""
        work, plan, allocator = flight.work, flight.plan, self._allocator
        interval_s, self._ended_at = max(now - self._ended_at, step_s), now
        if plan.seated or plan.left or plan.slots != self._slots or work.prompt_tokens:
            self._count_decodes(flight)
        pages, single_prompts = allocator.pages, self._single_prompts
        self._record = StepRecord(
            plan.step,
            interval_s,
            step_s,
            expected_s,
            len(plan.slots) - work.decode_rows + single_prompts,
            work.prompt_tokens + single_prompts,
            self._decodes,
            work.copied_pages,
            flight.lack,
            allocator.holders,
            100 * pages.owned // pages.total,
        )

    def _count_decodes(self, flight: InFlight) -> None:
        """Count the classes of the rows that decode. A slot has the same sequence until it is left and seated
        again, so steps with the same slots have the same counts."""
        plan = flight.plan
        rows = zip(flight.rows, plan.positions, plan.lengths, strict=True)
        classes = [
            row.service_class for row, position, length in rows if length == 1 and position >= row.prompt_len
        ]
        flex, default, priority = [classes.count(each) for each in CLASSES]
        self._decodes = (flex, default, priority)
        self._single_prompts = flight.work.decode_rows - len(classes)
        self._slots = plan.slots if len(classes) == len(plan.slots) else []

    def take(self) -> StepRecord | None:
        """The record of the step that was committed since the last call. None when none was."""
        record, self._record = self._record, None
        return record


def lack_of(allocator: Allocator, *, waits: bool) -> Lack:
    """The reason why sequences still wait once a plan is made; `waits` says whether any does."""
    if not waits:
        return Lack.NOTHING
    return allocator.lack or (Lack.TURN if allocator.has_free_slot else Lack.SLOTS)
