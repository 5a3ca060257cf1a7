"""The states of sequences whose model has delta nets: what such a layer keeps instead of keys and values.

A slot has one state in each of these layers, of the same size whatever a sequence's length: a matrix for each
value head, in float32, and the last inputs of the convolution.

Rules:

1. A state belongs to the tokens that were computed in its slot, without a gap, from position 0 on. The row
that
   begins at 0 finds zeros, whoever had the slot before.
2. So it is gone with the slot: a sequence that gets another computes all of its tokens again, since keys and
   values without the state are of no use (`engine.core.step.allocator`, rule L).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.runtime.models.spec import DecoderSpec, DeltaNet
from engine.runtime.step.batch import Row

FLOAT_BYTES: Final = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """The shape of a sequence's state."""

    layers: tuple[DeltaNet, ...]
    dtype: torch.dtype
    """Of the convolution's inputs."""

    @staticmethod
    def of(model: DecoderSpec, dtype: torch.dtype) -> StateGeometry:
        """`model`: as a rank computes it."""
        return StateGeometry(model.deltas, dtype)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's state in all layers; 0: the model has none."""
        return sum(
            own.value_heads * own.key_dim * own.value_dim * FLOAT_BYTES
            + (own.kernel - 1) * own.channels * self.dtype.itemsize
            for own in self.layers
        )


class States:
    """`heads[layer]` is [slots, Hv, Dk, Dv] float32, `inputs[layer]` [slots, kernel - 1, channels]: layers
    are counted among those that have a state."""

    def __init__(self, geometry: StateGeometry, slots: int, device: torch.device | None = None) -> None:
        """`device`: that of the states; None is torch's default."""
        own, dtype = geometry.layers, geometry.dtype
        self.heads: Final = [
            torch.zeros(slots, net.value_heads, net.key_dim, net.value_dim, device=device) for net in own
        ]
        self.inputs: Final = [
            torch.zeros(slots, net.kernel - 1, net.channels, dtype=dtype, device=device) for net in own
        ]

    def begin(self, rows: Sequence[Row]) -> None:
        """Clear the states of those rows that begin at position 0 (first rule)."""
        for slot in (row.slot for row in rows if not row.start):
            for state in (*self.heads, *self.inputs):
                state[slot].zero_()
