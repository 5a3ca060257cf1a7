"""The gated delta net (Yang et al. 2025) over states by slot: one kernel for rows of one token, five for rows
of many.

    S = e^g S + k d^T,   d = beta (v - e^g S^T k),   output = norm(S^T q) * silu(z)

`engine.runtime.reference.delta_net` has the whole of it. S [Dk, Dv] is a value head's state, in float32.

**A step** is one kernel. A program has a key head of a row, so that all that is convolved for it is its own:
it reads the latest inputs and moves them on in their place, and no other program needs them. Its value heads
follow one another, each with its state in registers between one read and one write.

**Drafts** are verified by a step in which a program has all tokens of its row, one after the other: the state
is read once, and written behind each token, to the cells that `engine.runtime.step.states` tells of. The sums
are those of a step of one token. What is right is found by sampling; then a kernel turns the cells round.

**A prompt** is computed in chunks of 64 tokens (the WY form of Yang et al. 2024). Within a chunk the changes
d depend on each other and on the state before, linearly; with G the sums of g from the chunk's begin,

    (1 + A) D = beta (V - e^G K S),   A_ij = beta_i e^(G_i - G_j) k_i k_j   for j < i

so with T = (1 + A)^-1, U = T beta V and W = T beta e^G K, which need no state, chunks follow one another by

    D = U - W S,   outputs = e^G Q S + P D,   S = e^G_last S + (e^(G_last - G) K)^T D

where P_ij = e^(G_i - G_j) q_i k_j for j <= i. Convolutions, U, W and P are computed for all chunks at once,
and what is left in turn, for each block of a head's value dims: four products, whose operands are fetched
ahead.

**Chunks begin at fixed positions**, the multiples of 64, wherever a step begins and ends. So a prompt that is
cut at such positions, or goes on from a state that was kept at one, has the same bits as in one piece.

**T** is made from the inside out. Blocks of 16 on the diagonal are inverted row by row: powers of A, which a
closed form would add up, grow beyond what float32 tells apart where keys are alike. With N what these blocks
leave, whose fourth power is zero, the rest is (1 - N)(1 + N^2).

Products have operands in the activations' type and sums in float32; T is made in TF32, of float32 in float32.

A row that begins at position 0 finds zeros, whatever its slot holds. So does the padding of a graph: its rows
have a slot of their own, which they overwrite beside each other.
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
from engine.runtime.kernels.dependent_launch import dependent, wait_for_earlier
from engine.runtime.kernels.launching import launch
from engine.runtime.models.spec import DeltaNet
from engine.runtime.step.batch import Row
from engine.runtime.step.protocols import Ahead, to_device
from engine.runtime.weights.parameters import DeltaWeights

CHUNK: Final = 64
"""Tokens of a chunk: the rows of one `wgmma`."""
SUB: Final = 16
"""Tokens of a chunk's blocks that are inverted row by row."""
HEAD_DIMS: Final = (16, 32, 64, 128)
"""Sizes of keys and values. A state of 128 x 128 is 64 registers of each thread of a step."""
STEP_WARPS: Final = 8
CHUNK_WARPS: Final = 4
CARRY_VALUES: Final = 32
"""Value dims of a program that goes from chunk to chunk: a head of 128 is four programs, as the heads of one
prompt alone would leave most multiprocessors idle."""
CARRY_STAGES: Final = 2
KEEP_BLOCK: Final = 1024
LENGTH_EPS = tl.constexpr(1e-6)
"""The summand of squares of queries and keys before they are divided by their length."""


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """One layer's delta net, as a rank holds it, and the states of its slots."""

    spec: DeltaNet
    weights: DeltaWeights
    eps: float


