"""Paged prefill attention: chunks of tokens, packed, each over its row's whole context in the cache.

Prefill does much arithmetic per byte, so the question is how well the tensor cores are fed.

**Tiles of BLOCK_M query rows** are (token, head of the group) pairs, token by token: a tile of 128 rows at
group 4 is 32 tokens. All of its rows share a kv head, so keys and values are read once per tile, and 64 rows
and more compile to `wgmma` (16 to `mma.sync`, at half the rate). A group that does not divide BLOCK_M
leaves rows idle: 7 uses 126 of 128.

**A page is a tile of keys**, contiguous in the cache: one lookup, then wide asynchronous copies. A page that
is too large for shared memory is several.

**Masks only where they are needed.** A tile's pages fall into those that every token sees whole, which are
most, and those on an edge: the diagonal and, with a window, its far end. They are separate loops; the first
has no mask and no bounds.

**Longest tile first.** Tiles of a causal prompt differ by a factor of its length. The host lists them with
the longest context first, kv heads side by side, so that the tiles that run last are short.

Keys and values come from the cache alone: those of the step itself are written before. A chunk over a cached
prefix is then nothing special, and its tokens come out the same to the bit however the prompt was cut, since
a token's sum runs over the same pages in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kernels.decode_attention import HEAD_DIMS, LOG2_E, tile_tokens
from engine.runtime.kernels.launching import launch
from engine.runtime.kernels.widening import beside, widened
from engine.runtime.step.batch import Row

BLOCK_M: Final = 128
"""Query rows of a tile: two groups of four warps, each with the 64 rows of one `wgmma`."""
WARPS: Final = 8
TILE_BYTES_MAX: Final = 32 << 10
"""Bytes of a tile of keys, in the queries' type: four tiles lie in shared memory beside the queries, and a
multiprocessor has 227 KiB."""
STAGES: Final = 4
"""Stages of the software pipeline, the page's lookup included: two tiles of keys and of values are in shared
memory, 64 KiB at head size 128, beside the 32 KiB of queries."""


def tile_list(chunks: Sequence[Row], group: int, window: int | None = None) -> list[tuple[int, int]]:
    """The tiles as (row, first token within its chunk), the tile with the most keys first."""
    tokens = BLOCK_M // group
    tiles = [(row, first) for row, chunk in enumerate(chunks) for first in range(0, chunk.length, tokens)]

    def keys_seen(tile: tuple[int, int]) -> int:
        chunk, first = chunks[tile[0]], tile[1]
        end = chunk.start + min(first + tokens, chunk.length)
        return end if window is None else min(end, window + tokens)

    return sorted(tiles, key=keys_seen, reverse=True)


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    chunks: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    window: int | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    out: Tensor | None = None,
) -> Tensor:
    """q [T, H, D]; keys, values [pages, Hkv, page_size, D]; tables [R, P] int32 -> [T, H, D].

    chunks [R, 3] int32: start, length and offset of each row. tiles [N, 2] int32: `tile_list` of the same,
    and any tiles of chunks of no tokens at position 0. `kv_scales`: factors of keys and values in fp8.
    """
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    group, tile = heads // kv_heads, tile_tokens(page_size, head_dim, q.dtype, TILE_BYTES_MAX)
    assert head_dim in HEAD_DIMS, f"head size {head_dim} is none of {HEAD_DIMS}"
    assert all((group <= BLOCK_M, tables.stride(1) == 1))
    assert all(t.is_contiguous() for t in (q[0], keys, values, chunks, tiles))
    out = q.new_empty(q.shape) if out is None else out
    launch(
        prefill_kernel,
        (len(tiles) * kv_heads,),
        q,
        keys,
        values,
        tables,
        chunks,
        tiles,
        out,
        q.stride(0),
        tables.stride(0),
        scale * LOG2_E * kv_scales[0],
        kv_scales[1],
        WINDOW=window or 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_M=BLOCK_M,
        D=head_dim,
        PAGE=tile,
        PARTS=page_size // tile,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@triton.jit(
    do_not_specialize_on_alignment=["tables"]
)  # a step's tables begin behind those of its decode rows, at any address
def prefill_kernel(
    q,
    keys,
    values,
    tables,
    chunks,
    tiles,
    out,
    q_stride,
    table_stride,
    scale,
    v_scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program per (tile, kv head), kv heads fastest. A chunk of no tokens has no pages."""
    tile, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    row, first = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    start, length = tl.load(chunks + row * 3), tl.load(chunks + row * 3 + 1)
    offset = tl.load(chunks + row * 3 + 2)
    tokens: tl.constexpr = BLOCK_M // GROUP
    token, member = first + tl.arange(0, BLOCK_M) // GROUP, tl.arange(0, BLOCK_M) % GROUP
    last = tl.minimum(first + tokens, length) - 1
    exists = token <= last
    packed = (offset + token).to(tl.int64)
    in_token = (head * GROUP + member)[:, None] * D + tl.arange(0, D)[None, :]
    query = tl.load(q + packed[:, None] * q_stride + in_token, mask=exists[:, None], other=0.0)
    query = beside(query, keys)
    position = start + token

    # Pages [begin, low) and [high, end) have an edge in them; those between are seen whole by every token.
    high, end = (start + first + 1) // PAGE, (start + last + PAGE) // PAGE
    begin, low = high * 0, high * 0
    if WINDOW > 0:
        begin = tl.maximum(start + first - WINDOW + 1, 0) // PAGE
        low = tl.minimum((tl.maximum(start + last - WINDOW + 1, 0) + PAGE - 1) // PAGE, end)
    high = tl.maximum(high, low)
    table = tables + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW > 0:
        acc, top, weight = _attend_pages(
            acc, top, weight, query, position, keys, values, table, begin, low, start + length, head, scale,
            True, WINDOW, KV_HEADS, D, PAGE, PARTS,
        )  # fmt: skip
    acc, top, weight = _attend_pages(
        acc, top, weight, query, position, keys, values, table, low, high, start + length, head, scale,
        False, WINDOW, KV_HEADS, D, PAGE, PARTS,
    )  # fmt: skip
    acc, top, weight = _attend_pages(
        acc, top, weight, query, position, keys, values, table, high, end, start + length, head, scale,
        True, WINDOW, KV_HEADS, D, PAGE, PARTS,
    )  # fmt: skip
    result = acc * (v_scale / tl.where(weight > 0, weight, 1.0))[:, None]
    out_at = packed[:, None] * (KV_HEADS * GROUP * D) + in_token
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=exists[:, None])


