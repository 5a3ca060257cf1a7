"""The tensors of one step, assembled from a plan's rows.

Rows are packed: token t of the step belongs to the row whose `[offset, offset + length)` holds t.
All of it follows from (slot, start, length) per row and from what the slots hold, so nothing here
waits for a device.

Tensors are gathered when they are first asked for, since the native forward pass asks for none: it reads
the slots' own columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress, takewhile
from typing import Self

import msgspec
import torch
from torch import Tensor

from engine.contract.messages import Plan, Want
from engine.runtime.step.kv_cache import TokenPlaces
from engine.runtime.step.seats import Seats


class Row(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) of a slot, at [offset, offset + length) of the step."""

    slot: int
    start: int
    length: int
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class PackedBatch:
    """T tokens in R rows, valid until the slots change."""

    plan: Plan
    slots: Seats
    rows: tuple[Row, ...]
    sampled: tuple[Row, ...]

    @classmethod
    def of(cls, plan: Plan, slots: Seats) -> Self:
        """The plan's batch. Asserts that its rows follow from the slots' state."""
        return cls(plan, slots, *_rows_of(plan, slots))

    @cached_property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return sum(self.plan.lengths)

    @cached_property
    def decode_rows(self) -> int:
        """The number of rows at the start that have one token each."""
        return sum(1 for _ in takewhile(lambda length: length == 1, self.plan.lengths))

    @cached_property
    def verifying(self) -> list[Row]:
        """The rows that verify drafts."""
        if not self.plan.drafts:
            return []
        return [row for row, want in zip(self.rows, self.plan.wants, strict=True) if want is Want.VERIFY]

    @cached_property
    def token_ids(self) -> Tensor:
        """[T] int64"""
        return self.slots.tokens[self.token_slots, self.positions].long()

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64"""
        before = torch.tensor([row.start - row.offset for row in self.rows])
        return torch.arange(self.tokens) + before[self._row_of]

    @cached_property
    def page_tables(self) -> Tensor:
        """[R, P] int64, P pages for the longest row; entries behind a row's own pages are undefined."""
        pages_max = -(-max(row.end for row in self.rows) // self.slots.page_size)
        return self.slots.page_table[torch.tensor(self.plan.slots), :pages_max].long()

    @cached_property
    def places(self) -> TokenPlaces:
        size = self.slots.page_size
        return TokenPlaces(
            pages=self.slots.page_table[self.token_slots, self.positions // size].long(),
            offsets=self.positions % size,
            begun_pages=self._begun_pages(),
        )

    @cached_property
    def sampled_at(self) -> Tensor:
        """[S] int64: the last token of each row that samples, and all of one that verifies."""
        if self.plan.drafts:
            rows = zip(self.rows, self.plan.wants, strict=True)
            firsts = [(row, row.length - 1 if want is Want.SAMPLE else 0) for row, want in rows if want]
            return torch.tensor([at + row.offset for row, first in firsts for at in range(first, row.length)])
        return torch.tensor([row.offset + row.length - 1 for row in self.sampled], dtype=torch.int64)

    @cached_property
    def _row_of(self) -> Tensor:
        """[T] int64"""
        return torch.repeat_interleave(torch.tensor(self.plan.lengths), output_size=self.tokens)

    @cached_property
    def token_slots(self) -> Tensor:
        """[T] int64"""
        return torch.tensor(self.plan.slots)[self._row_of]

    def _begun_pages(self) -> Tensor | None:
        """The pages, int64, that the step begins and does not fill; None where there are none."""
        size = self.slots.page_size
        lasts = ((row, row.end // size) for row in self.rows if row.end % size)
        begun = [(row.slot, last) for row, last in lasts if last * size >= row.start]
        if not begun:
            return None
        owners, places = zip(*begun, strict=True)
        return self.slots.page_table[torch.tensor(owners), torch.tensor(places)].long()


def _rows_of(plan: Plan, seats: Seats) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """The plan's rows, and those of them that sample. Asserts that they follow from the seats' state."""
    offsets = accumulate(plan.lengths, initial=0)
    rows = tuple(map(Row, plan.slots, plan.positions, plan.lengths, offsets))
    for row, want in zip(rows, plan.wants, strict=True):
        _check(row, want, seats)
    return rows, rows if all(plan.wants) else tuple(compress(rows, plan.wants))


def _check(row: Row, want: Want, seats: Seats) -> None:
    seat, end = seats.seat(row.slot), row.end
    known_len = seat.known_len + (row.length - 1 if want is Want.VERIFY else 0)
    assert 0 <= row.start < end <= known_len, f"slot {row.slot} knows {known_len} tokens: {row}"
    assert end <= seat.pages * seats.page_size, f"slot {row.slot} has {seat.pages} pages: {row}"
    assert want is Want.NOTHING or end == known_len, f"slot {row.slot} samples before its end: {row}"
