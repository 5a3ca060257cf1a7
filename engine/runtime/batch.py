"""From a plan's rows to the tensors of one step.

Rows are packed: token t of the step belongs to the row whose `[offset, offset + length)` holds t.
All of it follows from (slot, start, length) per row and from what the slots hold, so nothing here
waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from engine.core.messages import Plan
from engine.runtime.kv_cache import TokenPlaces
from engine.runtime.slots import Slots


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens [start, end) of a slot, at [offset, offset + length) of the step."""

    slot: int
    start: int
    length: int
    offset: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens in R rows. The first `decode_rows` rows have one token each."""

    rows: tuple[Row, ...]
    decode_rows: int
    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    page_tables: Tensor
    """[R, P] int64, P pages for the longest row; entries behind a row's own are meaningless."""
    places: TokenPlaces
    sampled: tuple[Row, ...]
    sampled_at: Tensor
    """[S] int64: the last token of each row that samples."""


def assemble(plan: Plan, slots: Slots) -> Batch:
    """The plan's rows as tensors. Asserts that they follow from what the slots hold."""
    offsets = list(accumulate(plan.lengths, initial=0))
    rows = tuple(map(Row, plan.slots, plan.positions, plan.lengths, offsets))
    for row, samples in zip(rows, plan.samples, strict=True):
        _check(row, samples, slots)
    row_slots, starts = torch.tensor(plan.slots), torch.tensor(plan.positions)
    lengths = torch.tensor(plan.lengths)
    row_of = torch.repeat_interleave(lengths, output_size=offsets[-1])
    positions = torch.arange(offsets[-1]) + (starts - torch.tensor(offsets[:-1]))[row_of]
    token_slots = row_slots[row_of]
    page_of = positions // slots.page_size
    pages_max = -(-max(row.end for row in rows) // slots.page_size)
    sampled = tuple(row for row, samples in zip(rows, plan.samples, strict=True) if samples)
    return Batch(
        rows=rows,
        decode_rows=sum(1 for _ in takewhile(lambda row: row.length == 1, rows)),
        token_ids=slots.tokens[token_slots, positions].long(),
        positions=positions,
        page_tables=slots.page_table[row_slots, :pages_max].long(),
        places=TokenPlaces(
            pages=slots.page_table[token_slots, page_of].long(),
            offsets=positions % slots.page_size,
            begun_pages=_begun_pages(rows, slots),
        ),
        sampled=sampled,
        sampled_at=torch.tensor([row.offset + row.length - 1 for row in sampled], dtype=torch.int64),
    )


def _begun_pages(rows: tuple[Row, ...], slots: Slots) -> Tensor | None:
    """Pages whose first token is among the step's and whose last is not."""
    size = slots.page_size
    lasts = ((row, row.end // size) for row in rows if row.end % size)
    begun = [(row.slot, last) for row, last in lasts if last * size >= row.start]
    if not begun:
        return None
    owners, places = zip(*begun, strict=True)
    return slots.page_table[torch.tensor(owners), torch.tensor(places)].long()


def _check(row: Row, samples: bool, slots: Slots) -> None:
    seat = slots.seat(row.slot)
    assert 0 <= row.start < row.end <= seat.known_len, f"slot {row.slot} knows {seat.known_len} tokens: {row}"
    assert row.end <= seat.pages * slots.page_size, f"slot {row.slot} has {seat.pages} pages: {row}"
    assert not samples or row.end == seat.known_len, f"slot {row.slot} samples before its end: {row}"
