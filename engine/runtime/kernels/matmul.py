"""Matrix multiplication for decode: few rows of activations, a weight that is read once.

Below about 180 rows an H200 multiplies faster than it reads, and below 64 the library's kernels, made for
squares, do not always read at the memory's rate. This kernel does nothing but read: each program streams
`Tile.n` rows of the weight through shared memory, several `Tile.k` columns ahead, and multiplies the tiles
that have arrived.

No split of K here: a product's sum runs over ascending k in one program, so that it does not depend on how
many programs there are. Narrow tiles (16 or 32 rows of the weight) keep all multiprocessors busy instead. For
more rows of activations there is `split_matmul.py`.

**A single row** is a sixteenth of the least that the tensor cores multiply, and all sixteen rows would have
to be fetched, normed and laid out. Tiles for it (`TILES_ALONE`) use ordinary arithmetic: a program keeps a
sum for every eight neighbours of its tile, in float32, and adds those up at the end. Per byte of the weight
that is as many instructions as with the tensor cores, but half of them where the row is normed on the way;
and the shared memory is all the weight's.

A weight in fp8 (e4m3) is converted as it arrives, and the product multiplied by the row's scale at the end:
half the bytes, and in decode nearly half the time. Where groups of columns have scales of their own, each
tile's product is multiplied before it is added. The library multiplies such a weight only when it is restored
(`restoring.py`), so it may have more rows of activations here than others, up to 256.

**A norm in the head.** Before a product in a decoder there often is the norm of the residual stream:
s = residual + change, and y = W (s * g / rms(s)). 1 / rms is one number per row, so it commutes with the
product: a program multiplies the weight by s * g as it goes, adds up the squares of s on the way, and
multiplies by 1 / rms at its end. Each program sums all squares for itself, in the same order, and reads s
again; with few rows that is less than a kernel's start. s goes into another buffer than it is read from, as
others still read there; of its tiles each program writes a share.

**SiLU in the tail**, or another function of gates. Where the weight's upper half is a gate, a program's tile
is the same rows of both halves, multiplied as one, and it stores silu(gate) * up.

Rounding. Without the head, s * g / rms is rounded to the activations' type before it is multiplied; with it,
s * g is. That is one rounding of each element either way, of the same relative size, and the rest is float32:
neither is nearer to the truth. s itself is rounded first, as the next layer sees it so. With the tail, gate
and up are not rounded before they meet, which is nearer. A product s * g needs the range of bfloat16: in
float16 it may overflow where its norm does not, so there the head stays a kernel of its own.

Launched beside the kernel before it (`dependent_launch.py`), a program fetches the first tiles of its weight
into the second-level cache before it waits.

Which tile, or the library, is best for a shape is measured on the device at warm-up (`autotune.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kernels.activation import activated
from engine.runtime.kernels.dependent_launch import dependent, prefetch, wait_for_earlier
from engine.runtime.kernels.fused import Norm, ResidualStream
from engine.runtime.kernels.launching import launch
from engine.runtime.kernels.widening import widened
from engine.runtime.weights.fp8 import Fp8Weight

Weight = Tensor | Fp8Weight

ROWS: Final = (16, 32, 64)
"""Rows of activations that a kernel is compiled for; `tl.dot` wants at least 16."""
ROWS_MAX: Final = ROWS[-1]
ROWS_FP8: Final = (*ROWS, 128, 256)
"""Rows of activations for an fp8 weight. The library needs the weight restored first, which takes longer than
these products."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that a program multiplies at once, and how far ahead it reads."""

    n: int
    """Rows of the weight in a tile; with a gate, half of them are the gate's."""
    k: int
    warps: int
    stages: int
    alone: bool = False
    """True if the tile is for a single row, which is multiplied without the tensor cores: these want 16."""
    splits: int = 1
    """Programs that share a tile's columns: one, but in `split_matmul.py`."""


TILES: Final = (
    # Bytes in flight per program, bf16: n * k * 2 * (stages - 1). A multiprocessor needs 26 KB.
    Tile(16, 256, 4, 5),  # 32 KiB; 256 programs for a weight of 4,096 rows
    Tile(32, 128, 4, 6),  # 40 KiB
    Tile(32, 256, 4, 4),  # 48 KiB
    Tile(64, 128, 4, 5),  # 64 KiB; for weights of 10,000 rows and more
    Tile(128, 64, 8, 5),  # 64 KiB
)
NARROW: Final = Tile(8, 512, 4, 5)
"""A tile for weights of few rows, with 32 KiB in flight: 128 programs for 1,024 rows. Wider tiles would leave
half of a large GPU's multiprocessors nothing to read."""
NARROW_HEIGHT_MAX: Final = 2048


