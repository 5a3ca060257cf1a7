"""Converts fp8 to the types that tensor cores multiply, at the rate of the other arithmetic.

e4m3 becomes float16 two numbers an instruction, and float32 from there; straight to bfloat16 is one number at
a time, and at a fraction of that rate. All of these hold every e4m3 exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

_HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """x in `dtype`, which represents every value of x's type."""
    if x.dtype == tl.float8e4nv and dtype != tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.jit
def beside(query, cache):
    """Queries in the type in which they are multiplied with the cache's keys.

    Beside fp8 that is float16 in place of bfloat16: keys and values need no conversion beyond that from fp8,
    attention's weights keep three bits more, and queries lose only values beyond 65,504 or below 2^-14, which
    do not occur in practice.
    """
    if cache.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        wide = query.to(tl.float32)
        query = tl.minimum(tl.maximum(wide, -_HALF_MAX), _HALF_MAX).to(tl.float16)
    return query
