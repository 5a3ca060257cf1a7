"""Converts an fp8 weight to the compute type, for products of many rows, which the library multiplies.

Three bytes are moved per number, one read and two written: by the time that a few hundred rows are
multiplied, that is the smaller part. Scales are multiplied in here, where each is needed once, and not behind
the product, which would be three passes over all that comes out. A number is rounded once more, to bfloat16:
by a tenth of a per cent, where fp8 rounded it by several.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kernels.dependent_launch import dependent, wait_for_earlier
from engine.runtime.kernels.launching import launch
from engine.runtime.kernels.widening import widened
from engine.runtime.models.quantization import GROUP_MULTIPLE
from engine.runtime.weights.fp8 import Fp8Weight

ROWS_BLOCK: Final = 16
COLUMNS_BLOCK: Final = 256
"""Columns of a tile: with 16 rows, 32 numbers per thread, two loads of 16 bytes."""


def restored(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`, rounded once."""
    rows, columns = weight.values.shape
    assert weight.values.is_contiguous()
    assert weight.scales.is_contiguous()
    out = torch.empty(rows, columns, dtype=dtype, device=weight.values.device)
    columns_block = COLUMNS_BLOCK
    while weight.group % columns_block:
        columns_block //= 2
    assert columns_block >= min(COLUMNS_BLOCK, GROUP_MULTIPLE)
    launch(
        restore_kernel,
        (triton.cdiv(rows, ROWS_BLOCK), triton.cdiv(columns, columns_block)),
        weight.values,
        weight.scales,
        out,
        rows,
        columns,
        GROUP=weight.group,
        ROWS_BLOCK=ROWS_BLOCK,
        COLUMNS_BLOCK=columns_block,
        num_warps=4,
        **dependent(),
    )
    return out


@triton.jit
def restore_kernel(
    values,
    scales,
    out,
    rows,
    columns,
    GROUP: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    COLUMNS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per tile, whose columns lie in one group."""
    wait_for_earlier(PDL)
    row = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)
    column = tl.program_id(1) * COLUMNS_BLOCK + tl.arange(0, COLUMNS_BLOCK)
    scale_at = row
    if GROUP > 0:
        scale_at += tl.program_id(1) * COLUMNS_BLOCK // GROUP * rows
    scale = tl.load(scales + scale_at, mask=row < rows, other=0.0)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    wide = widened(tl.load(values + at, mask=inside, other=0.0), tl.float32)
    tl.store(out + at, (wide * scale[:, None]).to(out.dtype.element_ty), mask=inside)
