"""Weights in fp8, a scale per output channel.

e4m3 has a sign, four bits of exponent and three of mantissa, and reaches 448: a channel's largest weight
becomes that. A weight keeps its three bits of mantissa down to 2^-14 of the channel's largest, so that it is
off by 2.6 % (root mean square); and since the errors are independent, so is a product of many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX: Final = 448.0
"""The largest e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    values: Tensor
    """[N, K] float8_e4m3fn"""
    scales: Tensor
    """[N] float32: what values have to be multiplied by"""

    def __post_init__(self) -> None:
        assert self.values.dtype == torch.float8_e4m3fn
        assert self.scales.shape == self.values.shape[:1]
        assert self.scales.dtype == torch.float32

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.values.to(device), self.scales.to(device))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N], through a copy in x's type: for many rows, where that is little."""
        out = F.linear(x, self.values.to(x.dtype)).float() * self.scales
        return (out if bias is None else out + bias).to(x.dtype)


def quantise(weight: Tensor) -> Fp8Weight:
    """weight [N, K] in any float type. Rounds to nearest; a channel of zeros has scale 1."""
    largest = weight.abs().amax(dim=1).float()
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    scaled = (weight.float() / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return Fp8Weight(scaled.to(torch.float8_e4m3fn), scales)
