"""Matrix multiplication for decode: few rows of activations, a weight that is read once.

Below about 180 rows an H200 multiplies faster than it reads, and below 64 the library's kernels, made for
squares, do not always read at the memory's rate. This kernel does nothing but read: each program streams
`Tile.n` rows of the weight through shared memory, several `Tile.k` columns ahead, and multiplies what has
arrived.

No split of K: a product's sum runs over ascending k in one program, so that it does not depend on how many
programs there are. Narrow tiles (16 or 32 rows of the weight) keep all multiprocessors busy instead.

A weight in fp8 (e4m3) is converted as it arrives, and the product multiplied by the row's scale at the end:
half the bytes, and in decode nearly half the time. Where groups of columns have scales of their own, each
tile's product is multiplied before it is added.

Which tile, or the library, is best for a shape is measured on the device at warm-up (`autotune.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

ROWS: Final = (16, 32, 64)
"""Rows of activations that a kernel is compiled for; `tl.dot` wants at least 16."""
ROWS_MAX: Final = ROWS[-1]


@dataclass(frozen=True, slots=True)
class Tile:
    """How a weight is cut and how far ahead it is read."""

    n: int
    k: int
    warps: int
    stages: int


TILES: Final = (
    # Bytes in flight per program, bf16: n * k * 2 * (stages - 1). A multiprocessor needs 26 KB.
    Tile(16, 256, 4, 5),  # 32 KiB; 256 programs for a weight of 4,096 rows
    Tile(32, 128, 4, 6),  # 40 KiB
    Tile(32, 256, 4, 4),  # 48 KiB
    Tile(64, 128, 4, 5),  # 64 KiB; for weights of 10,000 rows and more
    Tile(128, 64, 8, 5),  # 64 KiB
)


def row_bucket(rows: int) -> int:
    """The kernel's row count for so many rows of activations, at most ROWS_MAX."""
    return next(bucket for bucket in ROWS if rows <= bucket)


def skinny_matmul(
    x: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    group: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K], M <= ROWS_MAX; weight [N, K] in x's type or e4m3; scales [N] float32, bias [N] -> [M, N].

    y = (x @ weight^T) * scales + bias, in float32, rounded once. With `group`, a multiple of the tile's
    columns, scales are [ceil(K / group), N], one for so many columns of a row.
    """
    rows, width = x.shape
    height = weight.shape[0]
    assert rows <= ROWS_MAX
    assert weight.shape[1] == width
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert group % tile.k == 0
    out = x.new_empty(rows, height) if out is None else out
    assert out.is_contiguous()
    skinny_kernel[(triton.cdiv(height, tile.n),)](
        x,
        weight,
        scales,
        bias,
        out,
        rows,
        height,
        width,
        EVEN=height % tile.n == 0 and width % tile.k == 0,
        GROUP=group,
        BLOCK_M=row_bucket(rows),
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["rows"])  # or warm-up would not compile for every batch
def skinny_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    rows,
    height,
    width,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * width + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        if EVEN:
            part = tl.load(x_at + start, mask=row[:, None] < rows, other=0.0)
            tile = tl.load(w_at + start)
        else:
            inside = (start + k < width)[None, :]
            part = tl.load(x_at + start, mask=(row[:, None] < rows) & inside, other=0.0)
            tile = tl.load(w_at + start, mask=(n[:, None] < height) & inside, other=0.0)
        if GROUP > 0:
            scale = tl.load(scales + (start // GROUP) * height + n, mask=n < height, other=0.0)
            acc += tl.dot(part, tile.to(part.dtype).T, input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(part, tile.to(part.dtype).T, acc, input_precision="ieee")
    if GROUP == 0 and scales is not None:
        acc *= tl.load(scales + n, mask=n < height, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < height, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * height + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (n[None, :] < height))
