"""How much of a step prompts may take: the step's time for them, and the tokens of each chunk.

A step computes one token of every running sequence that decodes, and chunks of prompts beside them. Each
chunk makes the step longer, and with it the gap between two tokens that the streams see; but a chunk that is
left out delays the prompt's first token. The estimates are those of the learned cost of a step
(`engine.core.cost`).

- While nothing decodes there is no gap to keep short: prompts take what the step time target leaves, or a
  multiple of what a step takes without them, whichever is more (`prompt_budget_alone_s`).
- Beside decodes, a lone prompt takes half of the decodes' time (`LONE`). Several take `EACH` of it apiece,
  more when they are late, at most what the target leaves or twice `EACH`, whichever is more
  (`prompt_budget_s`).
- The length of a chunk solves the inequality "it takes no longer than the time that is left". The first chunk
  of a step computes `PROMPT_TOKENS_MIN` tokens however long they take, so that every prompt gets on.
- One part in `RESERVED_PART` of the step's tokens and time is reserved for the prefill that has run for
  longest, so that prompts that rank above it do not stop it.

`PlanBuilder` applies this: it is a step's plan in the making, and does the account of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.core.cost import StepCost, Work
from engine.core.messages import SlotAssignment
from engine.core.sequence import Sequence

PROMPT_TOKENS_MIN: Final = 4
"""Tokens that the first chunk of a step computes at least, however long that takes."""
LONE: Final = 0.5
"""Time for a lone prompt beside decodes, as a multiple of the decodes' time."""
EACH: Final = 0.8
"""Time for each prompt when there are several, as a multiple of the decodes' time."""
SWING: Final = 0.15
"""The share by which a lone prompt's time is raised in one step and lowered in the next."""
FIXED_MULTIPLE: Final = 4.0
"""The least time for prompts while nothing decodes, as a multiple of the step's time without prompts."""
RESERVED_PART: Final = 16
"""One part in so many of a step's tokens and time is reserved for the prefill that has run for longest."""
STEP_S_MAX: Final = 1e6
"""The time for prompts when no step time target is set, in seconds."""


def chunk_len(pending_len: int, tokens_left: int) -> int:
    """The length of a sequence's next chunk, in tokens: at least one while any budget is left."""
    return min(pending_len, tokens_left)


def prompt_budget_s(target_s: float, decodes_s: float, prompts: Iterable[float], *, is_odd: bool) -> float:
    """The time that prompts may take beside decodes, in seconds.

    `target_s` is the step time target, infinite when none is set; `decodes_s` is what the step takes with its
    decodes alone; `prompts` has the `lateness` of each running prefill and of each unpaused waiting sequence.

    A lone prompt takes half of the decodes' time: the gap that streams see does not double, though estimates
    err and contexts grow meanwhile. Of several, each takes `EACH` of it, or `lateness ** 2` times that when
    it is late: prompts that come faster than they are computed soon get all that the target leaves. A fixed
    share would cap their rate instead, and queues that could be served would grow.

    Decodes alone may take the target or more. Even then prompts may take what two of them want: far into a
    long prompt the shortest chunk takes longer than a smaller rest would allow.

    A lone prompt's time is larger by `SWING` in odd steps and smaller in even ones. Otherwise hundreds of its
    chunks would have the same length, and the learned cost could not tell the price of a token from that of a
    chunk.
    """
    if target_s == math.inf:
        return target_s
    each_s = EACH * decodes_s
    budget_s = max(2 * each_s, target_s - decodes_s)
    count, wanted_s = 0, 0.0
    for late in prompts:
        count += 1
        wanted_s += max(1.0, late * late) * each_s
        if count > 1 and wanted_s >= budget_s:
            break  # the budget is reached: further prompts cannot change it
    if count == 1:
        return LONE * decodes_s * (1.0 + SWING if is_odd else 1.0 - SWING)
    return min(budget_s, wanted_s)


def prompt_budget_alone_s(target_s: float, base_s: float) -> float:
    """The time that prompts may take in a step without decodes, in seconds.

    There is no gap to keep short, but new sequences wait for the step to end. `base_s` is what the step takes
    without prompts, for the weights and for copies: where that alone comes near the target, steps that keep
    to it would spend most of their time on it.
    """
    return max(target_s - base_s, FIXED_MULTIPLE * base_s)


def lateness(sequence: Sequence, cost: StepCost, now: float) -> float:
    """A prompt's age as a multiple of the time that it takes alone."""
    return (now - sequence.arrived_at) / cost.service_s(len(sequence.tokens))


