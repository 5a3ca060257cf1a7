"""A row of candidates in sorted runs, for distributions so flat that most of the vocabulary is near the best.

Few candidates are searched by one program, which reads all of them some forty times. For 152k candidates
that would take 10 ms and more, and every row of the step would wait. So the programs of `order_kernel` sort
them in runs of RUN tokens, each program its own chunk, and add up their masses on the way. The mass (or
count) below a pivot is then a binary search in each run, all runs at once, and the sum of what lies before
the places found.

What that costs, counted for 152k tokens and not measured. Sorting: a program reads its chunk's logits once
and writes 9 bytes per token; its 55 rounds of comparisons are 225,000 in all, of 64 bits, and all chunks of a
row are sorted at once. Choosing, by one program: at most 35 sums below eight pivots, each of 11 dependent
reads in 149 runs. A read is at most 1,192 sectors of 32 bytes: 15 MB in all from the second-level cache. The
masses behind the places found are nine reads more for two thirds of the sums, of two sectors in all: 2 MB.
At 100 GB/s, which is 64 bytes per clock of one multiprocessor, that is 0.17 ms; and the 600 reads follow
each other, at 0.5 us each 0.3 ms. So a row stays below 1 ms however flat it is: the work depends on the
vocabulary's size alone, not on what the logits are.

Masses are integers and a token's place follows from its distance and its id, so the token is the same as by
the search through all candidates, to the bit.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from engine.runtime.kernels.dependent_launch import wait_for_earlier
from engine.runtime.kernels.masses import load_logits, mass_of, pack, rung_of

GATHERED_MAX: Final = 4096
"""The most candidates that one program collects and searches; more are sorted in runs."""
RUN: Final = 1024
"""Tokens of a sorted run. Longer runs are fewer, but a sort's code and time grow faster than its length."""
PREFIX: Final = 8
"""Tokens that share an entry of the masses before them."""

_PREFIX = tl.constexpr(PREFIX)
_LAST = tl.constexpr(0x7F800000 << 32 | 0x7FFFFFFF)  # infinitely far, behind every token


@triton.jit
def order_kernel(
    logits,
    edited,
    are_edited,
    slots,
    temperature,
    top_k,
    top_p,
    best,
    masses,
    near_masses,
    near_counts,
    candidates,
    before,
    vocab,
    GATHERED_MAX: tl.constexpr,
    RUN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row and chunk, which has nothing to do unless the row has many candidates."""
    wait_for_earlier(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    heat, k, p = tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot)
    if (heat > 0) & ((k < vocab) | (p < 1.0)):
        every = tl.arange(0, CHUNKS_BLOCK)
        at = row * chunks + every
        total = tl.sum(tl.load(masses + at, mask=every < chunks, other=0))
        _, count = rung_of(near_masses, near_counts, row * chunks, chunks, k, p, total, vocab, CHUNKS_BLOCK)
        if count > GATHERED_MAX:
            top = tl.max(tl.load(best + at, mask=every < chunks, other=float("-inf")))
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            is_edited = tl.load(are_edited + row) > 0
            x = load_logits(logits, edited, is_edited, row * vocab + ids, ids < vocab)
            own = tl.where(ids < vocab, pack(tl.div_rn(top - x, heat), ids), _LAST)
            own = tl.sort(tl.reshape(own, [CHUNK // RUN, RUN]), 1)
            place = chunk * CHUNK + tl.arange(0, CHUNK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
            tl.store(candidates + row * vocab + place, own, mask=place < vocab)
            weights = tl.reshape(mass_of(own >> 32), [CHUNK // RUN, RUN // _PREFIX, _PREFIX])
            shared = tl.sum(weights, 2)
            entry = tl.arange(0, CHUNK // RUN)[:, None] * (RUN // _PREFIX)
            entry += tl.arange(0, RUN // _PREFIX)[None, :]
            entries = (row * chunks + chunk) * (CHUNK // _PREFIX) + entry
            tl.store(before + entries, tl.cumsum(shared, 1) - shared)


@triton.jit
def _places(candidates, pivots, vocab, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr):
    """How many of each run's keys are less than each pivot, [RUNS_BLOCK, pivots] int32."""
    run = tl.arange(0, RUNS_BLOCK)[:, None]
    size = tl.minimum(vocab - run * RUN, RUN)
    place = (run + pivots[None, :].to(tl.int32)) * 0
    step = RUN
    while step > 0:
        probe = place + step - 1
        inside = probe < size
        key = tl.load(candidates + run * RUN + probe, mask=inside, other=_LAST) >> 32
        place += tl.where(inside & (key < pivots[None, :]), step, 0)
        step = step // 2
    return place


@triton.jit
def ordered_sums(
    candidates, before, pivots, vocab, COUNT: tl.constexpr, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr
):
    """The mass (or count) of the row's tokens below each pivot. `candidates`, `before`: the row's own."""
    place = _places(candidates, pivots, vocab, RUN, RUNS_BLOCK)
    if COUNT:
        sums = tl.sum(place.to(tl.int64), 0)
    else:
        run = tl.arange(0, RUNS_BLOCK)[:, None]
        entry = tl.minimum(place // _PREFIX, RUN // _PREFIX - 1)
        found = tl.load(before + run * (RUN // _PREFIX) + entry, mask=run * RUN < vocab, other=0)
        for i in range(_PREFIX):
            at = entry * _PREFIX + i
            key = tl.load(candidates + run * RUN + at, mask=at < place, other=_LAST) >> 32
            found += mass_of(key)
        sums = tl.sum(found, 0)
    return sums


@triton.jit
def ordered_token(candidates, key, rank, vocab, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr):
    """The id of the rank-th token, from 0, at exactly this distance. Runs ascend by id, and so do equals in a
    run."""
    side = tl.arange(0, 2)
    place = _places(candidates, key + side, vocab, RUN, RUNS_BLOCK)
    first = tl.sum(tl.where(side[None, :] == 0, place, 0), 1)
    count = (tl.sum(tl.where(side[None, :] == 1, place, 0), 1) - first).to(tl.int64)
    behind = tl.cumsum(count, 0)
    is_there = (behind > rank) & (behind - count <= rank)
    at = tl.arange(0, RUNS_BLOCK) * RUN + first + (rank - behind + count)
    here = tl.sum(tl.where(is_there, at, 0))
    return (tl.load(candidates + here) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def furthest_kept(floor, zero):
    """The largest distance (bits) whose weight is at least `floor`. `zero`: an int64 0."""
    key = zero
    for step in range(31):
        further = key | ((zero + 1) << (30 - step))
        weight = tl.exp(-further.to(tl.int32).to(tl.float32, bitcast=True))
        key = tl.where(weight >= floor, further, key)
    return key