@triton.jit
def _attend_pages(
    acc,
    top,
    weight,
    query,
    position,
    keys,
    values,
    table,
    begin,
    end,
    context,
    head,
    scale,
    EDGE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add pages [begin, end) of the table to the running sum, maximum and weight of each query row."""
    in_page = tl.arange(0, PAGE)
    tile = in_page[:, None] * D + tl.arange(0, D)[None, :]
    for page in range(begin, end):
        whole = tl.load(table + page // PARTS).to(tl.int64) * KV_HEADS + head
        start = (whole * PARTS + page % PARTS) * (PAGE * D)
        key_at = page * PAGE + in_page
        if EDGE:
            written = (key_at < context)[:, None]
            key = widened(tl.load(keys + start + tile, mask=written, other=0.0), query.dtype)
            value = widened(tl.load(values + start + tile, mask=written, other=0.0), query.dtype)
        else:
            key = widened(tl.load(keys + start + tile), query.dtype)
            value = widened(tl.load(values + start + tile), query.dtype)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if EDGE:
            seen = key_at[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key_at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        # A row that has seen no key yet has no maximum; any finite one will do.
        finite = higher
        if EDGE:
            finite = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - finite)
        p = tl.exp2(scores * scale - finite[:, None])
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(query.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, top, weight
