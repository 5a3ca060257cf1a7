"""The occupants of the runner's slots, as the host knows them, and the plan's rules for them.

A `Seat` holds what the host can always predict of a slot's sequence (its lengths) and its request's
parameters. The tables that steps are gathered from (`tokens`, `page_table`, sampling parameters: one row per
slot) lie where the network computes: in host memory (`HostSlots`), or on a device
(`engine.runtime.device.slots`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.contract.messages import Plan, SamplingParams, SlotAssignment
from engine.runtime.step.edits import NO_EDITS, Edits

TEMPERATURE_MIN: Final = 2.0**-126
"""The lowest temperature that logits are divided by, float32's smallest normal number. At a lower one the
largest logit is taken, as at 0."""
TEMPERATURE_MAX: Final = 1e30
"""The highest temperature that logits are divided by. There all tokens are equally likely, except those
to which edits have given float32's smallest logit."""


def temperature_of(params: SamplingParams) -> float:
    """The divisor of the logits; 0 when the largest logit is taken."""
    return min(params.temperature, TEMPERATURE_MAX) if params.temperature >= TEMPERATURE_MIN else 0.0


@dataclass(slots=True)
class Seat:
    """The sequence in a slot, as the host knows it."""

    sampling: SamplingParams
    prompt_len: int
    known_len: int
    """The number of tokens in the buffer: the prompt and the output."""
    pages: int = 0
    """The number of pages in the slot's page table."""
    edits: Edits = NO_EDITS
    """The edits of its logits. A device makes them from tables of its own, and has none here."""
    gathered: Tensor | None = None
    """The hidden states that the rows of its prompt have gathered for its vector
    (`engine.runtime.step.pooling`)."""

    @property
    def output_len(self) -> int:
        return self.known_len - self.prompt_len


@dataclass(slots=True)
class Seats(ABC):
    """All slots: the sequence in each, and its numbers of tokens and pages. Asserts that a plan follows from
    these. A subclass holds the tables."""

    slots: int
    max_model_len: int
    page_size: int
    vocab_size: int
    tokens: Tensor = field(init=False)
    """The known tokens by slot, at least [slots, max_model_len] int32."""
    page_table: Tensor = field(init=False)
    """The pages by slot, at least [slots, pages per sequence] int32."""
    asking: set[int] = field(init=False)
    """The slots whose sequences ask for log-probabilities of their prompts' tokens, or of some behind."""
    _seats: list[Seat | None] = field(init=False)

    def __post_init__(self) -> None:
        self._seats = [None] * self.slots
        self.asking = set()

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.page_size)

    def seat(self, slot: int) -> Seat:
        """The sequence in a slot. Asserts that the slot is not empty."""
        seat = self._seats[slot]
        assert seat is not None, f"slot {slot} is empty"
        return seat

    def apply(self, plan: Plan) -> None:
        """Apply a plan's changes to the slots: sequences that leave, that are seated, that get pages."""
        for slot in plan.left:
            assert self._seats[slot] is not None, f"slot {slot} left twice"
            self._seats[slot] = None
            self.asking.discard(slot)
        for start in plan.seated:
            assert self._seats[start.slot] is None, f"slot {start.slot} is taken"
            known_len = start.known_len
            assert 1 <= start.prompt_len <= known_len <= self.max_model_len
            seat = Seat(start.sampling, start.prompt_len, known_len)
            self._take(start, seat)
            self._seats[start.slot] = seat
            if start.sampling.scored or start.sampling.prompt_logprobs is not None:
                self.asking.add(start.slot)
        for slot, pages in plan.grown:
            seat = self.seat(slot)
            assert seat.pages + len(pages) <= self.pages_per_sequence, f"slot {slot} outgrows the context"
            self._place(slot, seat.pages, pages)
            seat.pages += len(pages)

    @abstractmethod
    def _take(self, start: SlotAssignment, seat: Seat) -> None:
        """Store the tokens and the parameters of a sequence that is seated."""

    @abstractmethod
    def _place(self, slot: int, index: int, pages: Sequence[int]) -> None:
        """Store entries of the slot's page table, from `index` on."""


# -- tables in host memory ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of all slots, [slots] each."""

    temperature: Tensor
    top_k: Tensor
    """The number of tokens that top-k keeps; the vocabulary's size when it is off."""
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    """The seed's 64 bits, as int64."""
    edited: Tensor
    """Room for the logits that are edited in a step, [slots, vocab] float32. To map so much memory anew in
    every step would take longer than the edits."""

    @staticmethod
    def empty(slots: int, vocab_size: int) -> SamplingColumns:
        return SamplingColumns(
            temperature=torch.zeros(slots, dtype=torch.float32),
            top_k=torch.zeros(slots, dtype=torch.int64),
            top_p=torch.zeros(slots, dtype=torch.float64),
            min_p=torch.zeros(slots, dtype=torch.float32),
            seed=torch.zeros(slots, dtype=torch.int64),
            edited=torch.empty(slots, vocab_size, dtype=torch.float32),
        )

    def seat(self, slot: int, params: SamplingParams, vocab_size: int) -> None:
        self.temperature[slot] = temperature_of(params)
        self.top_k[slot] = min(params.top_k, vocab_size) or vocab_size
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = (params.seed ^ _SIGN) - _SIGN


@dataclass(slots=True)
class HostSlots(Seats):
    """The slots' state, with its tables in host memory."""

    columns: SamplingColumns = field(init=False)

    def __post_init__(self) -> None:
        Seats.__post_init__(self)
        # Behind the longest sequence's last token is one to look up, too: that which follows it.
        self.tokens = torch.zeros(self.slots, self.max_model_len + 1, dtype=torch.int32)
        self.page_table = torch.zeros(self.slots, self.pages_per_sequence, dtype=torch.int32)
        self.columns = SamplingColumns.empty(self.slots, self.vocab_size)

    def append(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Store one sampled token per slot, int64 [S]. A failed row's -1 is stored as 0: its sequence ends
        anyway."""
        seats = [self.seat(slot) for slot in slots]
        kept = tokens.clamp_min(0)
        # numpy's indexing takes a few elements in a tenth of torch's time.
        self.tokens.numpy()[slots, [seat.known_len for seat in seats]] = kept.numpy()
        for row, seat in enumerate(seats):
            seat.known_len += 1
            if seat.edits.each:
                seat.edits.append(int(kept[row]))

    def propose(self, slot: int, drafts: Sequence[int]) -> None:
        """Store drafts behind a slot's known tokens, for the step that verifies them."""
        known_len = self.seat(slot).known_len
        self.tokens.numpy()[slot, known_len : known_len + len(drafts)] = drafts

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Store the tokens that count of a row that verified."""
        seat = self.seat(slot)
        kept = [max(token, 0) for token in tokens]
        self.tokens.numpy()[slot, seat.known_len : seat.known_len + len(kept)] = kept
        seat.known_len += len(kept)
        if seat.edits.each:
            for token in kept:
                seat.edits.append(token)

    def _take(self, start: SlotAssignment, seat: Seat) -> None:
        self.tokens.numpy()[start.slot, : seat.known_len] = np.frombuffer(start.ids, np.int32)
        self.columns.seat(start.slot, start.sampling, self.vocab_size)
        seat.edits = Edits.of(start, self.vocab_size, self.max_model_len)

    def _place(self, slot: int, index: int, pages: Sequence[int]) -> None:
        self.page_table[slot, index : index + len(pages)] = torch.tensor(pages, dtype=torch.int32)


_SIGN: Final = 1 << 63