TILES_ALONE: Final = (
    # Wide enough that every thread has 4 bytes of the row to fetch: fewer cannot be fetched ahead.
    Tile(8, 512, 4, 5, alone=True),  # 32 KiB
    Tile(16, 256, 4, 6, alone=True),  # 40 KiB
    Tile(32, 256, 4, 4, alone=True),  # 48 KiB
)


_NEIGHBOURS = tl.constexpr(8)
"""Numbers of bfloat16 that a thread loads at once."""

TILES_MANY: Final = (
    # Up to 256 rows: the tensor cores have to be kept busy, the memory less so.
    Tile(64, 64, 8, 4),
    Tile(128, 64, 8, 4),
)


def rows_max(weight: Weight) -> int:
    """The most rows of activations that a kernel here multiplies with this weight."""
    return ROWS_FP8[-1] if isinstance(weight, Fp8Weight) else ROWS_MAX


def tiles_for(height: int, rows: int) -> Sequence[Tile]:
    """The tiles worth trying for a weight of `height` rows and so many rows of activations."""
    if rows > ROWS_MAX:
        return TILES_MANY
    is_narrow = height <= NARROW_HEIGHT_MAX and rows <= ROWS[0]
    tiles = (NARROW, *TILES) if is_narrow else TILES
    return (*tiles, *TILES_ALONE) if rows == 1 else tiles


def parts_of(weight: Weight) -> tuple[Tensor, Tensor | None, int]:
    """A weight's numbers [N, K]; its scales, None unless it is fp8; and the columns that share a scale, 0 for
    all of them."""
    if isinstance(weight, Fp8Weight):
        return weight.values, weight.scales, weight.group
    return weight, None, 0


def row_bucket(rows: int) -> int:
    """The number of rows that a kernel is compiled for, for up to `rows_max` rows of activations."""
    return next(bucket for bucket in ROWS_FP8 if rows <= bucket)


@dataclass(frozen=True, slots=True)
class NormHead:
    """The work of a kernel on activations before it multiplies them."""

    change: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    total: Tensor | None = None


NO_HEAD: Final = NormHead()


def skinny_matmul(
    x: Tensor,
    weight: Weight,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    gelu: bool = False,
    out: Tensor | None = None,
    head: NormHead = NO_HEAD,
) -> Tensor:
    """x [M, K], M <= `rows_max`; weight [N, K] in x's type or fp8; bias [N] -> [M, N].

    y = (x @ weight^T) * scales + bias, in float32, rounded once. Groups of columns are a multiple of
    the tile's. `gated`: silu(y's first half) * y's second half, [M, N / 2]; with `gelu`, GELU by tanh.
    """
    values, scales, group = parts_of(weight)
    (rows, width), halves = x.shape, 1 + gated
    height, block_n = values.shape[0] // halves, tile.n // halves
    assert rows <= rows_max(weight)
    assert values.shape[1] == width
    assert all(t.is_contiguous() for t in (x, head.change, head.total, values, bias, out) if t is not None)
    assert group % tile.k == 0
    assert rows == 1 or not tile.alone
    assert tile.splits == 1
    out = x.new_empty(rows, height) if out is None else out
    launch(
        skinny_kernel,
        (triton.cdiv(height, block_n),),
        *(x, head.change, head.norm, head.eps, head.total),
        *(values, scales, bias, out, rows, height, width),
        GATED=gated,
        GELU=gelu,
        EVEN=height % block_n == 0 and width % tile.k == 0,
        GROUP=group,
        BLOCK_M=1 if tile.alone else row_bucket(rows),
        BLOCK_N=block_n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
        STAGES=tile.stages,
        **dependent(),
    )
    return out


def normed_matmul(
    stream: ResidualStream, norm: Norm, weight: Weight, tile: Tile, **tail: Any
) -> tuple[Tensor, ResidualStream]:
    """`skinny_matmul` of the stream's norm, and the stream with its change added. The given stream is left as
    it is. `tail`: what that takes by name."""
    residual, change = stream.residual, stream.change
    total = None if change is None else torch.empty_like(residual)
    head = NormHead(change, norm.weight, norm.eps, total)
    found = skinny_matmul(residual, weight, tile, head=head, **tail)
    return found, ResidualStream(residual if total is None else total)


