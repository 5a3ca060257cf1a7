"""Rotary position embeddings: the angles that a checkpoint's configuration gives each position."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from engine.runtime.models.rope import RopeConfig


class Rotary:
    """Rotary position embeddings (Su et al. 2021) in the half-split form of the Llama checkpoints."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self.inverse_frequencies: Final = _inverse_frequencies(config, head_dim)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [T], [T, 1, D/2] each. A step computes them once for all layers."""
        angles = positions[:, None, None].float() * self.inverse_frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """The rotary frequencies, [D/2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    scaling = config.llama3
    if scaling is None:
        return frequencies
    # Wavelengths beyond the original context are stretched by `factor`, short ones stay, those in
    # between are blended.
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_context_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
