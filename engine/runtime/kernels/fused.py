"""The operations between a layer's matrix multiplications, in three kernels instead of a dozen.

At batch 1 a layer's small operations cost no memory traffic worth naming; each costs a kernel's start and
end, 2 to 4 us in a CUDA graph on an H200. At batch 256 each costs a pass over the activations. Fusing saves
both:

    rms_norm             residual += x; norm(residual) * weight
    norm_rotate_store    queries and keys normed (where the model does) and rotated; keys and values stored
    silu_mul             silu(gate) * up, or GELU in its place

    sigmoid_mul          x * sigmoid(gate), where attention has an output gate

With few rows the first and the third are not kernels of their own, but a product's head and tail
(`matmul.py`).

Everything is computed in float32 and rounded once, when it is stored; the sum with the residual is rounded
before it is normed, because the rounded one is what the next layer sees. One row is one program, so a row's
bits do not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kernels.activation import activated
from engine.runtime.kernels.dependent_launch import dependent, wait_for_earlier
from engine.runtime.kernels.launching import launch
from engine.runtime.weights.fp8 import FP8_MAX

NORM_WARPS: Final = 8
"""Warps per row of a norm: a row of 4,096 is then 16 elements per thread, two wide loads."""
HEADS_BLOCK: Final = 8
"""Heads per program: 8 x 128 elements are 8 per thread, and a batch of 1 still makes 5 programs for the 40
heads of an 8B model's queries and keys."""
SILU_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm (Zhang and Sennrich 2019)."""

    weight: Tensor
    """[hidden] float32, so that a block of it can be fetched ahead of its use however small it is."""
    eps: float


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """The hidden states between two blocks, [T, hidden]: the residual, and the last block's output, which the
    next kernel adds to it (None: nothing is left to add)."""

    residual: Tensor
    change: Tensor | None = None

    def plus(self, change: Tensor) -> ResidualStream:
        assert self.change is None
        return ResidualStream(self.residual, change)


def norm_stream(stream: ResidualStream, norm: Norm | None) -> tuple[Tensor, ResidualStream]:
    """The stream's norm, without one the stream itself, and the stream with its change added in place. The
    given stream must not be used again."""
    if norm is None:
        whole = stream.residual if stream.change is None else stream.residual.add_(stream.change)
        return whole, ResidualStream(whole)
    if stream.change is None:
        return rms_norm(stream.residual, norm.weight, norm.eps), stream
    return rms_norm(stream.change, norm.weight, norm.eps, stream.residual), ResidualStream(stream.residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x [T, hidden] -> the same shape. With `residual`, in place: residual += x, and that is normed."""
    rows, hidden = x.shape
    assert x.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    out = torch.empty_like(x)
    launch(
        rms_norm_kernel,
        (rows,),
        x,
        residual,
        weight,
        out,
        hidden,
        eps,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=NORM_WARPS,
        **dependent(),
    )
    return out


@dataclass(frozen=True, slots=True)
class QKNorm:
    """The norms of each query's and each key's head."""

    q_weight: Tensor
    """[D]"""
    k_weight: Tensor
    """[D]"""
    eps: float
    rotated: bool = False
    """True if a head is normed when it is rotated, and not before."""
    squares: Tensor | None = None
    """The mean squares of all queries and of all keys of each token, [T, 2] float32, where these are normed
    as one: the weights are then [H D] and [Hkv D]. None: each head by its own."""


