"""The slots' tables in host memory, one row per slot, from which a step's inputs are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from engine.contract.messages import SamplingParams, SlotAssignment
from engine.runtime.step.edits import Edits
from engine.runtime.step.seats import Seat, Seats, temperature_of


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
        self.tokens = torch.zeros(self.slots, self.max_model_len, dtype=torch.int32)
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

    def _take(self, start: SlotAssignment, seat: Seat) -> None:
        ids = torch.tensor(start.token_ids, dtype=torch.int32)
        self.tokens[start.slot, : seat.known_len] = ids
        self.columns.seat(start.slot, start.sampling, self.vocab_size)
        seat.edits = Edits.of(start, self.vocab_size, self.max_model_len)

    def _place(self, slot: int, index: int, pages: Sequence[int]) -> None:
        self.page_table[slot, index : index + len(pages)] = torch.tensor(pages, dtype=torch.int32)


_SIGN: Final = 1 << 63
