"""The states of sequences whose model has delta nets: what such a layer keeps instead of keys and values.

A slot has one state in each of these layers, of the same size whatever a sequence's length: a matrix for each
value head, in float32, and the last inputs of the convolution.

Rules:

1. A state belongs to the tokens that were computed in its slot, without a gap, from position 0 on or from the
   tokens of a state that was copied there. The row that begins at 0 finds zeros, whoever had the slot before.
2. So it is gone with the slot. What a plan saves of it before it computes anything lies in a *place*, from
   where another slot may begin (`engine.core.pages.state_pool` says which is where). A copy has every bit.
3. Places lie where the slots' states do, on a GPU in its memory. There a copy is queued like any other work
   of the step, behind the step that came to the state, and nothing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.runtime.models.spec import DecoderSpec, DeltaNet
from engine.runtime.step.batch import Row

FLOAT_BYTES: Final = torch.float32.itemsize
MEASURED_ROUNDS: Final = 3
Move = tuple[int, int]
"""A copy of a state: from a slot to a place, or from a place to a slot."""


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

    def describe(self, slots: int, places: int) -> str:
        """What is kept for so many slots and snapshots, for the log."""
        size = self.slot_bytes
        return (
            f"keeping a state of {size / 1e6:.1f} MB for each of {slots} sequences, and "
            f"{places} snapshots of states ({places * size / 1e9:.2f} GB) for prefixes"
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
        self._kept: list[Tensor] = []

    @property
    def _own(self) -> list[Tensor]:
        return [*self.heads, *self.inputs]

    def reserve(self, places: int) -> None:
        """Set memory aside for copies of so many states, beside those. Uninitialised: the system hands it out
        as places are first written."""
        self._kept = [own.new_empty(places, *own.shape[1:]) for own in self._own]

    def copy(self, saved: Sequence[Move], restored: Sequence[Move]) -> None:
        """Copy states from slots to places, then from places to slots."""
        if saved:
            self._copy(self._own, self._kept, saved)
        if restored:
            self._copy(self._kept, self._own, restored)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Sequence[Move]) -> None:
        """Copy what lies at a number in each source to another in each target."""
        layers = len(self.heads)
        for part in (slice(layers), slice(layers, None)):  # of one type each: few kernels copy all of them
            torch._foreach_copy_(
                [target[at] for target in targets[part] for _, at in moves],
                [source[at] for source in sources[part] for at, _ in moves],
            )

    def measure(self) -> float:
        """Seconds to copy one state to its place or back, the least of a few rounds; 0 without places.
        Overwrites slot 0 and place 0."""
        if not self._kept or not len(self._kept[0]):
            return 0.0
        rounds = []
        for _ in range(MEASURED_ROUNDS):
            started_s = time.perf_counter()
            self.copy([(0, 0)], [(0, 0)])
            if self._kept[0].is_cuda:
                torch.cuda.synchronize()
            rounds.append(time.perf_counter() - started_s)
        return min(rounds) / 2

    def begin(self, rows: Sequence[Row]) -> None:
        """Clear the states of those rows that begin at position 0 (first rule)."""
        for slot in (row.slot for row in rows if not row.start):
            for state in self._own:
                state[slot].zero_()