@triton.jit(do_not_specialize=["rows"])  # or warm-up would not compile for every batch
def skinny_kernel(
    x,
    change,
    norm,
    eps,
    total,
    weight,
    scales,
    bias,
    out,
    rows,
    height,
    width,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`height` is the output's; with a gate, the weight has twice as many rows. A BLOCK_M of 1 is a single
    row: its products are added up by eights, and these sums at the end."""
    ALONE: tl.constexpr = BLOCK_M == 1
    TILE: tl.constexpr = BLOCK_N * (1 + GATED)
    row = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, TILE) % BLOCK_N
    inside_n = n < height
    n += tl.arange(0, TILE) // BLOCK_N * height
    k = tl.arange(0, BLOCK_K)
    x_at = row[:, None] * width + k[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * width + k[None, :]
    if PDL:
        _prefetch(weight, n, inside_n, 0, width, (STAGES - 1) * BLOCK_K)
    wait_for_earlier(PDL)
    acc = tl.zeros([TILE, BLOCK_K // _NEIGHBOURS] if ALONE else [BLOCK_M, TILE], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K // _NEIGHBOURS], tl.float32)
    # without a dot, a loop is pipelined only where that is asked for
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES if ALONE else None):
        inside_k = start + k < width
        inside = row[:, None] < rows
        if not EVEN:
            inside = inside & inside_k[None, :]
        stream = tl.load(x + start + x_at, mask=inside, other=0.0)
        if change is not None:
            added = tl.load(change + start + x_at, mask=inside, other=0.0).to(tl.float32)
            stream = (stream.to(tl.float32) + added).to(stream.dtype)
        part = stream
        if norm is not None:
            wide = stream.to(tl.float32)
            squares += _add_neighbours(wide * wide)
            wide *= _load(norm + start + k, inside_k, EVEN)[None, :]
            part = wide if ALONE else wide.to(stream.dtype)
        scale_at = start // GROUP * height * (1 + GATED) + n if GROUP > 0 else n
        acc = _add_product(acc, part, w_at + start, scales, scale_at, inside_n, inside_k, EVEN, GROUP)
        if change is not None:  # stored last: before the product, registers would spill
            turn = start // BLOCK_K % tl.num_programs(0)
            own_rows = tl.where(turn == tl.program_id(0), rows, 0)
            tl.store(total + start + x_at, stream, mask=inside & (row[:, None] < own_rows))
    if ALONE:
        acc = tl.sum(acc, 1)[None, :]
    if norm is not None:
        acc *= (1.0 / tl.sqrt(tl.sum(squares, 1) / width + eps))[:, None]
    acc = _finish(acc, scales, bias, n, inside_n, GROUP)
    if GATED:
        acc = _gated(acc, GELU)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = out + row[:, None] * height + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (n[None, :] < height))


@triton.jit
def _gated(y, GELU: tl.constexpr):
    """silu(y's first half) * y's second half, or GELU of it: [M, 2 N] -> [M, N]."""
    gate, up = tl.split(tl.permute(tl.reshape(y, [y.shape[0], 2, y.shape[1] // 2]), (0, 2, 1)))
    return activated(gate, GELU) * up


@triton.jit
def _prefetch(weight, n, inside, begin, width, COLUMNS: tl.constexpr):
    """Prefetch columns from `begin` of rows n, as many as the loop has in flight: no kernel writes them."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    column = begin + tl.arange(0, triton.next_power_of_2(COLUMNS // LINE)) * LINE
    row = tl.where(inside, n, 0).to(tl.int64)
    prefetch(weight + row[:, None] * width + tl.minimum(column, tl.maximum(width - LINE, 0))[None, :])


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _add_product(
    acc, part, tile_at, scales, scale_at, inside_n, inside_k, EVEN: tl.constexpr, GROUP: tl.constexpr
):
    """acc + part @ tile^T, the product times the tile's scales where groups have their own. For a single row:
    acc [N, K / 8] + part * tile, with eight neighbours added."""
    tile = _load(tile_at, inside_n[:, None] & inside_k[None, :], EVEN)
    if part.shape[0] == 1:
        product = _add_neighbours(part.to(tl.float32) * widened(tile, tl.float32))
        if GROUP > 0:
            product *= tl.load(scales + scale_at, mask=inside_n, other=0.0)[:, None]
        acc += product
    elif GROUP > 0:
        scale = tl.load(scales + scale_at, mask=inside_n, other=0.0)
        acc += tl.dot(part, widened(tile, part.dtype).T, input_precision="ieee") * scale[None, :]
    else:
        acc = tl.dot(part, widened(tile, part.dtype).T, acc, input_precision="ieee")
    return acc


@triton.jit
def _add_neighbours(x):
    """[M, K] -> [M, K / 8], the sums of eight neighbours: one thread has all eight, and saves registers."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // _NEIGHBOURS, _NEIGHBOURS]), 2)


@triton.jit
def _finish(acc, scales, bias, n, inside, GROUP: tl.constexpr):
    """The product times the scales of the weight's rows, plus the bias."""
    if GROUP == 0 and scales is not None:
        acc *= tl.load(scales + n, mask=inside, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc
