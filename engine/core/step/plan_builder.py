"""A step's plan in the making: its rows, and the account of the tokens and the time that are left.

Decodes come first (`add_decodes`). Then prompts get the time that `engine.core.estimate.pace` gives them
(`open_to_prompts`), a chunk at a time and in the order of their ranks (`add_chunk`). A chunk is as long as
the tokens and the time that are left allow. One for which the time does not suffice is left out, and what is
left becomes the credit of the next step (`credit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.contract.messages import SlotAssignment, Want
from engine.core.estimate import pace
from engine.core.estimate.cost import StepCost, Work
from engine.core.estimate.pace import Credit, PrefillBudget
from engine.core.sequence import Sequence
from engine.core.step.state_tier import StateTier

WANTED_MARGIN: Final = 1.001
"""More than a chunk of one token takes is waited for, since the cost is learned anew meanwhile."""


def chunk_len(pending_len: int, tokens_left: int) -> int:
    """The length of a sequence's next chunk, in tokens: at least one while any budget is left."""
    return min(pending_len, tokens_left)


def _scored(sequence: Sequence, length: int) -> int:
    """The tokens of a row whose log-probabilities are asked for; a row of one token counts as a decode."""
    return length if length > 1 and sequence.is_scored else 0


@dataclass(slots=True)
class PlanBuilder:
    """A step's plan in the making: its rows, and the tokens and the time that are left for further ones."""

    tokens_left: int
    """Tokens that further rows may compute together."""
    time_left_s: float = pace.STEP_S_MAX
    """Time that further chunks may take together, by the estimates of `cost`; below zero when it is
    exceeded."""
    cost: StepCost = field(default_factory=StepCost)
    states: StateTier | None = None
    """The snapshots for which chunks end, of a model that has states."""
    seated: list[SlotAssignment] = field(default_factory=list)
    """The sequences that this plan admits, as the runner is told of them."""
    seated_len: int = 0
    """Their known tokens."""
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
    reserved_most_s: float = 0.0
    """The reserve of a step that credit made as long as it can; 0.0 once the reserve is free again."""
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    """The drafts of rows that verify, which are behind the decodes."""
    decodes: int = 0
    """The decodes before them."""
    guesses: dict[int, int] = field(default_factory=dict)
    """The guesses that are asked for behind rows, by slot."""
    guess_s: float = 0.0
    """The time that they take."""
    scored_tokens: int = 0
    """Tokens of chunks whose log-probabilities are asked for."""
    copied_pages: int = 0
    """Pages that this plan copies to host memory or back, or states that it copies to their places or
    back."""
    copies_charged: int = 0
    """Copied pages whose time has been taken off `time_left_s`."""
    longest_s: float = pace.STEP_S_MAX
    """The longest time for prompts to which credit extends a step."""
    taken_s: float = 0.0
    """The part of it that chunks of this plan take."""
    wanted_s: float = 0.0
    """The time of a chunk of one token that was left out because even that takes longer than `longest_s`, or
    than the reserve leaves of it: then with the time of one token of the first prefill."""
    is_cut: bool = False
    """True if a chunk was made shorter or left out for want of time."""
    has_streams: bool = False
    """True if the step has decodes."""
    hurried: Sequence | None = None
    """The prompt that is hurried (`engine.core.queue.deadlines`)."""
    extra_s: float = 0.0
    """The time that it may have beyond what is left."""
    hurried_s: float = 0.0
    """The part of it that its chunk took."""
    is_saving: bool = False
    """True if the first chunk was left out for want of time: all of it is saved, and none goes to prompts of
    lower rank."""

    @property
    def work(self) -> Work:
        own = self.copied_pages, self.scored_tokens, len(self.seated), self.guess_s
        if not self.drafts:
            return Work.of(self.positions, self.lengths, *own)
        first, behind = self.decodes, self.decodes + len(self.drafts)
        positions = self.positions[:first] + self.positions[behind:]
        others = Work.of(positions, self.lengths[:first] + self.lengths[behind:], *own)
        return others.verifying(self.positions[first:behind], self.drafts)

    def decodes_s(self, cost: StepCost) -> tuple[float, float]:
        """The time of a step of the decodes alone, and what their drafts add to it: before prompts have
        rows."""
        step_s = cost.seconds(self.work)
        if not self.drafts:
            return step_s, 0.0
        alone = Work.of(self.positions, [1] * len(self.rows), self.copied_pages)
        return (decodes_s := cost.seconds(alone)), max(0.0, step_s - decodes_s)

    @property
    def asked_guesses(self) -> list[int]:
        """The guesses that are asked for, in the form of `Plan.guesses`."""
        if not self.guesses:
            return []
        rows = zip(self.slots, self.wants, strict=True)
        return [self.guesses.get(slot, 0) for slot, want in rows if want]

    @property
    def credit(self) -> Credit:
        """The time that the next step is given, or gives back."""
        if not self.has_streams:
            return Credit()
        left_s = self.time_left_s + self.reserved_s
        return Credit(left_s if self.is_cut else min(0.0, left_s), self.wanted_s)

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
        self.wants += [Want.SAMPLE] * rows

    def add_verifying(self, sequences: Mapping[int, Sequence], drafts: list[list[int]]) -> None:
        """Add a row for each of these sequences, by slot, which verifies the drafts in its place. The decodes
        are added before."""
        self.decodes, self.drafts = len(self.rows), drafts
        lengths = [1 + len(own) for own in drafts]
        self.tokens_left -= sum(lengths)
        assert self.tokens_left >= 0
        self.rows += sequences.values()
        self.slots += sequences
        self.positions += [sequence.planned_len for sequence in sequences.values()]
        self.lengths += lengths
        self.wants += [Want.VERIFY] * len(lengths)

    @property
    def unplanned_prefills(self) -> list[Sequence]:
        """The prefills that have no row yet."""
        planned = {id(sequence) for sequence in self.rows}
        return [sequence for sequence in self.prefills if id(sequence) not in planned]

    @property
    def is_full(self) -> bool:
        return not self.tokens_left or self.is_saving or (self.time_left_s <= 0.0 and bool(self.rows))

    def open_to_prompts(self, budget: PrefillBudget, credit: Credit, cost: StepCost) -> None:
        """Go on from decodes to prompts; reserve a part of their time for the first prefill, if there is
        one."""
        self.has_streams = bool(self.rows)
        if not self.has_streams:
            credit = Credit()  # no stream sees the gap
        self.time_left_s, self.cost = pace.time_with_credit_s(budget, credit), cost
        self.longest_s = budget.longest_s
        self.copies_charged = self.copied_pages
        self.is_cut = self.time_left_s <= 0.0
        if self.prefills and not self.is_cut:
            first = self.prefills[0]
            least_s = cost.chunk_s(first.planned_len, 1)
            self.reserved_most_s = pace.reserve(self.tokens_left, self.longest_s, least_s)[1]
            open_s = min(
                self.time_left_s, self.longest_s
            )  # the reserve does not grow with what is waited for
            tokens, self.reserved_s = pace.reserve(self.tokens_left, open_s, least_s)
            self.reserved_tokens = min(tokens, first.pending_len)
            self.tokens_left -= self.reserved_tokens
            self.time_left_s -= self.reserved_s

    def has_time_for(self, sequence: Sequence, position: int) -> bool:
        """True if a sequence would get a chunk from `position` on now. Decodes and the first row of a step
        always have time."""
        if sequence.expected_len <= 1 or not self.rows:
            return True
        return self._within(sequence.expected_len, position, self._cost_of(sequence)) > 0

    def add_chunk(self, sequence: Sequence, tokens_min: int = 0) -> None:
        """Add a chunk of this prompt as long as tokens and time allow, if they allow any.

        The chunk has at least `tokens_min` tokens, whatever time they take, while that many are left. It
        samples a token when it completes the prompt.
        """
        is_hurried = sequence is self.hurried
        if self.is_saving and not is_hurried:
            return
        position, cost = sequence.planned_len, self._cost_of(sequence)
        if self._free_reserve(sequence) and self.has_chunk:
            tokens_min = 1
        if not self.rows:
            tokens_min = pace.chunk_len_min(cost, position)
        extra_s = self.extra_s if is_hurried else 0.0
        self.time_left_s += extra_s
        self.longest_s += extra_s
        within = self._within(sequence.pending_len, position, cost)
        if tokens_min:
            within, self.is_saving = max(tokens_min, within), False
        length = chunk_len(sequence.pending_len, min(self.tokens_left, within))
        self.is_cut |= length < min(sequence.pending_len, self.tokens_left)
        if length:
            if self.states is not None:
                length = self.states.cut(sequence, position, length, cost)
            assert sequence.slot is not None
            assert length <= self.tokens_left
            self.has_chunk = True
            self.tokens_left -= length
            chunk_s = cost.chunk_s(position, length)
            self.time_left_s -= chunk_s
            self.taken_s += chunk_s
            self.scored_tokens += _scored(sequence, length)
            self.rows.append(sequence)
            self.slots.append(sequence.slot)
            self.positions.append(position)
            self.lengths.append(length)
            self.wants.append(sequence.want(length))
        if is_hurried:
            self._take_back(extra_s)

    def _take_back(self, extra_s: float) -> None:
        """Take back what a hurried prompt left of its extra time."""
        unused_s = min(extra_s, max(0.0, self.time_left_s))
        self.time_left_s -= unused_s
        self.longest_s -= extra_s
        self.hurried_s += extra_s - unused_s
        self.taken_s -= extra_s - unused_s

    def _cost_of(self, sequence: Sequence) -> StepCost:
        return self.cost.scoring if sequence.is_scored else self.cost

    def _within(self, pending_len: int, position: int, cost: StepCost) -> int:
        """The tokens from `position` on for which there is time; 0 when it does not suffice for a chunk that
        is worth reading its context."""
        # What a single token waited for beyond the longest time is not for chunks of others.
        within_s = min(self.time_left_s, self.longest_s - self.taken_s)
        within = cost.tokens_within(within_s, position)
        least = min(pending_len, pace.chunk_len_min(cost, position))
        if within >= least:
            return within
        # No step gives it more than this, however long it waits.
        reach_s = self.longest_s - self.reserved_most_s
        least = min(least, max(1, cost.tokens_within(reach_s, position)))
        if within >= least:
            return within
        if least == 1:
            single_s = cost.chunk_s(position, 1)
            if single_s <= self.time_left_s:
                return 1
            if self.reserved_tokens:  # the reserve is not to stand in its way for ever
                first_s = self.cost.chunk_s(self.prefills[0].planned_len, 1)
                single_s += max(first_s, self.reserved_most_s)
            self.wanted_s = max(self.wanted_s, WANTED_MARGIN * single_s)
        self.is_cut = True
        self.is_saving = not self.has_chunk
        return 0

    def _free_reserve(self, sequence: Sequence) -> bool:
        """Add the reserve back to what is left if `sequence` is the prefill that it was made for."""
        if not self.reserved_tokens or sequence is not self.prefills[0]:
            return False
        self.tokens_left, self.reserved_tokens = self.tokens_left + self.reserved_tokens, 0
        self.time_left_s, self.reserved_s = self.time_left_s + self.reserved_s, 0.0
        self.reserved_most_s = 0.0
        return True

    def charge_copies(self) -> None:
        """Take the time of page copies that were added since the last call off the time for prompts."""
        self.time_left_s -= self.cost.page_s * (self.copied_pages - self.copies_charged)
        self.copies_charged = self.copied_pages

    def charge_seat(self, sequence: Sequence) -> None:
        """Take the host's time for an admission off the time for prompts. It is charged behind the sequence's
        first chunk, which so need not be shorter than the one that it was admitted for."""
        self.time_left_s -= self.cost.seat_s
        self.seated_len += len(sequence.tokens)

    def drop(self, slot: int, sequence: Sequence) -> None:
        """Take back what was planned for a sequence that is preempted by this very plan."""
        self.grown.pop(slot, None)
        if self.guesses.pop(slot, None):
            sequence.guessing = 0
        if sequence in self.prefills:
            self._free_reserve(sequence)
            self.prefills.remove(sequence)
        if slot not in self.slots:
            return
        row = self.slots.index(slot)
        self.tokens_left += self.lengths[row]
        chunk_s = self._cost_of(sequence).chunk_s(self.positions[row], self.lengths[row])
        self.time_left_s += chunk_s
        self.taken_s = max(0.0, self.taken_s - chunk_s)
        self.scored_tokens -= _scored(sequence, self.lengths[row])
        if self.wants[row] is Want.VERIFY:
            del self.drafts[row - self.decodes]
        self.decodes -= row < self.decodes
        for column in (self.rows, self.slots, self.positions, self.lengths, self.wants):
            del column[row]
