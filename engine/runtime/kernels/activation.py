"""The functions of gates."""

from __future__ import annotations

import triton
import triton.language as tl

_SLOPE = tl.constexpr(1.5957691216057308)
"""2 sqrt(2 / pi)"""
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activated(x, GELU: tl.constexpr):
    """silu(x); or GELU of x by tanh, which is x sigmoid(2 y) where it is x (1 + tanh(y)) / 2."""
    y = x
    if GELU:
        y = _SLOPE * (x + _CUBIC * x * x * x)
    return x / (1.0 + tl.exp(-y))
