"""Arithmetic of which a token's result has the same bits in any company, in torch on a CPU.

A state sums up all tokens before, so it keeps the last bits of each, and a sequence that is computed again,
in other chunks or beside others, would go on from another state. Models with states are computed with these
operations, so that for them the bits depend on the sequence alone. Measured, of torch 2.x on AVX2 and
AVX-512:

    a product with weights      one row is summed in another order than two and more
    a product without           fewer than four rows are, and with threads some other numbers of rows
    silu, sigmoid, softplus     the last elements of a tensor are computed by other code than the rest
    exp, log1p                  all elements alike
    norms, sums over one axis   as long as the axis is the same
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SOFTPLUS_LINEAR: Final = 20.0
"""Above, softplus is x."""


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in float32."""
    exact = x.float()
    return (exact / (1.0 + (-exact).exp())).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """float32"""
    return 1.0 / (1.0 + (-x.float()).exp())


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x), of float32."""
    return torch.where(x > SOFTPLUS_LINEAR, x, x.exp().log1p())
