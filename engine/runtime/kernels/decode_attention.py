"""Paged decode attention: one query token per row against that row's pages, or the few tokens of a row that
verifies drafts.

Decode attention reads each key and value once and does little with it, so the only question is how close
to the memory's rate it reads. Four decisions follow.

**The group is the tile.** Query heads that share a key-value head are the rows of one matrix: the group's
keys are read once, and `tl.dot` wants 16 rows anyway. The other rows are padding: they cost only arithmetic
that would wait for memory otherwise.

**Equal shares** (stream-K, Osama et al. 2023; lean attention, Sanovar et al. 2024). The tiles of all rows and
key-value heads, one behind the other, are one line, and each program computes a piece of it, all of the same
length. So no program waits for another, whatever the rows' lengths. A program's piece is cut into segments
where a row or a head ends; a segment is a whole (row, head), or one of two that are not: the program's first
and its last. Splits of a fixed size made a drained pipeline and a partial sum of every split, and programs
whose splits were equally long drained at the same time: on an H200 they read at 57 to 71 % of its rate.

A row's result therefore depends in its last bits on the lengths of the rows beside it. It is the same
whenever those are the same: sums are added up in the order of the programs, not of their arrival.

**Work is listed on the device.** `list_work` turns lengths into the begin of each program's piece, once a
step for all layers that share a window. So one CUDA graph serves every mixture of lengths.

**The last to arrive combines.** Segments that are not whole leave an unnormalised sum, a maximum and a
weight. A counter per (row, kv head) tells the program that completes it; that program adds the sums up and
sets the counter back for the next layer. Memory order: a program's stores, a barrier among its threads, then
an acquire-release addition; the sums are read past the first-level cache.

**Tokens of one sequence share the tile.** A row that verifies k drafts asks for k + 1 tokens, which see the
same keys but for the last few. As rows of their own they would read all of them k + 1 times; here their
queries are further rows of the same matrix, and each has its own last key. A tile has room for `QUERIES`
tokens, a constant of the kernel: as many as fill the 16 rows that `tl.dot` takes anyway, which cost nothing,
or as many as fill `WIDE_ROWS` (`query_counts`). A token's sum runs over the same keys in the same order as if
it were a row alone, divided among programs as its row is.

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

COLUMNS: Final = 8
"""Numbers of a piece in `DecodeWork`, of which seven are used."""
DOT_ROWS_MIN: Final = 16
WIDE_ROWS: Final = 64
"""Rows of the matrix of a row that verifies many drafts: those of one `wgmma`. By a card's rates its
arithmetic takes a third of the time in which its keys are read."""
WARPS: Final = 4


STAGES: Final = 5
"""Stages of the software pipeline, the page's lookup and the arithmetic included: between these there is room
for two tiles of keys and of values (64 KiB at head size 128), one in flight while the other is multiplied."""
STAGES_FP8: Final = 7
"""Stages for keys and values in fp8: one more tile in flight, as a tile is half as large."""
PROGRAMS_PER_SM: Final = 2
"""Programs of a multiprocessor hide each other's arithmetic, and the time in which one has nothing in flight:
at the end of a segment and the start of the next. More of them make more segments. On an H200 two took 0.97
and 0.89 times as long as three for 32 rows of 4,096 and 2,048 keys, as long for 1 and 256 rows, and less than
four always."""
PROGRAMS_PER_SM_FP8: Final = 3
"""Programs of a multiprocessor over keys and values in fp8, which are half the bytes and as much arithmetic:
on an H200 three programs took 0.90 times as long as two."""
REGISTERS_MAX: Final = 168
"""Registers per thread, which leave room for three programs. Values that do not fit are spilled before the
first page and loaded again behind the last."""
REGISTERS_WIDE_MAX: Final = 255
"""Registers per thread for more than `DOT_ROWS_MIN` rows: room for two programs."""
PIECE_TOKENS_MIN: Final = 256
"""Keys of a program's piece at least, where there are fewer pieces than programs: to combine shorter ones
takes longer than to read them. On an H200 128 took 1.02 times as long for a row of 2,048 keys."""
WIDE_ELEMENTS_MAX: Final = 8192
"""Elements of a sum that is not spilled: 64 registers per thread, as many as the scores and their weights."""
COMBINE_ELEMENTS: Final = 8192
"""Elements of partial sums that are added at once: 64 registers per thread."""
HEAD_DIMS: Final = (16, 32, 64, 128, 256)
TILE_BYTES_MAX: Final = 16 << 10
"""Bytes of the keys that are multiplied at once, in the queries' type: 64 keys at head size 128. More bytes
leave room for fewer programs."""

LOG2_E: Final = 1.4426950408889634


def tile_tokens(page_size: int, head_dim: int, dtype: torch.dtype, bytes_max: int = TILE_BYTES_MAX) -> int:
    """The number of keys that are multiplied at once: a page's, or a part of them. `dtype`: the queries'
    type."""
    return min(page_size, bytes_max // (head_dim * dtype.itemsize))


def programs_of(multiprocessors: int, stored: torch.dtype, members: int = 1) -> int:
    """The programs that run at once. `stored`: the type of keys and values; `members`: the query heads of a
    group, of all tokens that share a tile."""
    is_small = stored == torch.float8_e4m3fn and members <= DOT_ROWS_MIN
    return multiprocessors * (PROGRAMS_PER_SM_FP8 if is_small else PROGRAMS_PER_SM)


def query_counts(group: int, head_dim: int, most: int) -> tuple[int, ...]:
    """The numbers of tokens for which tiles have room, ascending, `most` at most: a kernel is compiled for
    each. Empty where a group of query heads leaves no room for a second token."""
    own, wide = triton.next_power_of_2(group), min(WIDE_ROWS, WIDE_ELEMENTS_MAX // head_dim)
    counts = {min(most, rows // own) for rows in (DOT_ROWS_MIN, wide)}
    return tuple(sorted(count for count in counts if count > 1))


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The pieces that `list_work` fills, for a limited number of programs: reused by every layer and step."""

    pieces: Tensor
    """[programs, COLUMNS] int32: the row in which a piece begins, its first tile among the row's, its tiles,
    its segments, the tiles of every piece but the last ones, the row's length, and the tokens that follow its
    first one."""

    @staticmethod
    def empty(programs: int, device: torch.device) -> DecodeWork:
        return DecodeWork(torch.zeros(programs, COLUMNS, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """The memory in which segments leave their sums. One per device, as layers run one after the other."""

    sums: Tensor
    """The unnormalised sums of each program's first and last segment, [2 * programs, queries * group, D]
    float32."""
    scales: Tensor
    """Their maximum (base 2) and weight, [2, 2 * programs, queries * group] float32."""
    arrivals: Tensor
    """The numbers of segments that are done, [rows, Hkv] int32: zero between launches."""

    @staticmethod
    def empty(
        programs: int,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        queries: int = 1,
    ) -> DecodeScratch:
        """`queries`: tokens of a row at most."""
        shape = (2 * programs, queries * heads // kv_heads)
        return DecodeScratch(
            sums=torch.empty(*shape, head_dim, device=device),
            scales=torch.empty(2, *shape, device=device),
            arrivals=torch.zeros(rows, kv_heads, dtype=torch.int32, device=device),
        )


def list_work(
    lengths: Tensor,
    kv_heads: int,
    window: int | None,
    page_size: int,
    work: DecodeWork,
    *,
    programs: int,
    piece_tokens_min: int = PIECE_TOKENS_MIN,
    behind: Tensor | None = None,
) -> None:
    """lengths [R] int32, keys per row -> `work` of so many programs. Where pages are read in parts,
    `page_size` is a part's. `behind` [R] int32: the number of following tokens that are of the same row;
    None: each token is a row."""
    rows = len(lengths)
    assert programs <= len(work.pieces)
    launch(
        list_work_kernel,
        (programs,),
        lengths,
        behind,
        work.pieces,
        rows,
        max(1, piece_tokens_min // page_size),
        KV_HEADS=kv_heads,
        WINDOW=window or 0,
        PAGE=page_size,
        COLUMNS=COLUMNS,
        ROWS_BLOCK=max(2, triton.next_power_of_2(rows)),
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
    behind: Tensor | None = None,
    queries: int = 1,
) -> Tensor:
    """q [R, H, D]; keys, values [pages, Hkv, page_size, D]; tables [R, P], lengths [R] int32 -> [R, H, D].

    A token's heads lie side by side. `work` is `list_work` of the same lengths, window, programs and `tile`,
    the keys that are multiplied at once (None: `tile_tokens`). `kv_scales`: the factors of stored keys and
    values (fp8). `programs`: as many as run at once on the device (`programs_of`). `behind` [R] int32: as
    `list_work` has it, less than `queries` everywhere; a token sees one key more than the one before it.
    """
    assert q.shape[2] in HEAD_DIMS, f"head size {q.shape[2]} is none of {HEAD_DIMS}"
    tile = tile or tile_tokens(keys.shape[2], q.shape[2], q.dtype)
    assert 2 * programs <= len(scratch.sums)
    assert queries * q.shape[1] <= scratch.sums.shape[1] * keys.shape[1]
    assert (behind is None) == (queries == 1)
    assert all((tables.stride(1) == 1, *(t.is_contiguous() for t in (q[0], keys, values))))
    out = q.new_empty(q.shape)
    launch(
        decode_kernel,
        (programs,),
        *(q, keys, values, tables, lengths, behind),
        work.pieces,
        scratch.sums,
        *scratch.scales,
        scratch.arrivals,
        out,
        len(q),
        q.stride(0),
        tables.stride(0),
        scale * LOG2_E * kv_scales[0],
        kv_scales[1],
        **_constants(q, keys, tile, window, queries),
        **dependent(),
    )
    return out


def _constants(q: Tensor, keys: Tensor, tile: int, window: int | None, queries: int) -> dict[str, int]:
    """The constants that `decode_kernel` is compiled with for these shapes: tiles, warps and registers."""
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    group = heads // kv_heads
    members = triton.next_power_of_2(queries * group)
    is_wide = queries > 1 and members > DOT_ROWS_MIN
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "QUERIES": queries,
        "MEMBERS_BLOCK": members,
        "DOT_ROWS": max(DOT_ROWS_MIN, members),
        "D": head_dim,
        "PAGE": tile,
        "PARTS": page_size // tile,
        "WINDOW": window or 0,
        "COLUMNS": COLUMNS,
        "COMBINE": max(1, COMBINE_ELEMENTS // (members * head_dim)),
        "num_warps": WARPS,
        "num_stages": STAGES_FP8 if keys.dtype == torch.float8_e4m3fn else STAGES,
        "maxnreg": REGISTERS_WIDE_MAX if is_wide else REGISTERS_MAX,
    }


@triton.jit
def _first_page(length, WINDOW: tl.constexpr, PAGE: tl.constexpr):
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // PAGE
    return first


@triton.jit
def _tiles(length, more, WINDOW: tl.constexpr, PAGE: tl.constexpr):
    """The tiles of a row and head whose first token sees `length` keys, and its last one `more` beside them;
    a row without keys has one, in which its zeros are written."""
    return tl.maximum((length + more + PAGE - 1) // PAGE - _first_page(length, WINDOW, PAGE), 1)


@triton.jit(do_not_specialize=["rows", "least"])
def list_work_kernel(
    lengths,
    behind,
    pieces,
    rows,
    least,
    KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i lists the piece of program i. `least`: the tiles of a piece at least."""
    wait_for_earlier(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    every = tl.arange(0, ROWS_BLOCK)
    length = tl.load(lengths + every, mask=every < rows, other=0)
    more = every * 0
    begins = every < rows
    if behind is not None:
        more = tl.load(behind + every, mask=every < rows, other=0)
        begins = begins & (tl.load(behind + every - 1, mask=(every > 0) & begins, other=0) == 0)
    own = tl.where(begins, _tiles(length, more, WINDOW, PAGE), 0)
    ends = tl.cumsum(own * KV_HEADS)
    total = tl.sum(own * KV_HEADS)
    each = tl.maximum((total + programs - 1) // programs, least)
    begin = program * each
    count = tl.maximum(tl.minimum(each, total - begin), 0)
    row, at, tiles = _place(begin, own, ends, every, KV_HEADS)
    last_row, last_at, last_tiles = _place(tl.maximum(begin + count - 1, 0), own, ends, every, KV_HEADS)
    later = last_row - row
    if behind is not None:
        later = tl.sum((begins & (every > row) & (every <= last_row)).to(tl.int32))
    heads = later * KV_HEADS + last_at // last_tiles - at // tiles
    piece = pieces + program * COLUMNS
    tl.store(piece, row)
    tl.store(piece + 1, at)
    tl.store(piece + 2, count)
    tl.store(piece + 3, tl.where(count > 0, heads + 1, 0))
    tl.store(piece + 4, each)
    tl.store(piece + 5, tl.sum(tl.where(every == row, length, 0)))
    if behind is not None:
        tl.store(piece + 6, tl.sum(tl.where(every == row, more, 0)))


@triton.jit
def _place(tile, own, ends, every, KV_HEADS: tl.constexpr):
    """The row that a tile of the line is in, the tile's number there, and the tiles of each of its heads."""
    row = tl.sum((ends <= tile).to(tl.int32))
    tiles = tl.sum(tl.where(every == row, own, 0))
    begin = tl.sum(tl.where(every == row, ends, 0)) - tiles * KV_HEADS
    return row, tile - begin, tl.maximum(tiles, 1)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["tables"])
def decode_kernel(
    q, keys, values, tables, lengths, behind, pieces, sums, maxima, weights, arrivals, out, rows, q_stride,
    table_stride, scale, v_scale, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, MEMBERS_BLOCK: tl.constexpr, DOT_ROWS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, COMBINE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i computes piece i, segment by segment: heads of a row follow each other, then the next row. A
    row is named by its first token; its members are its tokens' query heads of the segment's group."""
    wait_for_earlier(PDL)
    program = tl.program_id(0)
    piece = pieces + program * COLUMNS
    row, at, left = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    segments, each, length = tl.load(piece + 3), tl.load(piece + 4), tl.load(piece + 5)
    tile = program * each
    more = row * 0
    if QUERIES > 1:
        more = tl.load(piece + 6)
    for segment in range(segments):
        next_row = row + more + 1
        following = tl.load(lengths + tl.minimum(next_row, rows - 1))
        following_more = more
        if QUERIES > 1:
            following_more = tl.load(behind + tl.minimum(next_row, rows - 1))
        tiles = _tiles(length, more, WINDOW, PAGE)
        head, first = at // tiles, at % tiles
        count = tl.minimum(tiles - first, left)
        member = tl.arange(0, DOT_ROWS)
        token = member // GROUP * (QUERIES > 1)
        members = (more + 1) * GROUP
        dim = tl.arange(0, D)
        in_token = (head * GROUP + member - token * GROUP)[:, None] * D + dim[None, :]
        query_at = (row + token)[:, None] * q_stride + in_token
        query = tl.load(q + query_at, mask=member[:, None] < members, other=0.0)
        query = beside(query, keys)
        acc, top, weight = _attend(
            query, keys, values, tables + row.to(tl.int64) * table_stride, length, more, token, first, count,
            head, scale, WINDOW, KV_HEADS, QUERIES, DOT_ROWS, D, PAGE, PARTS,
        )  # fmt: skip
        if count == tiles:
            result = acc * v_scale / tl.where(weight > 0, weight, 1.0)[:, None]
            out_at = (row + token)[:, None] * (KV_HEADS * GROUP * D) + in_token
            tl.store(out + out_at, result.to(out.dtype.element_ty), mask=member[:, None] < members)
        else:
            slot = (program * 2 + tl.minimum(segment, 1)) * (QUERIES * GROUP) + member
            tl.store(maxima + slot, top, mask=member < members)
            tl.store(weights + slot, weight, mask=member < members)
            tl.store(sums + slot[:, None] * D + dim[None, :], acc, mask=member[:, None] < members)
            tl.debug_barrier()
            begin = tile - first
            opening = begin // each
            others = (begin + tiles - 1) // each - opening
            counter = arrivals + row * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == others:
                tl.store(counter, 0)
                _combine(
                    sums, maxima, weights, out, opening, tl.minimum(begin - opening * each, 1), others + 1,
                    row, head, members, v_scale, KV_HEADS, GROUP, QUERIES, MEMBERS_BLOCK, D, COMBINE,
                )  # fmt: skip
        tile += count
        left -= count
        is_over = at + count == tiles * KV_HEADS
        at = tl.where(is_over, 0, at + count)
        length = tl.where(is_over, following, length)
        row = tl.where(is_over, next_row, row)
        more = tl.where(is_over, following_more, more)


@triton.jit
def _attend(
    query,
    keys,
    values,
    table,
    length,
    more,
    token,
    first,
    count,
    head,
    scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """query [DOT_ROWS, D], `token` [DOT_ROWS] -> (unnormalised sum, maximum, weight). Every page holds a key
    that some token sees; the first token sees `length` keys, and each one more than the one before."""
    begin = _first_page(length, WINDOW, PAGE) + first
    in_page = tl.arange(0, PAGE)
    tile = in_page[:, None] * D + tl.arange(0, D)[None, :]
    acc = tl.zeros([DOT_ROWS, D], tl.float32)
    top = tl.full([DOT_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([DOT_ROWS], tl.float32)
    last = length + more
    limit = length + tl.minimum(token, more)
    for page in range(begin, tl.minimum(begin + count, (last + PAGE - 1) // PAGE)):
        whole = tl.load(table + page // PARTS).to(tl.int64) * KV_HEADS + head
        start = (whole * PARTS + page % PARTS) * (PAGE * D)
        position = page * PAGE + in_page
        seen = position < last
        if WINDOW > 0:
            seen = seen & (position >= length - WINDOW)
        key = widened(tl.load(keys + start + tile, mask=seen[:, None], other=0.0), query.dtype)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale
        if QUERIES > 1:
            own = position[None, :] < limit[:, None]
            if WINDOW > 0:
                own = own & (position[None, :] >= limit[:, None] - WINDOW)
            scores = tl.where(own, scores, float("-inf"))
        else:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = higher
        if QUERIES > 1:  # a token may see no key of the first page, or of the last
            finite = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - finite)
        p = tl.exp2(scores - finite[:, None])
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
    opening,
    place,
    count,
    row,
    head,
    members,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    MEMBERS_BLOCK: tl.constexpr,
    D: tl.constexpr,
    COMBINE: tl.constexpr,
):
    """Add up the segments of a row and head, of `count` programs from `opening` on, by blocks of COMBINE. The
    first is in `place` of its program's two, the others are their programs' first."""
    member = tl.arange(0, MEMBERS_BLOCK)
    dim = tl.arange(0, D)
    acc = tl.zeros([MEMBERS_BLOCK, D], tl.float32)
    top = tl.full([MEMBERS_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([MEMBERS_BLOCK], tl.float32)
    for begin in range(0, count, COMBINE):
        number = begin + tl.arange(0, COMBINE)[:, None]
        exists = (number < count) & (member[None, :] < members)
        at = ((opening + number) * 2 + tl.where(number == 0, place, 0)) * (QUERIES * GROUP) + member[None, :]
        maximum = tl.load(maxima + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(weights + at, mask=exists, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            sums + at[:, :, None] * D + dim[None, None, :],
            mask=exists[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, tl.max(maximum, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, own = tl.exp2(top - base), tl.exp2(maximum - base[None, :])
        acc = acc * fade[:, None] + tl.sum(parts * own[:, :, None], 0)
        weight = weight * fade + tl.sum(part * own, 0)
        top = higher
    result = acc * v_scale / tl.where(weight > 0, weight, 1.0)[:, None]
    token = member // GROUP * (QUERIES > 1)
    in_token = (head * GROUP + member - token * GROUP)[:, None] * D + dim[None, :]
    out_at = (row + token)[:, None] * (KV_HEADS * GROUP * D) + in_token
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=member[:, None] < members)
