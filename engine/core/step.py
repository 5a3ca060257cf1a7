"""What the scheduler carries from a plan to its commit, and from there to the next report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.core import policy
from engine.core.cost import StepCost, Work
from engine.core.messages import Finished, Plan, SlotStart, Started, TokenLogprobs
from engine.core.sequence import Sequence

STEP_S_MAX: Final = 1e6
"""Where no target is set."""


@dataclass(slots=True)
class Batch:
    """A plan in the making."""

    budget_left: int
    """In tokens."""
    room_s: float = STEP_S_MAX
    """Of the step's time, what is left for prompts, by `cost`."""
    cost: StepCost = field(default_factory=StepCost)
    seated: list[SlotStart] = field(default_factory=list)
    grown: dict[int, list[int]] = field(default_factory=dict)
    rows: list[Sequence] = field(default_factory=list)
    chunks: list[Sequence] = field(default_factory=list)
    """Those who have more than one token to compute, and run or are admitted by this plan; the first has
    run for longest."""
    has_chunk: bool = False
    """Whether somebody's prompt has got a row."""
    kept: int = 0
    """Of the budget and of the room, set aside for the first of the chunks."""
    kept_s: float = 0.0
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    copied_pages: int = 0
    """To host memory and from there, and of those the ones that the room has been charged for."""
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

    @property
    def is_full(self) -> bool:
        return not self.budget_left or (self.room_s <= 0.0 and self.has_chunk)

    def open_to_prompts(self, room_s: float, cost: StepCost) -> None:
        """The decodes are in. What follows may take so long, a part of which is the first chunk's, if there
        is one."""
        self.room_s, self.cost = min(room_s, STEP_S_MAX), cost
        self.copies_charged = self.copied_pages
        if self.chunks:
            eldest = self.chunks[0]
            least_s = cost.chunk_s(eldest.planned_len, 1)
            kept, self.kept_s = policy.kept_for_eldest(self.budget_left, self.room_s, least_s)
            self.kept = min(kept, eldest.pending_len)
            self.budget_left -= self.kept
            self.room_s -= self.kept_s

    def add_chunk(self, sequence: Sequence, tokens_min: int = 0) -> None:
        """As much of its prompt as budget and room allow, if any; so many tokens in any case, while there is
        any budget. It samples when nothing is left."""
        if self._unkeep(sequence):
            tokens_min = 1
        if not self.has_chunk:
            tokens_min = policy.PROMPT_TOKENS_MIN
        position = sequence.planned_len
        within = max(tokens_min, self.cost.tokens_within(self.room_s, position))
        length = policy.chunk_len(sequence.pending_len, min(self.budget_left, within))
        if length:
            assert sequence.slot is not None
            assert length <= self.budget_left
            self.has_chunk = True
            self.budget_left -= length
            self.room_s -= self.cost.chunk_s(position, length)
            self.rows.append(sequence)
            self.slots.append(sequence.slot)
            self.positions.append(position)
            self.lengths.append(length)
            self.samples.append(length == sequence.pending_len)

    def _unkeep(self, sequence: Sequence) -> bool:
        """If it is the first of the chunks, what was kept for it may be spent."""
        if not self.kept or sequence is not self.chunks[0]:
            return False
        self.budget_left, self.kept = self.budget_left + self.kept, 0
        self.room_s, self.kept_s = self.room_s + self.kept_s, 0.0
        return True

    def charge_copies(self) -> None:
        """What pages take that are copied for those who are admitted is taken from the room."""
        self.room_s -= self.cost.page_s * (self.copied_pages - self.copies_charged)
        self.copies_charged = self.copied_pages

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
        self.room_s += self.cost.chunk_s(self.positions[row], self.lengths[row])
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