def reserve(tokens_left: int, time_left_s: float, least_s: float) -> tuple[int, float]:
    """The tokens and the seconds that are reserved for the prefill that has run for longest.

    `least_s` is the time of a single token of it, which is long far into a long context: the reserved time is
    at least that, but no more than half of what is left.
    """
    return -(-tokens_left // RESERVED_PART), min(max(time_left_s / RESERVED_PART, least_s), time_left_s / 2)


@dataclass(slots=True)
class PlanBuilder:
    """A step's plan in the making: its rows, and the tokens and the time that are left for further ones."""

    tokens_left: int
    """Tokens that further rows may compute together."""
    time_left_s: float = STEP_S_MAX
    """Time that further chunks may take together, by the estimates of `cost`; below zero when it is
    exceeded."""
    cost: StepCost = field(default_factory=StepCost)
    seated: list[SlotAssignment] = field(default_factory=list)
    """The sequences that this plan admits, as the runner is told of them."""
    grown: dict[int, list[int]] = field(default_factory=dict)
    """The pages that page tables gain, by slot."""
    rows: list[Sequence] = field(default_factory=list)
    """The sequence of each row."""
    prefills: list[Sequence] = field(default_factory=list)
    """Running sequences with more than one token to compute, also those that this plan admits; the one that
    has run for longest comes first."""
    has_chunk: bool = False
    """True if any chunk of a prompt has a row."""
    reserved_tokens: int = 0
    """Part of the tokens that is set aside for the first prefill, and not in `tokens_left`."""
    reserved_s: float = 0.0
    """Part of the time that is set aside for the first prefill, and not in `time_left_s`."""
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    copied_pages: int = 0
    """Pages that this plan copies to host memory or back."""
    copies_charged: int = 0
    """Copied pages whose time has been taken off `time_left_s`."""

    @property
    def work(self) -> Work:
        return Work.of(self.positions, self.lengths, self.copied_pages)

    def add_decodes(self, sequences: Mapping[int, Sequence]) -> None:
        """Add a row for each of these sequences, by slot, which have one token pending. A column at a time
        takes a third of the time that a row at a time takes."""
        rows = len(sequences)
        assert rows <= self.tokens_left
        self.tokens_left -= rows
        self.rows += sequences.values()
        self.slots += sequences
        self.positions += [sequence.planned_len for sequence in sequences.values()]
        self.lengths += [1] * rows
        self.samples += [True] * rows

    @property
    def unplanned_prefills(self) -> list[Sequence]:
        """The prefills that have no row yet."""
        planned = {id(sequence) for sequence in self.rows}
        return [sequence for sequence in self.prefills if id(sequence) not in planned]

    @property
    def is_full(self) -> bool:
        return not self.tokens_left or (self.time_left_s <= 0.0 and self.has_chunk)

    def open_to_prompts(self, budget_s: float, cost: StepCost) -> None:
        """Go on from decodes to prompts, which may take `budget_s`; reserve a part of it for the first
        prefill, if there is one."""
        self.time_left_s, self.cost = min(budget_s, STEP_S_MAX), cost
        self.copies_charged = self.copied_pages
        if self.prefills:
            first = self.prefills[0]
            least_s = cost.chunk_s(first.planned_len, 1)
            tokens, self.reserved_s = reserve(self.tokens_left, self.time_left_s, least_s)
            self.reserved_tokens = min(tokens, first.pending_len)
            self.tokens_left -= self.reserved_tokens
            self.time_left_s -= self.reserved_s

    def add_chunk(self, sequence: Sequence, tokens_min: int = 0) -> None:
        """Add a chunk of this prompt as long as tokens and time allow, if they allow any.

        The chunk has at least `tokens_min` tokens, whatever time they take, while that many are left. It
        samples a token when it completes the prompt.
        """
        if self._free_reserve(sequence):
            tokens_min = 1
        if not self.has_chunk:
            tokens_min = PROMPT_TOKENS_MIN
        position = sequence.planned_len
        within = max(tokens_min, self.cost.tokens_within(self.time_left_s, position))
        length = chunk_len(sequence.pending_len, min(self.tokens_left, within))
        if length:
            assert sequence.slot is not None
            assert length <= self.tokens_left
            self.has_chunk = True
            self.tokens_left -= length
            self.time_left_s -= self.cost.chunk_s(position, length)
            self.rows.append(sequence)
            self.slots.append(sequence.slot)
            self.positions.append(position)
            self.lengths.append(length)
            self.samples.append(length == sequence.pending_len)

    def _free_reserve(self, sequence: Sequence) -> bool:
        """Add the reserve back to what is left if `sequence` is the prefill that it was made for."""
        if not self.reserved_tokens or sequence is not self.prefills[0]:
            return False
        self.tokens_left, self.reserved_tokens = self.tokens_left + self.reserved_tokens, 0
        self.time_left_s, self.reserved_s = self.time_left_s + self.reserved_s, 0.0
        return True

    def charge_copies(self) -> None:
        """Take the time of page copies that were added since the last call off the time for prompts."""
        self.time_left_s -= self.cost.page_s * (self.copied_pages - self.copies_charged)
        self.copies_charged = self.copied_pages

    def drop(self, slot: int, sequence: Sequence) -> None:
        """Take back what was planned for a sequence that is preempted by this very plan."""
        self.grown.pop(slot, None)
        if sequence in self.prefills:
            self._free_reserve(sequence)
            self.prefills.remove(sequence)
        if slot not in self.slots:
            return
        row = self.slots.index(slot)
        self.tokens_left += self.lengths[row]
        self.time_left_s += self.cost.chunk_s(self.positions[row], self.lengths[row])
        for column in (self.rows, self.slots, self.positions, self.lengths, self.samples):
            del column[row]
