"""Kernels that sample tokens from logits: the distribution of `engine.runtime.host.sampler`, token for token.

**One number per token.** Gumbel-max would hash a random number for every entry of the vocabulary; the CPU's
rule needs one: the token at u in the cumulative distribution, u being philox(seed, position). The kernels
follow the same rule in the same order (ids ascending; where top-k or top-p cut, likeliest first), so that a
seed gives the same tokens on both, but for logits that differ or a u within rounding of a boundary.

**Masses are integers.** A weight exp((x - best) / T) is at most 1; as an integer in units of 2^-44 it sums
exactly, in whatever order, and a vocabulary of 2^18 still fits 63 bits. That makes any division of the work
the same to the bit, and "the first whose cumulative mass exceeds u times the total" an exact question.

**No sort.** A position in the sorted order is found by value: distances from the best, (best - x) / T, are
non-negative floats, whose bits ascend as they do. Eleven rounds of three bits, each one pass that sums the
mass (or count) below seven pivots, find the value at which the sum passes a target; equals are told apart by
id. Top-k is such a search by count, top-p one by mass, and the draw itself one by mass. They run over the
candidates within one of four distances from the best: the second kernel counts and weighs the tokens within
each distance, chunk by chunk, and the third takes the least distance that top-k and top-p do not reach
beyond. That leaves tens or hundreds of 152k tokens, and most chunks need not be read again. Rows that reach
beyond `NEAR`, which no likely distribution does, take all tokens. Where more than `GATHERED_MAX` are left, as
of flat logits, they are not searched one by one but sorted in runs (`ordering.py`).

**Drafts.** The tokens of a row that verifies are sampled as if the drafts before them were known, each by its
own position: those drafts lie in the sequence's tokens, and are added to its counts where a row has
penalties. `choose` puts each token in the place of the draft that it is compared with, and `settle` counts
those that stay: all before which every draft is right. The others lie behind the sequence's end, as wherever
a step leaves something there, and are overwritten.

Four launches, all but the last spread over (row, chunk of the vocabulary), and a fifth where rows verify:

    measure   edits the rows that ask for it; maximum, soundness, log-sum-exp of each chunk
    weigh     the mass of each chunk; where top-k or top-p cut, what is near
    order     where many tokens are near, sorts them in runs
    choose    a program per row: greedy, by chunks, or among candidates; log-probability; counts; stores the
              token where the next step finds it
    settle    a program per token: counts it if it stays

Logits come in the model's type and are left as they are: rows that ask for edits are sampled from a copy in
float32, which the first kernel makes and edits. All others need none.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from engine.contract.messages import NUMERIC_FAILURE
from engine.runtime.kernels.dependent_launch import wait_for_earlier
from engine.runtime.kernels.masses import (
    NEAR,
    RUNGS,
    limit_of,
    load_logits,
    mass_of,
    pack,
    rung_of,
    share_of,
    token_mass,
)
from engine.runtime.kernels.ordering import PREFIX, furthest_kept, ordered_sums, ordered_token

CHUNK: Final = 4096
"""Tokens of the vocabulary per program: a row of 152k then has 38 programs, enough to fill a GPU at batch
4."""
WARPS: Final = 8
CANDIDATE_BLOCK: Final = 512
"""Candidates that are compared at once: with eight pivots 16 sums of 64 bits per thread. Twice that
spills."""

_RUNGS = tl.constexpr(RUNGS)
_RUNG = tl.constexpr(NEAR / RUNGS)
_PREFIX = tl.constexpr(PREFIX)
_FAILURE = tl.constexpr(NUMERIC_FAILURE)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_ALLOWED_MIN = tl.constexpr(-3.4028234663852886e38 / 2)
_NOBODY = tl.constexpr(0x7F800000 << 32)  # infinitely far: no mass


@triton.jit
def _looks_back(penalties):
    repetition, frequency, presence = tl.load(penalties), tl.load(penalties + 1), tl.load(penalties + 2)
    return (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)


@triton.jit
def measure_kernel(
    logits, edited, are_edited, slots, positions, penalties, counts, bias_ids, bias_values, biases,
    stop_ids, stops, held_until, masks, are_masked, drafts, masked_by, known, known_width, best, raw_best,
    raw_sum, places, vocab, EDITS_MAX: tl.constexpr, STOPS_MAX: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row * vocab + ids, mask=inside, other=float("-inf")).to(tl.float32)
    unsound = tl.sum((inside & ((tl.abs(x) < float("inf")) == 0)).to(tl.int32))
    top = tl.max(x)
    at = row * tl.num_programs(1) + chunk
    tl.store(raw_best + at, top)
    tl.store(raw_sum + at, tl.sum(tl.where(inside, tl.exp(x - top), 0.0)))
    looks_back = _looks_back(penalties + slot * 3)
    bias_count = tl.load(biases + slot)
    stop_count = tl.where(position < tl.load(held_until + slot), tl.load(stops + slot), 0)
    mask, drafts_before = slot, 0
    if drafts is None:
        is_masked = tl.load(are_masked + slot) > 0
    else:
        mask, drafts_before = tl.load(masked_by + row).to(tl.int64), tl.load(drafts + row)
        is_masked = mask >= 0
    is_edited = looks_back | (bias_count > 0) | (stop_count > 0) | is_masked
    if chunk == 0:
        tl.store(are_edited + row, is_edited.to(tl.int32))
    if looks_back:
        output = tl.load(counts + slot * 2 * vocab + ids, mask=inside, other=0)
        if drafts is not None:
            newest = known + slot * known_width + position
            for back in range(1, drafts_before + 1):
                output += (ids == tl.load(newest - back)).to(tl.int32)
        prompt = tl.load(counts + (slot * 2 + 1) * vocab + ids, mask=inside, other=0)
        x = _bounded(_penalised(x, output, prompt, penalties + slot * 3))
    target = edited + row * vocab
    if is_edited:
        tl.store(target + ids, x, mask=inside)
    if (bias_count > 0) | (stop_count > 0):
        tl.debug_barrier()  # a token's bias is added by another thread than the one that stored it
        entry = tl.arange(0, EDITS_MAX)
        bias_id = tl.load(bias_ids + slot * EDITS_MAX + entry)
        here = (entry < bias_count) & (bias_id // CHUNK == chunk) & (bias_id < vocab)
        biased = tl.load(target + bias_id, mask=here) + tl.load(bias_values + slot * EDITS_MAX + entry)
        tl.store(target + bias_id, _bounded(biased), mask=here)
        tl.debug_barrier()
        stop_entry = tl.arange(0, STOPS_MAX)
        stop = tl.load(stop_ids + slot * STOPS_MAX + stop_entry)
        held = (stop_entry < stop_count) & (stop // CHUNK == chunk)
        tl.store(target + stop, tl.full([STOPS_MAX], -_FLOAT_MAX, tl.float32), mask=held)
        tl.debug_barrier()
        x = tl.load(target + ids, mask=inside, other=float("-inf"))
    if is_masked:
        words = tl.load(masks + mask * tl.cdiv(vocab, 32) + ids // 32, mask=inside, other=0)
        allowed = ((words >> (ids % 32)) & 1) > 0
        x = tl.where(inside & (allowed == 0), -_FLOAT_MAX, tl.where(inside, tl.maximum(x, _ALLOWED_MIN), x))
        tl.store(target + ids, x, mask=inside)
    top, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + at, top)
    tl.store(places + at, tl.where(unsound > 0, _FAILURE, chunk * CHUNK + place))


@triton.jit
def _bounded(x):
    """x clamped to float32's finite range: the difference of two such numbers may be infinite, but not
    NaN."""
    return tl.minimum(tl.maximum(x, -_FLOAT_MAX), _FLOAT_MAX)


@triton.jit
def _penalised(x, output, prompt, penalties):
    """The penalised logits, in the CPU's order of operations: repetition, frequency, presence. `output` and
    `prompt`: how often each token is in them."""
    repetition = tl.load(penalties)
    punished = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where((output > 0) | (prompt > 0), punished, x)
    x -= tl.load(penalties + 1) * output.to(tl.float32)
    return x - tl.load(penalties + 2) * (output > 0).to(tl.float32)


@triton.jit
def weigh_kernel(
    logits,
    edited,
    are_edited,
    slots,
    temperature,
    top_k,
    top_p,
    min_p,
    best,
    masses,
    near_masses,
    near_counts,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The mass of each chunk: of all tokens where top-p wants a share of them, else of those that min-p
    keeps. Where top-k or top-p cut, also how many tokens lie within each distance, and their mass."""
    wait_for_earlier(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    heat = tl.load(temperature + slot)
    chunks = tl.num_programs(1)
    if heat > 0:
        every = tl.arange(0, CHUNKS_BLOCK)
        tops = tl.load(best + row * chunks + every, mask=every < chunks, other=float("-inf"))
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(logits, edited, tl.load(are_edited + row) > 0, row * vocab + ids, ids < vocab)
        distance = tl.div_rn(tl.max(tops) - x, heat)
        whole = (tl.load(top_k + slot) < vocab) | (tl.load(top_p + slot) < 1.0)
        kept = whole | (tl.exp(-distance) >= tl.load(min_p + slot))
        mass = tl.where(kept & (ids < vocab), token_mass(distance), 0)
        tl.store(masses + row * chunks + chunk, tl.sum(mass))
        if whole:
            at = (row * chunks + chunk) * _RUNGS
            for rung in range(_RUNGS):
                near = (distance <= (rung + 1) * _RUNG) & (ids < vocab)
                tl.store(near_counts + at + rung, tl.sum(near.to(tl.int32)))
                tl.store(near_masses + at + rung, tl.sum(tl.where(near, mass, 0)))


@triton.jit
def choose_kernel(
    logits, edited, are_edited, slots, positions, temperature, top_k, top_p, min_p, penalties, seed,
    counts, best, raw_best, raw_sum, places, masses, near_masses, near_counts, candidates, mass_before,
    tokens, logprobs, known, known_width, agreed, vocab, CANDIDATE_BLOCK: tl.constexpr,
    GATHERED_MAX: tl.constexpr, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    every, count = tl.arange(0, CHUNKS_BLOCK), tl.cdiv(vocab, CHUNK)
    at, exists = row * count + every, every < count
    tops = tl.load(best + at, mask=exists, other=float("-inf"))
    top, chunk = tl.max(tops, 0, return_indices=True, return_indices_tie_break_left=True)
    place = tl.load(places + at, mask=exists, other=0)
    sound = tl.min(place) >= 0
    token = tl.sum(tl.where(every == chunk, place, 0))
    heat = tl.load(temperature + slot)
    if sound & (heat > 0):
        is_edited = tl.load(are_edited + row) > 0
        mass = tl.load(masses + at, mask=exists, other=0)
        k, p, floor = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
        u = _uniform(tl.load(seed + slot), position)
        if (k < vocab) | (p < 1.0):
            own, total = candidates + row * vocab, tl.sum(mass)
            before = mass_before + row * count * (CHUNK // _PREFIX)
            rung, n = rung_of(near_masses, near_counts, row * count, count, k, p, total, vocab, CHUNKS_BLOCK)
            if n > GATHERED_MAX:
                token = _draw_sorted(own, before, vocab, total, k, p, floor, u, vocab, 0, RUN, RUNS_BLOCK)
            else:
                gathered = _gather(
                    logits, edited, is_edited, own, near_counts, row, rung, top, heat, count, vocab, CHUNK
                )
                token = _draw_sorted(
                    own, before, gathered, total, k, p, floor, u, vocab, CANDIDATE_BLOCK, RUN, RUNS_BLOCK
                )
        else:
            token = _draw_by_id(
                logits, edited, is_edited, row * vocab, mass, top, heat, floor, u, vocab, CHUNK, CHUNKS_BLOCK
            )
    raw_tops = tl.load(raw_best + at, mask=exists, other=float("-inf"))
    raw_top = tl.max(raw_tops)
    raw_sums = tl.load(raw_sum + at, mask=exists, other=0.0)
    total = tl.sum(tl.where(exists, raw_sums * tl.exp(raw_tops - raw_top), 0.0))
    chosen = tl.load(logits + row * vocab + tl.maximum(token, 0)).to(tl.float32)
    tl.store(logprobs + row, chosen - raw_top - tl.log(total))
    tl.store(tokens + row, tl.where(sound, token, _FAILURE).to(tl.int64))
    newest = known + slot * known_width + position
    if agreed is None:
        _count(counts + slot * 2 * vocab + token, _looks_back(penalties + slot * 3) & sound)
    else:
        tl.store(agreed + row, (sound & (tl.load(newest) == token)).to(tl.int32))
    tl.store(newest, tl.where(sound, token, 0))


@triton.jit
def _count(seen, is_counted):
    if is_counted:
        tl.store(seen, tl.load(seen) + 1)


@triton.jit
def settle_kernel(slots, drafts, tokens, agreed, penalties, counts, vocab, PDL: tl.constexpr):
    """Count the tokens that stay in rows with penalties: those that no wrong draft is before."""
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if _looks_back(penalties + slot * 3):
        token = tl.load(tokens + row)
        stays = token >= 0
        for back in range(1, tl.load(drafts + row) + 1):
            stays = stays & (tl.load(agreed + row - back) > 0)
        if stays:
            tl.atomic_add(counts + slot * 2 * vocab + token, 1)


@triton.jit
def _uniform(seed, position):
    """philox(seed, position) in [0, 1), with all 53 bits: `engine.runtime.host.philox.uniforms`."""
    zero = position.to(tl.uint32) * 0
    high, low, _, _ = tl.philox(seed, position.to(tl.uint32), zero, zero, zero)
    bits = (high >> 5).to(tl.int64) * (1 << 26) + (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _share(u, total):
    """The share u of a mass, always less than the whole."""
    return tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _draw_by_id(
    logits,
    edited,
    is_edited,
    begin,
    mass,
    top,
    heat,
    floor,
    u,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    """The token at u of the cumulative mass: first the chunk, then the token in it. The row begins at
    `begin`."""
    ends = tl.cumsum(mass, 0)
    target = _share(u, tl.sum(mass))
    chunk = tl.sum((ends <= target).to(tl.int32))
    chunk = tl.minimum(chunk, CHUNKS_BLOCK - 1)
    before = tl.sum(tl.where(tl.arange(0, CHUNKS_BLOCK) < chunk, mass, 0))
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    distance = tl.div_rn(top - load_logits(logits, edited, is_edited, begin + ids, ids < vocab), heat)
    own = tl.where((tl.exp(-distance) >= floor) & (ids < vocab), token_mass(distance), 0)
    token = chunk * CHUNK + tl.sum((before + tl.cumsum(own, 0) <= target).to(tl.int32))
    return tl.minimum(token, vocab - 1)


@triton.jit
def _draw_sorted(
    candidates,
    mass_before,
    n,
    total,
    k,
    p,
    floor,
    u,
    vocab,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_BLOCK: tl.constexpr,
):
    """The token at u of what top-k, top-p and min-p leave, likeliest first, lower ids first among equals. A
    BLOCK of 0: the n candidates are the vocabulary, in runs."""
    kept = total
    if k < vocab:
        rank = k.to(tl.int64) - 1
        key, before = _search(candidates, mass_before, n, rank, True, BLOCK, RUN, RUNS_BLOCK)
        kept = _mass_before(candidates, mass_before, n, key, BLOCK, RUN, RUNS_BLOCK)
        kept += (k - before) * mass_of(key)
    if p < 1.0:
        reach = share_of(p, kept)
        key, before = _search(candidates, mass_before, n, reach - 1, False, BLOCK, RUN, RUNS_BLOCK)
        each = tl.maximum(mass_of(key), 1)
        kept = tl.minimum(kept, before + (reach - before + each - 1) // each * each)
    if floor > 0:
        if BLOCK == 0:
            key = furthest_kept(floor, kept * 0) + 1
            above = _mass_before(candidates, mass_before, n, key, BLOCK, RUN, RUNS_BLOCK)
        else:
            above = _mass_above(candidates, n, floor, BLOCK)
        kept = tl.minimum(kept, above)
    target = _share(u, kept)
    key, before = _search(candidates, mass_before, n, target, False, BLOCK, RUN, RUNS_BLOCK)
    rank = (target - before) // tl.maximum(mass_of(key), 1)
    if BLOCK == 0:
        token = ordered_token(candidates, key, rank, n, RUN, RUNS_BLOCK)
    else:
        token = _equal(candidates, n, key, rank, BLOCK)
    return token


@triton.jit
def _gather(
    logits,
    edited,
    is_edited,
    candidates,
    near_counts,
    row,
    rung,
    top,
    heat,
    chunks,
    vocab,
    CHUNK: tl.constexpr,
):
    """Collect the tokens within the rung's distance of the best, in order of their ids -> their
    number. All threads of the program see them."""
    n = tl.full([], 0, tl.int64)
    limit = limit_of(rung)
    for chunk in range(chunks):
        counted = tl.load(near_counts + (row * chunks + chunk) * _RUNGS + tl.minimum(rung, _RUNGS - 1))
        if (counted > 0) | (rung == _RUNGS):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(logits, edited, is_edited, row * vocab + ids, ids < vocab)
            distance = tl.div_rn(top - x, heat)
            near = (distance <= limit) & (ids < vocab)
            place = candidates + n + tl.cumsum(near.to(tl.int32), 0) - 1
            tl.store(place, pack(distance, ids), mask=near)
            n += tl.sum(near.to(tl.int32))
    tl.debug_barrier()
    return n


@triton.jit
def _search(
    candidates,
    mass_before,
    n,
    target,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    RUNS_BLOCK: tl.constexpr,
):
    """The distance (bits) at which the running mass (or count) first exceeds `target`, and the sum before."""
    key, before = target * 0, target * 0
    pivot = tl.arange(0, 8).to(tl.int64)
    for step in range(11):
        pivots = key + ((pivot + 1) << (30 - 3 * step))
        if BLOCK == 0:
            sums = ordered_sums(candidates, mass_before, pivots, n, COUNT, RUN, RUNS_BLOCK)
        else:
            sums = _sums(candidates, n, pivots, COUNT, BLOCK)
        passed = (sums <= target) & (pivot < 7)
        key += tl.sum(passed.to(tl.int64)) << (30 - 3 * step)
        before = tl.maximum(before, tl.max(tl.where(passed, sums, 0)))
    return key, before


@triton.jit
def _sums(candidates, n, pivots, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The mass (or count) of the candidates below each of eight pivots."""
    sums = tl.zeros([8], tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(candidates + at, mask=at < n, other=_NOBODY) >> 32
        amount = tl.full([BLOCK], 1, tl.int64)
        if COUNT == 0:
            amount = mass_of(keys)
        below = (keys[:, None] < pivots[None, :]) & (at < n)[:, None]
        sums += tl.sum(tl.where(below, amount[:, None], 0), 0)
    return sums


@triton.jit
def _mass_before(
    candidates, mass_before, n, key, BLOCK: tl.constexpr, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr
):
    if BLOCK == 0:
        pivots = key + tl.arange(0, 2) * 0
        total = tl.max(ordered_sums(candidates, mass_before, pivots, n, False, RUN, RUNS_BLOCK))
    else:
        total = key * 0
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keys = tl.load(candidates + at, mask=at < n, other=_NOBODY) >> 32
            total += tl.sum(tl.where(keys < key, mass_of(keys), 0))
    return total


@triton.jit
def _mass_above(candidates, n, floor, BLOCK: tl.constexpr):
    """The mass of the tokens with at least `floor` of the best one's weight."""
    total = n * 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = tl.load(candidates + at, mask=at < n, other=_NOBODY) >> 32
        weight = tl.exp(-keys.to(tl.int32).to(tl.float32, bitcast=True))
        total += tl.sum(tl.where((weight >= floor) & (at < n), mass_of(keys), 0))
    return total


@triton.jit
def _equal(candidates, n, key, rank, BLOCK: tl.constexpr):
    """The id of the rank-th candidate, from 0, at exactly this distance."""
    seen = rank * 0
    token = rank * 0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        packed = tl.load(candidates + at, mask=at < n, other=_NOBODY)
        match = (packed >> 32) == key
        order = seen + tl.cumsum(match.to(tl.int64), 0) - 1
        token += tl.sum(tl.where(match & (order == rank), packed & 0xFFFFFFFF, 0))
        seen += tl.sum(match.to(tl.int64))
    return token.to(tl.int32)
