"""Weights in fp8, a scale per output channel, or for each group of its columns.

e4m3 has a sign, four bits of exponent and three of mantissa, and reaches 448: a channel's largest weight
becomes that. A weight keeps its three bits of mantissa down to 2^-14 of the channel's largest, so that it is
off by 2.6 % (root mean square); and since the errors are independent, so is a product of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.runtime.models.quantization import GROUP_MULTIPLE

FP8_MAX: Final = 448.0
"""The largest number of e4m3."""


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], for any type: on a GPU not every version of torch indexes fp8."""
    if x.dtype != torch.float8_e4m3fn:
        return x[rows]
    return x.view(torch.uint8)[rows].view(x.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix in fp8 with its scales."""

    values: Tensor
    """The stored numbers, [N, K] float8_e4m3fn."""
    scales: Tensor
    """The factors of `values`, float32: [N], or [ceil(K / group), N] with groups."""
    group: int = 0
    """The number of columns that share a scale; 0: all columns of a row."""

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        assert self.values.dtype == torch.float8_e4m3fn
        assert self.scales.shape == ((-(-columns // self.group), rows) if self.group else (rows,))
        assert self.scales.dtype == torch.float32
        assert self.group % GROUP_MULTIPLE == 0

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.values.to(device), self.scales.to(device), self.group)

    def taken(self, rows: Tensor) -> Fp8Weight:
        """The rows of these numbers, in their order."""
        return Fp8Weight(taken(self.values, rows), self.scales[..., rows], self.group)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`."""
        if not self.group:
            return (self.values.float() * self.scales[:, None]).to(dtype)
        by_column = self.scales.T.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return (self.values.float() * by_column).to(dtype)

    @staticmethod
    def stacked(parts: Sequence[Fp8Weight]) -> Fp8Weight:
        """The parts, one above the other."""
        values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        return Fp8Weight(values, torch.cat([part.scales for part in parts], dim=-1), parts[0].group)


def quantise(weight: Tensor) -> Fp8Weight:
    """weight [N, K], of any float type, rounded to fp8 with a scale per row; a row of zeros has scale 1."""
    largest = weight.abs().amax(dim=1).float()
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    scaled = (weight.float() / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return Fp8Weight(scaled.to(torch.float8_e4m3fn), scales)