@dataclass(frozen=True, slots=True)
class Cells:
    """Where states lie that are not under their slots' numbers."""

    order: Tensor
    """The state in each cell, [cells] int32: the slots' first, then windows."""
    slots: int
    """The number of the first window's cell."""


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """The rows of a step that have many tokens, on the device: the same for all layers."""

    rows: Tensor
    """[R, 5] int32: state, first position, tokens, place of the first token among the packed ones, and number
    of the first chunk."""
    chunks: Tensor
    """[N, 2] int32: the row, and the first token within it."""

    @staticmethod
    def of(
        rows: Sequence[Row], device: torch.device, size: int = CHUNK, order: Tensor | None = None
    ) -> DeltaRows:
        """`size`: tokens of a chunk. `order`: that of `Cells`; None: each slot has the state of its
        number."""
        listed, chunks = [], list[tuple[int, int]]()
        for at, row in enumerate(rows):
            listed.append((row.slot, row.start, row.length, row.offset, len(chunks)))
            begins = range(row.start // size * size, row.end, size)
            chunks += ((at, max(begin - row.start, 0)) for begin in begins)
        table = to_device(listed, device)
        if order is not None:
            table[:, 0] = order[table[:, 0]]
        return DeltaRows(table, to_device(chunks, device))


def implements(delta: DeltaNet) -> bool:
    """True if the kernels take heads of these sizes."""
    return delta.key_dim in HEAD_DIMS and delta.value_dim in HEAD_DIMS


def delta_step(
    x: Tensor,
    slots: Tensor,
    lengths: Tensor,
    layer: DeltaLayer,
    inputs: Tensor,
    heads: Tensor,
    out: Tensor,
    cells: Cells | None = None,
    ahead: Ahead | None = None,
) -> None:
    """The rows of one token: x [R, width], slots and lengths [R] int32 -> out [R, Hv * Dv].

    A token of x has what is convolved, then z, b and a. lengths: the rows' tokens, the new one included.
    inputs [states, kernel - 1, channels] and heads [states, Hv, Dk, Dv] float32 go on by one token. `ahead`:
    of tokens of which some are drafts, which need cells to leave their states in.
    """
    own, weights = layer.spec, layer.weights
    assert all(t.is_contiguous() for t in (x, inputs, heads, out))
    tables = slots, lengths, None if cells is None else cells.order
    given = weights.conv, weights.rate, weights.step_bias, weights.norm, inputs, heads, out, layer.eps
    grid, sizes = (len(slots), own.key_heads), _sizes(own) | {"num_warps": STEP_WARPS}
    if ahead is None:
        launch(delta_step_kernel, grid, x, *tables, *given, **sizes, **dependent())
        return
    assert cells is not None
    drafts = ahead.before, ahead.behind, ahead.windows, cells.slots
    launch(delta_verify_kernel, grid, x, *tables, *drafts, *given, **sizes, **dependent())


def turn_windows(slots: Tensor, ahead: Ahead, agreed: Tensor, cells: Cells) -> None:
    """Give each row that verified the state behind its last right draft, and its windows those before it, the
    newest first. agreed [tokens] int32: 1 where the token that was sampled is the draft in its place."""
    tables = slots, ahead.before, ahead.behind, ahead.windows, agreed, cells.order
    sizes: dict[str, Any] = {"BLOCK": triton.next_power_of_2(ahead.most), "num_warps": 1}
    launch(turn_kernel, (len(slots),), *tables, cells.slots, **sizes, **dependent())


def delta_chunks(
    x: Tensor,
    rows: DeltaRows,
    layer: DeltaLayer,
    inputs: Tensor,
    heads: Tensor,
    out: Tensor,
    *,
    size: int = CHUNK,
) -> None:
    """The rows of many tokens, in x and out as `delta_step` has them, at their places among the packed
    tokens. `size`: tokens of a chunk, as `rows` has them."""
    assert all(t.is_contiguous() for t in (x, inputs, heads, out))
    own, weights, count = layer.spec, layer.weights, len(rows.chunks)
    sizes, options = _sizes(own) | {"C": size}, {"num_warps": CHUNK_WARPS}
    taps, width = {"TAPS": sizes.pop("TAPS")}, {"WIDTH": sizes.pop("WIDTH")}
    tables, by_head = (rows.rows, rows.chunks), (count, own.value_heads)
    mixed = x.new_empty(len(x), own.channels)
    grid: tuple[int, ...] = (count, 2 * own.key_heads + own.value_heads)
    launch(
        convolve_kernel, grid, *tables, x, inputs, weights.conv, mixed, **sizes, **taps, **width, **options
    )
    grid, channels = (len(rows.rows), triton.cdiv(own.channels, KEEP_BLOCK)), {"CHANNELS": own.channels}
    launch(
        keep_inputs_kernel,
        grid,
        rows.rows,
        x,
        inputs,
        **channels,
        **taps,
        **width,
        BLOCK=KEEP_BLOCK,
        **options,
    )
    u, w = (x.new_empty(len(x), own.value_heads, dim) for dim in (own.value_dim, own.key_dim))
    sums = x.new_empty(len(x), own.value_heads, dtype=torch.float32)
    parts = mixed, u, w, sums, x.new_empty(*by_head, size, size)
    biased, wide = (x, weights.rate, weights.step_bias), "ieee" if x.dtype == torch.float32 else "tf32"
    inverse = {"SUB": min(SUB, size), "WIDE": wide}
    launch(prepare_kernel, by_head, *tables, *biased, *parts, **sizes, **width, **inverse, **options)
    block = min(CARRY_VALUES, own.value_dim)
    grid, ahead = (len(rows.rows), own.value_heads, own.value_dim // block), {"num_stages": CARRY_STAGES}
    launch(carry_kernel, grid, rows.rows, *parts, heads, out, **sizes, BLOCK=block, **ahead, **options)
    normed = x, weights.norm, out, layer.eps
    launch(gate_kernel, by_head, *tables, *normed, **sizes, **width, **options)


def _sizes(own: DeltaNet) -> dict[str, Any]:
    return {
        "KEY_HEADS": own.key_heads,
        "SHARED": own.value_heads // own.key_heads,
        "DK": own.key_dim,
        "DV": own.value_dim,
        "WIDTH": own.channels + own.values + 2 * own.value_heads,
        "TAPS": own.kernel,
    }


@triton.jit
def _log_kept(a, rate, step_bias):
    """g: the logarithm of the factor of the state before."""
    x = a + step_bias
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return -rate * softplus


@triton.jit
def delta_step_kernel(
    x,
    slots,
    lengths,
    order,
    conv,
    rate,
    step_bias,
    norm,
    inputs,
    heads,
    out,
    eps,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row and key head. `order`: the state of each slot; None: that of its number."""
    wait_for_earlier(PDL)
    VALUE_HEADS: tl.constexpr = KEY_HEADS * SHARED
    KEYS: tl.constexpr = KEY_HEADS * DK
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * DV
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if order is not None:
        slot = tl.load(order + slot).to(tl.int64)
    goes_on = tl.load(lengths + row) > 1
    source, known = x + row * WIDTH, inputs + slot * ((TAPS - 1) * CHANNELS)
    key_dim, value_dim = tl.arange(0, DK), tl.arange(0, DV)
    at = key_head * DK + key_dim
    q = _convolved(source, known, conv, at, goes_on, CHANNELS, TAPS)
    k = _convolved(source, known, conv, KEYS + at, goes_on, CHANNELS, TAPS)
    q *= tl.rsqrt(tl.sum(q * q) + LENGTH_EPS) * DK**-0.5
    k *= tl.rsqrt(tl.sum(k * k) + LENGTH_EPS)
    weight = tl.load(norm + value_dim)
    for member in range(SHARED):
        head = key_head * SHARED + member
        in_heads = head * DV + value_dim
        v = _convolved(source, known, conv, 2 * KEYS + in_heads, goes_on, CHANNELS, TAPS)
        z = tl.load(source + CHANNELS + in_heads).to(tl.float32)
        of_head = source + CHANNELS + VALUE_HEADS * DV + head
        strength = 1.0 / (1.0 + tl.exp(-tl.load(of_head).to(tl.float32)))
        a = tl.load(of_head + VALUE_HEADS).to(tl.float32)
        kept = tl.exp(_log_kept(a, tl.load(rate + head), tl.load(step_bias + head)))
        place = heads + ((slot * VALUE_HEADS + head) * DK + key_dim[:, None]) * DV + value_dim[None, :]
        state = tl.load(place, mask=goes_on & (key_dim[:, None] < DK), other=0.0) * kept
        change = (v - tl.sum(state * k[:, None], 0)) * strength
        state += k[:, None] * change[None, :]
        tl.store(place, state)
        found = tl.sum(state * q[:, None], 0)
        normed = found / tl.sqrt(tl.sum(found * found) / DV + eps) * weight
        tl.store(
            out + row * (VALUE_HEADS * DV) + in_heads, (normed * activated(z, False)).to(out.dtype.element_ty)
        )


@triton.jit
def _convolved(source, known, conv, at, goes_on, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """silu of the convolution of channels `at`, whose inputs move on. They are stored when every thread has
    read them: several may hold the same channel."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
    in_known = tap * CHANNELS + at[None, :]
    before = tl.load(known + in_known, mask=goes_on & (tap < TAPS - 1), other=0.0)
    new = tl.load(source + at)
    factors = tl.load(conv + in_known, mask=tap < TAPS - 1, other=0.0)
    total = tl.sum(before.to(tl.float32) * factors, 0)
    total += new.to(tl.float32) * tl.load(conv + (TAPS - 1) * CHANNELS + at)
    tl.debug_barrier()
    tl.store(known + in_known - CHANNELS, before, mask=(tap > 0) & (tap < TAPS - 1))
    if TAPS > 1:
        tl.store(known + (TAPS - 2) * CHANNELS + at, new)
    return activated(total, False)


@triton.jit
def delta_verify_kernel(
    x,
    slots,
    lengths,
    order,
    before,
    behind,
    windows,
    first_window,
    conv,
    rate,
    step_bias,
    norm,
    inputs,
    heads,
    out,
    eps,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per token and key head, of which those of drafts do nothing: the first token's computes all
    of its row."""
    wait_for_earlier(PDL)
    VALUE_HEADS: tl.constexpr = KEY_HEADS * SHARED
    KEYS: tl.constexpr = KEY_HEADS * DK
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * DV
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.where(tl.load(before + row) > 0, 0, tl.load(behind + row) + 1)
    own = tl.load(order + tl.load(slots + row)).to(tl.int64)
    drafted = order + first_window + tl.load(windows + row) - 1
    goes_on = tl.load(lengths + row) > 1
    source, known = x + row * WIDTH, inputs + own * ((TAPS - 1) * CHANNELS)
    key_dim, value_dim = tl.arange(0, DK), tl.arange(0, DV)
    at = key_head * DK + key_dim
    weight = tl.load(norm + value_dim)
    for member in range(SHARED):
        head = key_head * SHARED + member
        in_heads = head * DV + value_dim
        place = heads + ((own * VALUE_HEADS + head) * DK + key_dim[:, None]) * DV + value_dim[None, :]
        state = tl.load(place, mask=goes_on & (count > 0) & (key_dim[:, None] < DK), other=0.0)
        for token in range(count):
            new = source + token * WIDTH
            q = _convolved_at(source, token, known, conv, at, goes_on, WIDTH, CHANNELS, TAPS)
            k = _convolved_at(source, token, known, conv, KEYS + at, goes_on, WIDTH, CHANNELS, TAPS)
            q *= tl.rsqrt(tl.sum(q * q) + LENGTH_EPS) * DK**-0.5
            k *= tl.rsqrt(tl.sum(k * k) + LENGTH_EPS)
            v = _convolved_at(source, token, known, conv, 2 * KEYS + in_heads, goes_on, WIDTH, CHANNELS, TAPS)
            z = tl.load(new + CHANNELS + in_heads).to(tl.float32)
            of_head = new + CHANNELS + VALUE_HEADS * DV + head
            strength = 1.0 / (1.0 + tl.exp(-tl.load(of_head).to(tl.float32)))
            a = tl.load(of_head + VALUE_HEADS).to(tl.float32)
            state *= tl.exp(_log_kept(a, tl.load(rate + head), tl.load(step_bias + head)))
            change = (v - tl.sum(state * k[:, None], 0)) * strength
            state += k[:, None] * change[None, :]
            left = tl.load(drafted + token, mask=token > 0, other=0).to(tl.int64)
            left = tl.where(token > 0, left, own)
            there = ((left * VALUE_HEADS + head) * DK + key_dim[:, None]) * DV + value_dim[None, :]
            tl.store(heads + there, state)
            found = tl.sum(state * q[:, None], 0)
            normed = found / tl.sqrt(tl.sum(found * found) / DV + eps) * weight
            answer = out + (row + token) * (VALUE_HEADS * DV) + in_heads
            tl.store(answer, (normed * activated(z, False)).to(out.dtype.element_ty))
    # The slot's own inputs are read for all tokens, and so they are the last to move on.
    tl.debug_barrier()
    for back in range(count):
        token = count - 1 - back
        left = tl.load(drafted + token, mask=token > 0, other=0).to(tl.int64)
        target = inputs + tl.where(token > 0, left, own) * ((TAPS - 1) * CHANNELS)
        _moved_on(source, token, known, target, at, goes_on, WIDTH, CHANNELS, TAPS)
        _moved_on(source, token, known, target, KEYS + at, goes_on, WIDTH, CHANNELS, TAPS)
        for member in range(SHARED):
            in_heads = 2 * KEYS + (key_head * SHARED + member) * DV + value_dim
            _moved_on(source, token, known, target, in_heads, goes_on, WIDTH, CHANNELS, TAPS)


@triton.jit
def _latest(
    source, token, known, at, goes_on, tap, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """The inputs of channels `at` before a row's token, as many as taps but one: of the row, or known before
    it."""
    in_row = token + tap - (TAPS - 1)
    is_tap = tap < TAPS - 1
    new = tl.load(source + in_row * WIDTH + at[None, :], mask=is_tap & (in_row >= 0), other=0.0)
    old_at = known + (in_row + TAPS - 1) * CHANNELS + at[None, :]
    old = tl.load(old_at, mask=is_tap & (in_row < 0) & goes_on, other=0.0)
    return tl.where(in_row >= 0, new, old)


@triton.jit
def _convolved_at(
    source,
    token,
    known,
    conv,
    at,
    goes_on,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """silu of the convolution of channels `at`, at a row's token."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
    before = _latest(source, token, known, at, goes_on, tap, WIDTH, CHANNELS, TAPS)
    new = tl.load(source + token * WIDTH + at)
    factors = tl.load(conv + tap * CHANNELS + at[None, :], mask=tap < TAPS - 1, other=0.0)
    total = tl.sum(before.to(tl.float32) * factors, 0)
    total += new.to(tl.float32) * tl.load(conv + (TAPS - 1) * CHANNELS + at)
    return activated(total, False)


@triton.jit
def _moved_on(
    source,
    token,
    known,
    target,
    at,
    goes_on,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Store the latest inputs of channels `at` behind a row's token."""
    if TAPS > 1:
        tap = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
        latest = _latest(source, token + 1, known, at, goes_on, tap, WIDTH, CHANNELS, TAPS)
        tl.debug_barrier()
        tl.store(target + tap * CHANNELS + at[None, :], latest, mask=tap < TAPS - 1)


@triton.jit
def turn_kernel(
    slots, before, behind, windows, agreed, order, first_window, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A program per token, of which those of drafts do nothing: the first token's counts its row's right
    drafts, and turns round the states of their cells and its own."""
    wait_for_earlier(PDL)
    row = tl.program_id(0)
    drafts = tl.where(tl.load(before + row) > 0, 0, tl.load(behind + row))
    number = tl.arange(0, BLOCK)
    is_right = tl.load(agreed + row + number, mask=number < drafts, other=0) > 0
    right = tl.min(tl.where(is_right, BLOCK, number))
    slot, drafted = tl.load(slots + row), first_window + tl.load(windows + row) - 1
    own = number <= right
    states = tl.load(order + tl.where(number > 0, drafted + number, slot), mask=own, other=0)
    tl.debug_barrier()
    turned = right - number
    tl.store(order + tl.where(turned > 0, drafted + turned, slot), states, mask=own & (right > 0))


@triton.jit
def _chunk(rows, chunks, C: tl.constexpr):
    """A chunk's row in the table, its first token within that row, and the number of its tokens."""
    row = rows + tl.load(chunks + tl.program_id(0) * 2) * 5
    first = tl.load(chunks + tl.program_id(0) * 2 + 1)
    return row, first, tl.minimum(C - (tl.load(row + 1) + first) % C, tl.load(row + 2) - first)


@triton.jit
def convolve_kernel(
    rows,
    chunks,
    x,
    inputs,
    conv,
    mixed,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    C: tl.constexpr,
):
    """A program per chunk and head: those of queries, of keys, of values. Queries and keys come out of length
    one, and queries divided by sqrt(Dk)."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + KEY_HEADS * SHARED * DV
    BLOCK: tl.constexpr = max(DK, DV)
    row, first, count = _chunk(rows, chunks, C)
    slot, start = tl.load(row).to(tl.int64), tl.load(row + 1)
    head, dim = tl.program_id(1), tl.arange(0, BLOCK)[None, :]
    is_key = head < 2 * KEY_HEADS
    at = tl.where(is_key, head * DK, 2 * KEY_HEADS * DK + (head - 2 * KEY_HEADS) * DV) + dim
    inside = dim < tl.where(is_key, DK, DV)
    token = tl.arange(0, C)[:, None]
    packed = tl.load(row + 3).to(tl.int64) + first
    total = tl.zeros([C, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        in_row = first + token + tap - (TAPS - 1)
        new = inside & (token < count) & (in_row >= 0)
        seen_at = x + (packed - first + in_row) * WIDTH + at
        seen = tl.load(seen_at, mask=new, other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            old = inside & (token < count) & (in_row < 0) & (start > 0)
            place = (slot * (TAPS - 1) + TAPS - 1 + in_row) * CHANNELS + at
            seen += tl.load(inputs + place, mask=old, other=0.0).to(tl.float32)
        total += seen * tl.load(conv + tap * CHANNELS + at, mask=inside, other=0.0)
    total = activated(total, False)
    factor = tl.rsqrt(tl.sum(total * total, 1) + LENGTH_EPS) * tl.where(head < KEY_HEADS, DK**-0.5, 1.0)
    total *= tl.where(is_key, factor, 1.0)[:, None]
    place = mixed + (packed + token) * CHANNELS + at
    tl.store(place, total.to(mixed.dtype.element_ty), mask=inside & (token < count))


@triton.jit
def keep_inputs_kernel(
    rows,
    x,
    inputs,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per row and block of channels: the row's last inputs, for its next token."""
    row = rows + tl.program_id(0) * 5
    slot, start, length = tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2)
    packed = tl.load(row + 3).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
    inside = (channel < CHANNELS) & (tap < TAPS - 1)
    in_row = length - (TAPS - 1) + tap
    new = tl.load(x + (packed + in_row) * WIDTH + channel, mask=inside & (in_row >= 0), other=0.0)
    known = inputs + slot * ((TAPS - 1) * CHANNELS) + channel
    old = inside & (in_row < 0) & (start > 0)
    before = tl.load(known + (tap + length) * CHANNELS, mask=old, other=0.0)
    tl.debug_barrier()
    tl.store(known + tap * CHANNELS, tl.where(in_row >= 0, new, before), mask=inside)


@triton.jit
def prepare_kernel(
    rows,
    chunks,
    x,
    rate,
    step_bias,
    mixed,
    u,
    w,
    sums,
    within,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    SUB: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A program per chunk and value head: what its tokens add up to without the state before them."""
    VALUE_HEADS: tl.constexpr = KEY_HEADS * SHARED
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    row, first, count = _chunk(rows, chunks, C)
    head = tl.program_id(1)
    token, inside = tl.arange(0, C), tl.arange(0, C) < count
    packed = tl.load(row + 3).to(tl.int64) + first + token
    of_head = x + packed * WIDTH + CHANNELS + VALUE_HEADS * DV + head
    strength = 1.0 / (1.0 + tl.exp(-tl.load(of_head, mask=inside, other=0.0).to(tl.float32)))
    strength = tl.where(inside, strength, 0.0)
    a = tl.load(of_head + VALUE_HEADS, mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(inside, _log_kept(a, tl.load(rate + head), tl.load(step_bias + head)), 0.0)
    total = tl.cumsum(kept, 0)
    tl.store(sums + packed * VALUE_HEADS + head, total, mask=inside)
    keys_at = mixed + packed[:, None] * CHANNELS + head // SHARED * DK + tl.arange(0, DK)[None, :]
    k = tl.load(keys_at + KEY_HEADS * DK, mask=inside[:, None], other=0.0)
    between = total[:, None] - total[None, :]
    fade = tl.exp(tl.where(token[:, None] >= token[None, :], between, float("-inf")))
    products = tl.dot(k, k.T, input_precision="ieee") * fade * strength[:, None]
    lower = tl.where(token[:, None] > token[None, :], products, 0.0)
    inverse = _inverse(lower, C, SUB, WIDE).to(k.dtype)
    scaled = (k.to(tl.float32) * (strength * tl.exp(total))[:, None]).to(k.dtype)
    w_at = w + (packed[:, None] * VALUE_HEADS + head) * DK + tl.arange(0, DK)[None, :]
    tl.store(w_at, tl.dot(inverse, scaled, input_precision="ieee").to(k.dtype), mask=inside[:, None])
    dim = tl.arange(0, DV)[None, :]
    values_at = mixed + packed[:, None] * CHANNELS + 2 * KEY_HEADS * DK + head * DV + dim
    v = tl.load(values_at, mask=inside[:, None], other=0.0).to(tl.float32)
    changes = tl.dot(inverse, (v * strength[:, None]).to(k.dtype), input_precision="ieee")
    u_at = u + (packed[:, None] * VALUE_HEADS + head) * DV + dim
    tl.store(u_at, changes.to(k.dtype), mask=inside[:, None])
    q = tl.load(keys_at, mask=inside[:, None], other=0.0)
    seen = tl.dot(q, k.T, input_precision="ieee") * fade
    at = (tl.program_id(0).to(tl.int64) * VALUE_HEADS + head) * (C * C)
    tl.store(within + at + token[:, None] * C + token[None, :], seen.to(k.dtype))


@triton.jit
def _inverse(lower, C: tl.constexpr, SUB: tl.constexpr, WIDE: tl.constexpr):
    """(1 + lower)^-1, of a matrix [C, C] that is zero on its diagonal and above."""
    BLOCKS: tl.constexpr = C // SUB
    at, row = tl.arange(0, C), tl.arange(0, SUB)[None, :, None]
    is_inner = at[:, None] // SUB == at[None, :] // SUB
    inner = tl.where(is_inner, -lower, 0.0)
    blocks = tl.sum(tl.reshape(inner, [BLOCKS, SUB, BLOCKS, SUB]), 2)
    found = blocks
    for n in range(1, SUB):
        own = tl.sum(tl.where(row == n, blocks, 0.0), 1)
        own += tl.sum(own[:, :, None] * found, 1)
        found = tl.where(row == n, own[:, None, :], found)
    one = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    block = tl.arange(0, BLOCKS)
    is_same = block[:, None, None, None] == block[None, None, :, None]
    inverse = tl.reshape(tl.where(is_same, found[:, :, None, :], 0.0), [C, C]) + one
    if BLOCKS > 1:
        rest = tl.dot(inverse, tl.where(is_inner, 0.0, lower), input_precision=WIDE)
        squared = tl.dot(rest, rest, input_precision=WIDE)
        series = one - rest + squared - tl.dot(rest, squared, input_precision=WIDE)
        inverse = tl.dot(series, inverse, input_precision=WIDE)
    return inverse


@triton.jit
def carry_kernel(
    rows,
    mixed,
    u,
    w,
    sums,
    within,
    heads,
    out,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per row, value head and block of value dims, from chunk to chunk."""
    VALUE_HEADS: tl.constexpr = KEY_HEADS * SHARED
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    row, head = rows + tl.program_id(0) * 5, tl.program_id(1)
    slot, start, length = tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2)
    offset, chunk = tl.load(row + 3).to(tl.int64), tl.load(row + 4).to(tl.int64)
    token, key_dim = tl.arange(0, C), tl.arange(0, DK)
    value_dim = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = heads + ((slot * VALUE_HEADS + head) * DK + key_dim[:, None]) * DV + value_dim[None, :]
    state = tl.load(place, mask=(start > 0) & (key_dim[:, None] < DK), other=0.0)
    square = within + (chunk * VALUE_HEADS + head) * (C * C) + token[:, None] * C + token[None, :]
    begin = start // C
    for n in range((start + length + C - 1) // C - begin):
        low = tl.maximum((begin + n) * C - start, 0)
        count = tl.minimum((begin + n + 1) * C - start, length) - low
        inside = token < count
        packed = offset + low + token
        in_head = packed * VALUE_HEADS + head
        total = tl.load(sums + in_head, mask=inside, other=0.0)
        last = tl.load(sums + (offset + low + count - 1) * VALUE_HEADS + head)
        own = inside[:, None]
        mine = tl.load(w + in_head[:, None] * DK + key_dim[None, :], mask=own, other=0.0)
        change = tl.load(u + in_head[:, None] * DV + value_dim[None, :], mask=own, other=0.0).to(tl.float32)
        keys_at = mixed + packed[:, None] * CHANNELS + head // SHARED * DK + key_dim[None, :]
        q = tl.load(keys_at, mask=own, other=0.0)
        k = tl.load(keys_at + KEY_HEADS * DK, mask=own, other=0.0)
        before = state.to(q.dtype)
        change -= tl.dot(mine, before, input_precision="ieee")
        changes = change.to(q.dtype)
        found = tl.dot(q, before, input_precision="ieee") * tl.exp(total)[:, None]
        among = tl.load(square)
        square += VALUE_HEADS * C * C
        found = tl.dot(among, changes, found, input_precision="ieee")
        out_at = out + in_head[:, None] * DV + value_dim[None, :]
        tl.store(out_at, found.to(out.dtype.element_ty), mask=own)
        faded = (k.to(tl.float32) * tl.exp(last - total)[:, None]).to(q.dtype)
        state = tl.dot(faded.T, changes, state * tl.exp(last), input_precision="ieee")
    tl.store(place, state)


@triton.jit
def gate_kernel(
    rows,
    chunks,
    x,
    norm,
    out,
    eps,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
):
    """A program per chunk and value head: the outputs' norm, times silu(z), in place."""
    VALUE_HEADS: tl.constexpr = KEY_HEADS * SHARED
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    row, first, count = _chunk(rows, chunks, C)
    token, dim = tl.arange(0, C)[:, None], tl.arange(0, DV)[None, :]
    packed = tl.load(row + 3).to(tl.int64) + first + token
    at = tl.program_id(1) * DV + dim
    place = out + packed * (VALUE_HEADS * DV) + at
    found = tl.load(place, mask=token < count, other=0.0).to(tl.float32)
    z = tl.load(x + packed * WIDTH + CHANNELS + at, mask=token < count, other=0.0).to(tl.float32)
    normed = found / tl.sqrt(tl.sum(found * found, 1) / DV + eps)[:, None] * tl.load(norm + dim)
    tl.store(place, (normed * activated(z, False)).to(out.dtype.element_ty), mask=token < count)
