"""Rotary position embeddings: the angles that a model's description gives each position."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from engine.runtime.models.spec import Linear, Llama3, Longrope, Rope, Yarn


class Rotary:
    """Rotary position embeddings (Su et al. 2021), of heads in the order of `Rope.order`: element i and i +
    D/2 are a pair. Pairs that are not rotated have the frequency 0, and so have all pairs without `rope`."""

    def __init__(self, rope: Rope | None, head_dim: int, context_len: int) -> None:
        """`context_len`: the tokens of the longest sequence that is served."""
        self.frequencies: Final = torch.zeros(head_dim // 2)
        """[D/2] float32"""
        self.amplitudes: Final = torch.ones(head_dim // 2)
        """The factors of cosines and sines, [D/2] float32."""
        self._is_plain = True
        if rope is not None:
            turned = rope.rotated(head_dim)
            self.frequencies[: turned // 2] = _inverse_frequencies(rope, turned, context_len)
            if isinstance(rope.scaling, Yarn | Longrope):
                self.amplitudes[: turned // 2] = rope.scaling.amplitude
                self._is_plain = rope.scaling.amplitude == 1.0

    @property
    def table(self) -> Tensor:
        """The frequencies, and behind them the amplitudes, [2, D/2] float32."""
        return torch.stack((self.frequencies, self.amplitudes))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [T], [T, 1, D/2] each. A step computes them once for all layers."""
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if not self._is_plain:
            cos, sin = cos * self.amplitudes, sin * self.amplitudes
        return cos.to(dtype), sin.to(dtype)


def _inverse_frequencies(rope: Rope, dim: int, context_len: int) -> Tensor:
    """The rotary frequencies of `dim` elements, [dim/2] float32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case Linear(factor):
            return frequencies / factor
        case Llama3():
            return _llama3(rope.scaling, frequencies)
        case Yarn():
            return _yarn(rope.scaling, rope.theta, dim)
        case Longrope(short, long):
            is_long = rope.scaling.is_long(context_len)
            factors = torch.tensor(long if is_long else short, dtype=torch.float32)
            return 1.0 / (factors * rope.theta**exponents)
    return frequencies


def _llama3(scaling: Llama3, frequencies: Tensor) -> Tensor:
    # Wavelengths beyond the original context are stretched by `factor`, short ones stay, those in
    # between are blended.
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_context_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(scaling: Yarn, theta: float, dim: int) -> Tensor:
    def place(turns: float) -> float:
        """The place, among frequencies, of the one that turns so often within the original context."""
        return dim * math.log(scaling.original_context_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    blend = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (scaling.factor * powers) * (1 - blend) + 1.0 / powers * blend
