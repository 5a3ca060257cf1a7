"""The inputs of a decode step's first layer, gathered in one kernel.

The host gives each row's slot and its number of tokens. The last of these tokens is the step's; all else
follows from it and from the device's tables by slot:

    position    length - 1
    residual    the token's row of the embedding, times a factor where the model has one
    cos, sin    of position times the rotary frequencies, times their amplitudes, for each kind of layer
    page, offset    where its keys and values go
    temper      the factor of its queries, where the model has one
    table       the slot's page table, for attention

One program gathers all of that for its row. torch would launch some twenty kernels, each of which moves too
little to be worth its launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kernels.dependent_launch import plain, wait_for_earlier
from engine.runtime.kernels.launching import launch
from engine.runtime.models.spec import Tempering

COPY_BLOCK: Final = 1024
"""Entries of an embedding or a page table that are copied at once."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The inputs of a step's layers: T tokens, packed, on the device."""

    residual: Tensor
    """The tokens' embeddings, [T, hidden]."""
    angles: Sequence[tuple[Tensor, Tensor]]
    """cos and sin of the tokens' positions, [T, D/2] float32 each, for each of the model's ropes."""
    pages: Tensor
    """The page that a token's keys and values go to, [T] int64."""
    offsets: Tensor
    """The token's place in that page, [T] int64."""
    tempers: Tensor | None = None
    """The factors of the tokens' queries, [T] float32; None: there are none."""


def begin_step(
    slots: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    page_table: Tensor,
    embedding: Tensor,
    frequencies: Tensor,
    page_size: int,
    embed_scale: float = 1.0,
    tempering: Tempering | None = None,
) -> tuple[StepRows, Tensor]:
    """slots, lengths [R] int32; tokens [slots, any], page_table [slots, P] int32; embedding [vocab, hidden];
    frequencies [ropes, 2, D/2] float32, amplitudes behind -> the rows' last tokens, and their page tables [R,
    P] int32. `embed_scale`: the factor of embeddings, rounded to their type."""
    rows, hidden, (ropes, _, half) = len(slots), embedding.shape[1], frequencies.shape
    assert all(t.is_contiguous() for t in (tokens, page_table, embedding, frequencies))
    assert half == triton.next_power_of_2(half)
    cos, sin = (torch.empty(ropes, rows, half, device=slots.device) for _ in range(2))
    pages, offsets = (torch.empty(rows, dtype=torch.int64, device=slots.device) for _ in range(2))
    tempers = None if tempering is None else torch.empty(rows, device=slots.device)
    angles = list(zip(cos, sin, strict=True))
    begun = StepRows(embedding.new_empty(rows, hidden), angles, pages, offsets, tempers)
    tables = page_table.new_empty(rows, page_table.shape[1])
    launch(
        begin_step_kernel,
        (rows,),
        *(slots, lengths, tokens, page_table, embedding, frequencies),
        *(begun.residual, cos, sin, pages, offsets, tables, tempers),
        *((0.0, 1) if tempering is None else (tempering.beta, tempering.original_context_len)),
        *(tokens.shape[1], page_table.shape[1], hidden, embed_scale),
        SCALED=embed_scale != 1.0,
        PAGE=page_size,
        HALF=half,
        ROPES=ropes,
        BLOCK=COPY_BLOCK,
        num_warps=4,
        **plain(),
    )
    return begun, tables


@triton.jit
def begin_step_kernel(
    slots,
    lengths,
    tokens,
    page_table,
    embedding,
    frequencies,
    residual,
    cos,
    sin,
    pages,
    offsets,
    tables,
    tempers,
    beta,
    period,
    tokens_width,
    table_width,
    hidden,
    embed_scale,
    SCALED: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    ROPES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(lengths + row) - 1
    token = tl.load(tokens + slot * tokens_width + position).to(tl.int64)
    table = page_table + slot * table_width
    tl.store(pages + row, tl.load(table + position // PAGE).to(tl.int64))
    tl.store(offsets + row, (position % PAGE).to(tl.int64))
    if tempers is not None:
        tl.store(tempers + row, 1.0 + beta * tl.log(1.0 + (position // period).to(tl.float32)))
    dim = tl.arange(0, HALF)
    for rope in tl.static_range(ROPES):
        angle = position.to(tl.float32) * tl.load(frequencies + rope * 2 * HALF + dim)
        amplitude = tl.load(frequencies + (rope * 2 + 1) * HALF + dim)
        at = (rope * tl.num_programs(0) + row) * HALF + dim
        tl.store(cos + at, tl.cos(angle) * amplitude)
        tl.store(sin + at, tl.sin(angle) * amplitude)
    _copy(embedding + token * hidden, residual + row * hidden, hidden, embed_scale, SCALED, BLOCK)
    _copy(table, tables + row * table_width, table_width, 1.0, False, BLOCK)


@triton.jit
def _copy(source, target, count, factor, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < count)
        if SCALED:
            value = (value.to(tl.float32) * factor).to(target.dtype.element_ty)
        tl.store(target + at, value, mask=at < count)
