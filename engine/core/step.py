"""What the scheduler carries from a plan to its commit, and from there to the next report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core import policy
from engine.core.cost import StepCost, Work
from engine.core.messages import Finished, Plan, SlotStart, Started, TokenLogprobs
from engine.core.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """A plan in the making."""

    budget_left: int
    seated: list[SlotStart] = field(default_factory=list)
    grown: dict[int, list[int]] = field(default_factory=dict)
    rows: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    """Those who have more than one token to compute, and run or are admitted by this plan; the first has
    run for longest."""
    kept: int = 0
    """Of the budget, set aside for the first of the chunks."""
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    copied_pages: int = 0
    """To host memory and from there, and of those the ones that the budget has been charged for."""
    copies_charged: int = 0

    @property
    def work(self) -> Work:
        return Work.of(self.positions, self.lengths, self.copied_pages)

    def add_decodes(self, sequences: Mapping[int, Sequence]) -> None:
        """A row for each of these, by slot, which have one token pending. All at once: a column at a time
        takes a third of what a row at a time does."""
        rows = len(sequences)
        assert rows <= self.budget_left
        self.budget_left -= rows
        self.rows += sequences.values()
        self.slots += sequences
        self.positions += [sequence.planned_len for sequence in sequences.values()]
        self.lengths += [1] * rows
        self.samples += [True] * rows

    @property
    def unplanned(self) -> list[Sequence]:
        """Of the chunks, those that have no row yet."""
        planned = {id(sequence) for sequence in self.rows}
        return [sequence for sequence in self.chunks if id(sequence) not in planned]

    def keep(self, tokens: int) -> None:
        """Set so much aside for the first of the chunks, if there is one."""
        if self.chunks:
            self.kept = min(tokens, self.chunks[0].pending_len)
            self.budget_left -= self.kept

    def add_chunk(self, sequence: Sequence) -> None:
        """As much of its prompt as the budget allows, if any. It samples when nothing is left."""
        self._unkeep(sequence)
        length = policy.chunk_len(sequence.pending_len, self.budget_left)
        if length:
            assert sequence.slot is not None
            assert length <= self.budget_left
            self.budget_left -= length
            self.rows.append(sequence)
            self.slots.append(sequence.slot)
            self.positions.append(sequence.planned_len)
            self.lengths.append(length)
            self.samples.append(length == sequence.pending_len)

    def _unkeep(self, sequence: Sequence) -> None:
        """If it is the first of the chunks, what was kept for it may be spent."""
        if self.chunks and sequence is self.chunks[0]:
            self.budget_left, self.kept = self.budget_left + self.kept, 0

    def charge_copies(self, cost: StepCost) -> None:
        """In the time that pages were copied, so many tokens could have been computed: all but one of those
        left, at most."""
        copies_s = cost.page_s * (self.copied_pages - self.copies_charged)
        self.copies_charged = self.copied_pages
        self.budget_left = max(1, self.budget_left - cost.tokens_within(copies_s, 0))

    def drop(self, slot: int, sequence: Sequence) -> None:
        """It must leave before it could compute anything: take back what was planned for it."""
        self.grown.pop(slot, None)
        if sequence in self.chunks:
            self._unkeep(sequence)
            self.chunks.remove(sequence)
        if slot not in self.slots:
            return
        row = self.slots.index(slot)
        self.budget_left += self.lengths[row]
        for column in (self.rows, self.slots, self.positions, self.lengths, self.samples):
            del column[row]


@dataclass(slots=True)
class InFlight:
    """A step from its plan to its commit: what `commit` must know of it, and what it holds back."""

    plan: Plan
    rows: list[Sequence]
    chunks: list[Sequence]
    work: Work
    planned_at: float
    tables: list[list[int]] = field(default_factory=list)
    """Pages of those who ended and whose last row is in this step: theirs until it is committed."""
    slots: list[int] = field(default_factory=list)
    """The same of slots."""


@dataclass(slots=True)
class News:
    """What happened since the last report."""

    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    is_due: bool = False
    """A step was made, or somebody was paused: there is something to say in any case."""
