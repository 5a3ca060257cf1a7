"""Multiplication whose sums over K are split among programs, for more than 16 rows of activations.

A weight of few rows and many columns, as a decoder's output, down and QKV projections have, makes few tiles:
at 128 rows of the weight to a tile, a weight of 4,096 rows keeps 32 multiprocessors busy. Narrower tiles are
more, but each of them reads all activations again, which costs as much as the weight at 32 rows and more. So
a tile is kept wide and its columns are divided: each program adds up a share of K, and leaves its sum in
float32.

**The last to arrive combines**, as in decode attention: a counter per tile tells the program that completes
it. That program adds the sums up in the order of K, its own included, from memory; multiplies by scales, adds
the bias, rounds once, and sets the counter back for the next product. So the result does not depend on the
order in which programs arrive. It depends on the number of splits, which belongs to the tile that a start
chose for a number of rows.

Memory order: a program's stores, a barrier among its threads, then an acquire-release addition; the sums are
read past the first-level cache.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kernels.dependent_launch import dependent, wait_for_earlier
from engine.runtime.kernels.launching import launch
from engine.runtime.kernels.matmul import (
    ROWS,
    ROWS_FP8,
    ROWS_MAX,
    Tile,
    Weight,
    _add_product,
    _finish,
    _prefetch,
    parts_of,
    row_bucket,
)

SPLIT_ROWS_MAX: Final = ROWS_FP8[-1]
HEIGHT_MAX: Final = 8192
"""Rows of a weight: tiles of 64 rows keep a card busy without splits where there are more."""
WIDTH_MIN: Final = 2048
"""Columns of a weight, so that a split still reads ahead for most of its time."""
NARROW_HEIGHT_MAX: Final = 2048
"""Rows of a weight that are worth eight splits."""
COUNTERS: Final = 1024
"""The most tiles of a product."""

_FEW = (Tile(64, 128, 4, 4), Tile(128, 64, 8, 5))
_MANY = (Tile(64, 64, 8, 4),)  # wider ones would spill where sums are added up


def split_tiles_for(height: int, width: int, rows: int) -> list[Tile]:
    """The tiles worth trying for a weight [height, width] and so many rows of activations."""
    if not (ROWS[0] < rows <= SPLIT_ROWS_MAX and height <= HEIGHT_MAX and width >= WIDTH_MIN):
        return []
    splits = (2, 4, 8) if height <= NARROW_HEIGHT_MAX else (2, 4)
    tiles = _FEW if rows <= ROWS_MAX else _MANY
    return [Tile(tile.n, tile.k, tile.warps, tile.stages, splits=n) for tile in tiles for n in splits]


def split_matmul(
    x: Tensor, weight: Weight, tile: Tile, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x [M, K], M <= `SPLIT_ROWS_MAX`; weight [N, K] in x's type or fp8; bias [N] -> [M, N].

    y = (x @ weight^T) * scales + bias, in float32, rounded once. Groups of columns are a multiple of the
    tile's.
    """
    out = x.new_empty(len(x), len(parts_of(weight)[0])) if out is None else out
    values, scales, group = parts_of(weight)
    (rows, width), height = x.shape, len(values)
    assert rows <= SPLIT_ROWS_MAX
    block_m, tiles = row_bucket(rows), triton.cdiv(height, tile.n)
    assert values.shape[1] == width
    assert out.shape == (rows, height)
    assert all(t.is_contiguous() for t in (x, values, bias, out) if t is not None)
    assert group % tile.k == 0
    assert tiles <= COUNTERS
    sums = x.new_empty(tiles * tile.splits, block_m, tile.n, dtype=torch.float32)
    launch(
        split_kernel,
        (tiles * tile.splits,),
        *(x, values, scales, bias, out, sums, _counters(x.device)),
        *(rows, height, width, tile.splits),
        EVEN=height % tile.n == 0 and width % tile.k == 0,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        STAGES=tile.stages,
        **dependent(),
    )
    return out


@cache
def _counters(device: torch.device) -> Tensor:
    """The numbers of splits that are done, by tile: zero between launches. One for a device, as products run
    one after another. It is made when products are measured, so before anything is captured."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows", "splits"])
def split_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    sums,
    arrivals,
    rows,
    height,
    width,
    splits,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i computes split i modulo their number; a tile's splits follow each other."""
    place, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    n = place * BLOCK_N + column
    inside_n = n < height
    k = tl.arange(0, BLOCK_K)
    each = (width + splits * BLOCK_K - 1) // (splits * BLOCK_K) * BLOCK_K
    begin, end = split * each, tl.minimum(split * each + each, width)
    x_at = row[:, None] * width + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    if PDL:
        _prefetch(weight, n, inside_n, begin, width, (STAGES - 1) * BLOCK_K)
    wait_for_earlier(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside_k = start + k < width
        inside = row[:, None] < rows
        if not EVEN:
            inside = inside & inside_k[None, :]
        part = tl.load(x + start + x_at, mask=inside, other=0.0)
        scale_at = start // GROUP * height + n if GROUP > 0 else n
        acc = _add_product(acc, part, w_at + start, scales, scale_at, inside_n, inside_k, EVEN, GROUP)
    own = row[:, None] * BLOCK_N + column[None, :]
    exists = row[:, None] < rows
    first = sums + place.to(tl.int64) * splits * (BLOCK_M * BLOCK_N)
    tl.store(first + split * (BLOCK_M * BLOCK_N) + own, acc, mask=exists)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + place, 1, sem="acq_rel") == splits - 1:
        tl.store(arrivals + place, 0)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in range(splits):
            at = first + other * (BLOCK_M * BLOCK_N) + own
            total += tl.load(at, mask=exists, other=0.0, cache_modifier=".cg")
        total = _finish(total, scales, bias, n, inside_n, GROUP)
        at = row[:, None] * height + n[None, :]
        inside = exists & inside_n[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
