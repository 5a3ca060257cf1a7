"""Masses of tokens and their distances from the best: the arithmetic that the sampling kernels share
(`sampling.py` says why masses are integers)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

MASS_BITS: Final = 44
NEAR: Final = 16.0
"""The largest distance, in nats of the tempered distribution: a token beyond weighs less than e^-16 of the
best."""
RUNGS: Final = 4
"""The number of distances from the best, the largest NEAR, the least NEAR / RUNGS."""

_UNIT = tl.constexpr(float(1 << MASS_BITS))
_RUNGS = tl.constexpr(RUNGS)
_RUNG = tl.constexpr(NEAR / RUNGS)


@triton.jit
def token_mass(distance):
    """exp(-distance) in units of 2^-44."""
    return (tl.exp(-distance) * _UNIT).to(tl.int64)


@triton.jit
def mass_of(key):
    """The mass of a token whose distance has these bits."""
    return token_mass(key.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def pack(distance, ids):
    """The distance's bits above, the id below: in their order, the likeliest come first, lower ids first
    among equals."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids


@triton.jit
def share_of(p, total):
    """The part of a mass that top-p keeps."""
    return tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def load_logits(logits, edited, is_edited, at, inside):
    """The logits that tokens are drawn from, float32; -inf where not inside."""
    if is_edited:
        x = tl.load(edited + at, mask=inside, other=float("-inf"))
    else:
        x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def rung_of(near_masses, near_counts, first, chunks, k, p, total, vocab, CHUNKS_BLOCK: tl.constexpr):
    """The least rung within which top-k and top-p find all that they keep, RUNGS where no rung is enough; and
    the number of tokens within it."""
    every, rung = tl.arange(0, CHUNKS_BLOCK)[:, None], tl.arange(0, _RUNGS)[None, :]
    at, exists = (first + every) * _RUNGS + rung, (every < chunks) & (rung >= 0)
    counted = tl.sum(tl.load(near_counts + at, mask=exists, other=0), 0)
    weighed = tl.sum(tl.load(near_masses + at, mask=exists, other=0), 0)
    reached = tl.where(k < vocab, counted >= k, weighed >= share_of(p, total))
    found = _RUNGS - tl.sum(reached.to(tl.int32))
    inside = tl.sum(tl.where(tl.arange(0, _RUNGS) == found, counted, 0))
    return found, tl.where(found == _RUNGS, vocab, inside)


@triton.jit
def limit_of(rung):
    """The distance of a rung from the best token; the rung beyond the last takes all tokens."""
    return tl.where(rung < _RUNGS, (rung + 1).to(tl.float32) * _RUNG, float("inf"))
