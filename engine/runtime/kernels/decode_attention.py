"""Paged decode attention: one query token per row against that row's pages.

Decode attention reads each key and value once and does little with it, so the only question is how close
to the memory's rate it reads. Four decisions follow.

**The group is the tile.** Query heads that share a key-value head are the rows of one matrix: the group's
keys are read once, and `tl.dot` wants 16 rows anyway. The other rows are padding: they cost only arithmetic
that would wait for memory otherwise.

**Splits of fixed size** (flash-decoding, Dao et al. 2023, with the size fixed). A row's keys are cut into
splits of `SPLIT_TOKENS`, wider ones only where a row would have more than `SPLITS_MAX`. The cut follows from
the row's length alone, which makes the result the same in every batch, bit by bit. That is the default.

Few rows want narrower splits, which keep all multiprocessors busy. Many rows want wider ones, which drain the
pipeline less often. So the size is an argument of a launch, and a start may be asked to measure it for each
number of rows (`--decode-splits measured`). A row's result then depends on how many rows its graph has,
in the last bits, and on nothing else of them: it is still the same in each run of that graph.

**Work is listed on the device.** `list_work` turns lengths into a list of (row, split), once a step for all
layers that share a window. A fixed number of programs then walks the list, item i going to program i modulo
their number. So one CUDA graph serves every mixture of lengths.

**The last to arrive combines.** Splits leave an unnormalised sum, a maximum and a weight. A counter per
(row, kv head) tells the program that completes a row; it adds the splits up in ascending order and sets the
counter back for the next layer. Memory order: a program's stores, a barrier among its threads, then an
acquire-release addition; the sums are read past the first-level cache.

A row of length 0 comes out as zero: it is the padding of a graph.

A head's page lies in one piece. A large one is read in parts, which are pages to everything here but the page
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.kernels.dependent_launch import dependent, wait_for_earlier
from engine.runtime.kernels.launching import launch
from engine.runtime.kernels.widening import beside, widened

SPLIT_TOKENS: Final = 256
"""Keys of a split. At group 4 and head size 128 partial sums are then 3 % of the bytes read, and a batch of 1
at 2k tokens still makes 64 items of 8 kv heads."""
SPLITS_MAX: Final = 128
"""The most splits of a row. Bounds the partial sums, and the work of the program that adds them up."""
PROGRAMS_PER_SM: Final = 3
"""Programs of a multiprocessor hide each other's arithmetic, and the time in which one has nothing in flight:
at the end of an item and the start of the next. Registers allow three."""
DOT_ROWS_MIN: Final = 16
WARPS: Final = 4
STAGES: Final = 5
"""Stages of the software pipeline, the page's lookup and the arithmetic included: between these there is room
for two tiles of keys and of values (64 KiB at head size 128), one in flight while the other is multiplied.
With three programs that is 213 of a multiprocessor's 227 KiB, and 96 KiB in flight where latency times
bandwidth asks for 26 KiB (4.8 TB/s x 0.7 us / 132 SMs) of an idle memory, and for twice that of a busy
one."""
STAGES_FP8: Final = 7
"""Stages for keys and values in fp8: one more tile in flight, as a tile is half as large."""
REGISTERS_MAX: Final = 168
"""Registers per thread, which leave room for three programs. Values that do not fit are spilled before the
first page and loaded again behind the last."""
COMBINE_ELEMENTS: Final = 4096
"""Elements of partial sums that are added at once: 32 registers per thread."""
HEAD_DIMS: Final = (16, 32, 64, 128, 256)
TILE_BYTES_MAX: Final = 16 << 10
"""Bytes of the keys that are multiplied at once, in the queries' type: 64 keys at head size 128. More bytes
leave room for fewer programs."""

LOG2_E: Final = 1.4426950408889634


def tile_tokens(page_size: int, head_dim: int, dtype: torch.dtype, bytes_max: int = TILE_BYTES_MAX) -> int:
    """The number of keys that are multiplied at once: a page's, or a part of them. `dtype`: the queries'
    type."""
    return min(page_size, bytes_max // (head_dim * dtype.itemsize))


def split_count(length: int, window: int | None, page_size: int, split_tokens: int = SPLIT_TOKENS) -> int:
    """The number of splits of a row with `length` keys: the kernels' rule, for the host."""
    first = 0 if window is None else max(0, length - window) // page_size
    pages = -(-length // page_size) - first
    pages_per_split = max(split_tokens // page_size, -(-pages // SPLITS_MAX), 1)
    return max(1, -(-pages // pages_per_split))


def most_splits(length_max: int, window: int | None, page_size: int, split_tokens: int = SPLIT_TOKENS) -> int:
    """The largest `split_count` of any length up to this one. The longest row may have fewer splits: wider
    splits are fewer, and a window that begins within a page touches one page more."""
    pages = -(-length_max // page_size)
    if window is not None:
        pages = min(pages, (window + page_size - 2) // page_size + 1)
    return max(1, min(SPLITS_MAX, -(-pages // max(1, split_tokens // page_size))))


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The list of work that `list_work` fills, for a limited number of rows: reused by every layer and
    step."""

    items: Tensor
    """[rows * SPLITS_MAX] int32: row * SPLITS_MAX + split."""
    total: Tensor
    """The number of items, [1] int32."""

    @staticmethod
    def empty(rows: int, device: torch.device) -> DecodeWork:
        items = torch.zeros(rows * SPLITS_MAX, dtype=torch.int32, device=device)
        return DecodeWork(items, torch.zeros(1, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """The memory in which splits leave their sums. One per device, as layers run one after the other."""

    sums: Tensor
    """The unnormalised sums, [items, Hkv, group, D] float32."""
    scales: Tensor
    """Each split's maximum (base 2) and weight, [2, items, Hkv, group] float32."""
    arrivals: Tensor
    """The numbers of splits that are done, [rows, Hkv] int32: zero between launches."""

    @staticmethod
    def empty(
        rows: int, heads: int, kv_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> DecodeScratch:
        """`splits`: the most that a row can have (`most_splits`)."""
        shape = (rows * splits, kv_heads, heads // kv_heads)
        return DecodeScratch(
            sums=torch.empty(*shape, head_dim, device=device),
            scales=torch.empty(2, *shape, device=device),
            arrivals=torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        )


def list_work(
    lengths: Tensor, window: int | None, page_size: int, work: DecodeWork, split_tokens: int = SPLIT_TOKENS
) -> None:
    """lengths [R] int32, keys per row -> `work`, in order of rows and splits. Where pages are read in parts,
    `page_size` is a part's."""
    rows = len(lengths)
    assert rows * SPLITS_MAX <= len(work.items)
    launch(
        list_work_kernel,
        (rows,),
        lengths,
        work.items,
        work.total,
        rows,
        max(1, split_tokens // page_size),
        WINDOW=window or 0,
        PAGE=page_size,
        SPLITS_MAX=SPLITS_MAX,
        ROWS_BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
        **dependent(),
    )


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    work: DecodeWork,
    scratch: DecodeScratch,
    *,
    scale: float,
    window: int | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    programs: int,
    tile: int | None = None,
    split_tokens: int = SPLIT_TOKENS,
    out: Tensor | None = None,
) -> Tensor:
    """q [R, H, D]; keys, values [pages, Hkv, page_size, D]; tables [R, P], lengths [R] int32 -> [R, H, D].

    A token's heads lie side by side. `work` is `list_work` of the same lengths, window, splits and `tile`,
    the keys that are multiplied at once (None: `tile_tokens`). `kv_scales`: the factors of stored keys and
    values (fp8). `programs`: PROGRAMS_PER_SM times the device's multiprocessors.
    """
    assert q.shape[2] in HEAD_DIMS, f"head size {q.shape[2]} is none of {HEAD_DIMS}"
    tile = tile or tile_tokens(keys.shape[2], q.shape[2], q.dtype)
    assert all((tables.stride(1) == 1, *(t.is_contiguous() for t in (q[0], keys, values))))
    out = q.new_empty(q.shape) if out is None else out
    launch(
        decode_kernel,
        (programs,),
        q,
        keys,
        values,
        tables,
        lengths,
        work.items,
        work.total,
        scratch.sums,
        *scratch.scales,
        scratch.arrivals,
        out,
        q.stride(0),
        tables.stride(0),
        scale * LOG2_E * kv_scales[0],
        kv_scales[1],
        max(1, split_tokens // tile),
        **_constants(q, keys, tile, window),
        **dependent(),
    )
    return out


def _constants(q: Tensor, keys: Tensor, tile: int, window: int | None) -> dict[str, int]:
    """The constants that `decode_kernel` is compiled with for these shapes: tiles, warps and registers."""
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    group = heads // kv_heads
    group_block = triton.next_power_of_2(group)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "GROUP_BLOCK": group_block,
        "DOT_ROWS": max(DOT_ROWS_MIN, group_block),
        "D": head_dim,
        "PAGE": tile,
        "PARTS": page_size // tile,
        "WINDOW": window or 0,
        "SPLITS_MAX": SPLITS_MAX,
        "COMBINE": max(1, COMBINE_ELEMENTS // (group_block * head_dim)),
        "num_warps": WARPS,
        "num_stages": STAGES_FP8 if keys.dtype == torch.float8_e4m3fn else STAGES,
        "maxnreg": REGISTERS_MAX,
    }


@triton.jit
def _first_page(length, WINDOW: tl.constexpr, PAGE: tl.constexpr):
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // PAGE
    return first


@triton.jit
def _pages_per_split(pages, split_pages, SPLITS_MAX: tl.constexpr):
    return tl.maximum(split_pages, (pages + SPLITS_MAX - 1) // SPLITS_MAX)


@triton.jit
def _split_count(
    length,
    split_pages,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
):
    pages = (length + PAGE - 1) // PAGE - _first_page(length, WINDOW, PAGE)
    each = _pages_per_split(pages, split_pages, SPLITS_MAX)
    return tl.maximum((pages + each - 1) // each, 1)


@triton.jit(do_not_specialize=["rows", "split_pages"])
def list_work_kernel(
    lengths,
    items,
    total,
    rows,
    split_pages,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row counts the splits of the rows before its own, and lists its own splits behind
    them."""
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    every = tl.arange(0, ROWS_BLOCK)
    length = tl.load(lengths + every, mask=every < rows, other=0)
    splits = _split_count(length, split_pages, WINDOW, PAGE, SPLITS_MAX)
    before = tl.sum(tl.where(every < row, splits, 0))
    own = tl.sum(tl.where(every == row, splits, 0))
    split = tl.arange(0, SPLITS_MAX)
    tl.store(items + before + split, row * SPLITS_MAX + split, mask=split < own)
    if row == rows - 1:
        tl.store(total, before + own)


@triton.jit(do_not_specialize=["split_pages"], do_not_specialize_on_alignment=["tables"])
def decode_kernel(
    q,
    keys,
    values,
    tables,
    lengths,
    items,
    total,
    sums,
    maxima,
    weights,
    arrivals,
    out,
    q_stride,
    table_stride,
    scale,
    v_scale,
    split_pages,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    COMBINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i computes items i, i + programs, ...: kv heads of a split follow each other, as they do in
    memory."""
    wait_for_earlier(PDL)
    for i in range(tl.program_id(0), tl.load(total) * KV_HEADS, tl.num_programs(0)):
        place, head = i // KV_HEADS, i % KV_HEADS
        item = tl.load(items + place)
        row, split = item // SPLITS_MAX, item % SPLITS_MAX
        length = tl.load(lengths + row)
        splits = _split_count(length, split_pages, WINDOW, PAGE, SPLITS_MAX)
        member = tl.arange(0, DOT_ROWS)
        dim = tl.arange(0, D)
        in_row = (head * GROUP + member[:, None]) * D + dim[None, :]
        query = tl.load(q + row * q_stride + in_row, mask=member[:, None] < GROUP, other=0.0)
        query = beside(query, keys)
        acc, top, weight = _attend_split(
            query, keys, values, tables + row.to(tl.int64) * table_stride, length, split, head, scale,
            split_pages, WINDOW, KV_HEADS, DOT_ROWS, D, PAGE, PARTS, SPLITS_MAX,
        )  # fmt: skip
        if splits == 1:
            result = acc * v_scale / tl.where(weight > 0, weight, 1.0)[:, None]
            tl.store(
                out + row * (KV_HEADS * GROUP * D) + in_row,
                result.to(out.dtype.element_ty),
                mask=member[:, None] < GROUP,
            )
        else:
            slot = (place * KV_HEADS + head) * GROUP + member.to(tl.int64)
            tl.store(maxima + slot, top, mask=member < GROUP)
            tl.store(weights + slot, weight, mask=member < GROUP)
            tl.store(sums + slot[:, None] * D + dim[None, :], acc, mask=member[:, None] < GROUP)
            tl.debug_barrier()
            counter = arrivals + row * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)
                _combine(
                    sums, maxima, weights, out, place - split, splits, row, head, v_scale,
                    KV_HEADS, GROUP, GROUP_BLOCK, D, SPLITS_MAX, COMBINE,
                )  # fmt: skip


@triton.jit
def _attend_split(
    query,
    keys,
    values,
    table,
    length,
    split,
    head,
    scale,
    split_pages,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
):
    """query [DOT_ROWS, D] -> (unnormalised sum, maximum, weight). Every page holds a key that is seen."""
    first_page, end_page = _first_page(length, WINDOW, PAGE), (length + PAGE - 1) // PAGE
    each = _pages_per_split(end_page - first_page, split_pages, SPLITS_MAX)
    begin = first_page + split * each
    in_page = tl.arange(0, PAGE)
    tile = in_page[:, None] * D + tl.arange(0, D)[None, :]
    acc = tl.zeros([DOT_ROWS, D], tl.float32)
    top = tl.full([DOT_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([DOT_ROWS], tl.float32)
    for page in range(begin, tl.minimum(begin + each, end_page)):
        whole = tl.load(table + page // PARTS).to(tl.int64) * KV_HEADS + head
        start = (whole * PARTS + page % PARTS) * (PAGE * D)
        position = page * PAGE + in_page
        seen = position < length
        if WINDOW > 0:
            seen = seen & (position >= length - WINDOW)
        key = widened(tl.load(keys + start + tile, mask=seen[:, None], other=0.0), query.dtype)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        value = widened(tl.load(values + start + tile, mask=seen[:, None], other=0.0), query.dtype)
        acc = tl.dot(p.to(query.dtype), value, acc * fade[:, None], input_precision="ieee")
        weight = weight * fade + tl.sum(p, 1)
        top = higher
    return acc, top, weight


@triton.jit
def _combine(
    sums,
    maxima,
    weights,
    out,
    first,
    splits,
    row,
    head,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    COMBINE: tl.constexpr,
):
    """Add splits [first, first + splits) of the list, in ascending blocks of COMBINE, to the row's output."""
    member = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, D)
    slot, here = _slots(first, 0, splits, head, KV_HEADS, GROUP, GROUP_BLOCK, SPLITS_MAX)
    maximum = tl.load(maxima + slot, mask=here, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(tl.where(member[None, :] < GROUP, maximum, 0.0), 0)
    weight = tl.load(weights + slot, mask=here, other=0.0, cache_modifier=".cg")
    weight = tl.sum(weight * tl.exp2(maximum - top[None, :]), 0)
    acc = tl.zeros([GROUP_BLOCK, D], tl.float32)
    for begin in range(0, splits, COMBINE):
        at, exists = _slots(first, begin, splits, head, KV_HEADS, GROUP, GROUP_BLOCK, COMBINE)
        fade = tl.load(maxima + at, mask=exists, other=float("-inf"), cache_modifier=".cg") - top[None, :]
        parts = tl.load(
            sums + at[:, :, None] * D + dim[None, None, :],
            mask=exists[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(parts * tl.exp2(fade)[:, :, None], 0)
    result = acc * v_scale / tl.where(weight > 0, weight, 1.0)[:, None]
    out_at = (row * KV_HEADS + head) * (GROUP * D) + member[:, None] * D + dim[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=member[:, None] < GROUP)


@triton.jit
def _slots(
    first,
    begin,
    splits,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The places of the sums of splits [begin, begin + BLOCK), and whether they exist: [BLOCK,
    GROUP_BLOCK]."""
    split = begin + tl.arange(0, BLOCK)[:, None]
    member = tl.arange(0, GROUP_BLOCK)[None, :]
    at = ((first + split) * KV_HEADS + head) * GROUP + member.to(tl.int64)
    return at, (split < splits) & (member < GROUP)