def norm_rotate_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    norm: QKNorm | None,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    offsets: Tensor,
    *,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    clear_tails: bool = False,
    gated: bool = False,
    tempers: Tensor | None = None,
) -> Tensor:
    """qkv [T, (H + 2 Hkv) D], and with `gated` H D more behind, which are left alone -> queries [T, H, D];
    keys and values go to (page, offset) [T] of the cache.

    angles: cos and sin, [T, D/2] each. tempers: factors of queries, [T] float32. keys, values [pages, Hkv,
    page_size, D]. They are divided by `kv_scales` before they are stored and, in fp8, clamped to the type's
    range. With `clear_tails` the rest of a page that these tokens begin becomes zero; tokens of a row must
    follow each other.
    """
    _, kv_heads, page_size, head_dim = keys.shape
    tokens, columns = qkv.shape
    heads = (columns // head_dim - 2 * kv_heads) // (2 if gated else 1)
    assert all(t.is_contiguous() for t in (qkv, *angles, keys, values))
    assert angles[0].numel() == tokens * head_dim // 2
    q = qkv.new_empty(tokens, heads, head_dim)
    q_blocks, kv_blocks = (triton.cdiv(count, HEADS_BLOCK) for count in (heads, kv_heads))
    kind, weights = _kind_of(norm)
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "Q_BLOCKS": q_blocks, "HEADS_BLOCK": HEADS_BLOCK}
    sizes = {"COLUMNS": columns, "HALF": head_dim // 2, "PAGE": page_size}
    launch(
        norm_rotate_store_kernel,
        (tokens, q_blocks + kv_blocks),
        *(qkv, q, *angles, tempers, *weights),
        *(keys, values, pages, offsets),
        *(1.0 / scale for scale in kv_scales),
        NORM=kind,
        LIMIT=FP8_MAX if keys.dtype == torch.float8_e4m3fn else 0.0,
        CLEAR=clear_tails,
        **constants,
        **sizes,
        num_warps=4,
        **dependent(),
    )
    return q


def _kind_of(norm: QKNorm | None) -> tuple[int, tuple[Tensor | None, Tensor | None, Tensor | None, float]]:
    """The kernel's NORM, and what it reads for it."""
    if norm is None:
        return 0, (None, None, None, 0.0)
    kind = 3 if norm.squares is not None else 2 if norm.rotated else 1
    return kind, (norm.squares, norm.q_weight, norm.k_weight, norm.eps)


def mean_squares(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """qkv [T, (H + 2 Hkv) D] -> the mean squares of its queries and of its keys, [T, 2] float32."""
    assert qkv.is_contiguous()
    found = qkv.new_empty(len(qkv), 2, dtype=torch.float32)
    sizes = {"QUERIES": heads * head_dim, "KEYS": kv_heads * head_dim, "COLUMNS": qkv.shape[1]}
    block = triton.next_power_of_2(heads * head_dim)
    launch(mean_squares_kernel, (len(qkv), 2), qkv, found, **sizes, BLOCK=block, num_warps=8, **dependent())
    return found


def silu_mul(gate_up: Tensor, *, gelu: bool = False) -> Tensor:
    """gate_up [T, 2 I], the gate's half first -> silu(gate) * up, [T, I]; with `gelu`, GELU by tanh."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(rows, inner)
    grid = (rows, triton.cdiv(inner, SILU_BLOCK))
    constants = {"GELU": gelu, "BLOCK": SILU_BLOCK}
    launch(silu_mul_kernel, grid, gate_up, out, inner, **constants, num_warps=4, **dependent())
    return out


def sigmoid_mul(x: Tensor, gates: Tensor) -> Tensor:
    """x [T, N] times sigmoid of the last N columns of gates [T, any], in place."""
    rows, columns = x.shape
    assert all((x.is_contiguous(), gates.is_contiguous()))
    grid, width = (rows, triton.cdiv(columns, SILU_BLOCK)), gates.shape[1]
    launch(sigmoid_mul_kernel, grid, x, gates, columns, width, BLOCK=SILU_BLOCK, num_warps=4, **dependent())
    return x


@triton.jit
def rms_norm_kernel(x, residual, weight, out, hidden, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_earlier(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + column
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row) / hidden + eps)
    normed = row * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def mean_squares_kernel(
    qkv,
    out,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per token, for its queries and for its keys."""
    wait_for_earlier(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.where(part == 0, QUERIES, KEYS)
    column = tl.arange(0, BLOCK)
    at = qkv + token * COLUMNS + part * QUERIES + column
    row = tl.load(at, mask=column < count, other=0.0).to(tl.float32)
    tl.store(out + token * 2 + part, tl.sum(row * row) / count)


@triton.jit
def norm_rotate_store_kernel(
    qkv,
    q,
    cos,
    sin,
    tempers,
    squares,
    q_weight,
    k_weight,
    eps,
    keys,
    values,
    pages,
    offsets,
    k_factor,
    v_factor,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    LIMIT: tl.constexpr,
    CLEAR: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per token and block of heads: first the blocks of queries, then those of keys."""
    wait_for_earlier(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, HALF)
    cosine = tl.load(cos + token * HALF + dim).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HALF + dim).to(tl.float32)[None, :]
    source = qkv + token * COLUMNS
    if block < Q_BLOCKS:
        head = block * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        at = head * (2 * HALF) + dim[None, :]
        first, second = _turned(
            source + at, head, head < HEADS, q_weight, squares, token * 2, eps, cosine, sine, NORM, HALF
        )
        if tempers is not None:
            temper = tl.load(tempers + token)
            first *= temper
            second *= temper
        target = q + token * (HEADS * 2 * HALF) + at
        tl.store(target, first.to(q.dtype.element_ty), mask=head < HEADS)
        tl.store(target + HALF, second.to(q.dtype.element_ty), mask=head < HEADS)
    else:
        head = (block - Q_BLOCKS) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        inside = head < KV_HEADS
        k_at = source + (HEADS + head) * (2 * HALF) + dim[None, :]
        page, offset = tl.load(pages + token).to(tl.int64), tl.load(offsets + token)
        place = ((page * KV_HEADS + head) * PAGE + offset) * (2 * HALF) + dim[None, :]
        first, second = _turned(
            k_at, head, inside, k_weight, squares, token * 2 + 1, eps, cosine, sine, NORM, HALF
        )
        _store(keys + place, first * k_factor, inside, LIMIT)
        _store(keys + place + HALF, second * k_factor, inside, LIMIT)
        for half in tl.static_range(2):
            v_at = k_at + KV_HEADS * 2 * HALF + half * HALF
            value = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
            _store(values + place + half * HALF, value * v_factor, inside, LIMIT)
        if CLEAR:
            for ahead in range(1, _tail(pages, page, offset, token, PAGE)):
                for half in tl.static_range(2):
                    zero = tl.zeros([HEADS_BLOCK, HALF], tl.float32)
                    _store(keys + place + (2 * ahead + half) * HALF, zero, inside, LIMIT)
                    _store(values + place + (2 * ahead + half) * HALF, zero, inside, LIMIT)


@triton.jit
def _tail(pages, page, offset, token, PAGE: tl.constexpr):
    """The number of tokens from a token to its page's end, if this step begins the page and the token is the
    row's last in it; else 0. An earlier token must not clear what a later one's program writes meanwhile."""
    after, first = token + 1, tl.maximum(token - offset, 0)
    is_last = tl.load(pages + after, mask=after < tl.num_programs(0), other=-1) != page
    is_begun = (token >= offset) & (tl.load(pages + first) == page)
    return tl.where(is_last & is_begun, PAGE - offset, 0)


@triton.jit
def _turned(
    at, head, inside, weight, squares, place, eps, cosine, sine, NORM: tl.constexpr, HALF: tl.constexpr
):
    """Both halves of heads, rotated, [HEADS_BLOCK, D/2] float32 each; normed where NORM is 1 before, where it
    is 2 behind, where it is 3 before by the mean square of them all, which is in `place`."""
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM == 1:
        first, second = _normed(first, second, weight, eps, HALF)
    if NORM == 3:
        scale = 1.0 / tl.sqrt(tl.load(squares + place) + eps)
        dim = head * (2 * HALF) + tl.arange(0, HALF)[None, :]
        first *= scale * tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + dim, mask=inside, other=0.0).to(tl.float32)
    first, second = first * cosine - second * sine, second * cosine + first * sine
    if NORM == 2:
        first, second = _normed(first, second, weight, eps, HALF)
    return first, second


@triton.jit
def _normed(first, second, weight, eps, HALF: tl.constexpr):
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
    dim = tl.arange(0, HALF)[None, :]
    first *= scale * tl.load(weight + dim).to(tl.float32)
    second *= scale * tl.load(weight + HALF + dim).to(tl.float32)
    return first, second


@triton.jit
def _store(at, value, inside, LIMIT: tl.constexpr):
    if LIMIT > 0:
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    tl.store(at, value.to(at.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, inner, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = gate_up + row * 2 * inner + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    result = activated(gate, GELU) * up
    tl.store(out + row * inner + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sigmoid_mul_kernel(x, gates, columns, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = x + row * columns + column
    gate = tl.load(gates + row * width + width - columns + column, mask=inside, other=0.0).to(tl.float32)
    result = tl.load(at, mask=inside, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(at, result.to(x.dtype.element_ty), mask=inside)
