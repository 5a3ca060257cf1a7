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
4. A row that verifies drafts leaves the state behind each of its tokens: behind the first where it found the
   one before, behind each draft in a *window*, a state that is nobody's. The one behind the last right draft
   becomes the slot's, by its number (`at`): no state is copied for it, and none is computed again. The others
   stay as they are until the next step computes, so that a plan may save what the slot has passed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.runtime.models.spec import DecoderSpec, DeltaNet
from engine.runtime.step.batch import Row

FLOAT_BYTES: Final = torch.float32.itemsize
MEASURED_ROUNDS: Final = 3
Saved = tuple[int, int, int]
"""A copy of a state from a slot to a place: the slot, the place, and how many tokens the state is before the
slot's own."""
Restored = tuple[int, int]
"""A copy from a place to a slot."""


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """The shape of a sequence's state."""

    layers: tuple[DeltaNet, ...]
    dtype: torch.dtype
    """The type of the convolution's inputs."""

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

    def describe(self, slots: int, places: int, windows: int = 0) -> str:
        """A sentence for the log on the states of so many slots, snapshots and windows."""
        size = self.slot_bytes
        drafts = f", and {windows} ({windows * size / 1e9:.2f} GB) for drafts" if windows else ""
        return (
            f"keeping a state of {size / 1e6:.1f} MB for each of {slots} sequences, and "
            f"{places} snapshots of states ({places * size / 1e9:.2f} GB) for prefixes{drafts}"
        )


class States:
    """`heads[layer]` is [states, Hv, Dk, Dv] float32, `inputs[layer]` [states, kernel - 1, channels]: layers
    are counted among those that have a state. Without windows there is one for each slot, under its
    number."""

    def __init__(
        self, geometry: StateGeometry, slots: int, device: torch.device | None = None, windows: int = 0
    ) -> None:
        """`device`: that of the states; None is torch's default. `windows`: the most drafts of a step."""
        own, dtype, count = geometry.layers, geometry.dtype, slots + windows
        self.heads: Final = [
            torch.zeros(count, net.value_heads, net.key_dim, net.value_dim, device=device) for net in own
        ]
        self.inputs: Final = [
            torch.zeros(count, net.kernel - 1, net.channels, dtype=dtype, device=device) for net in own
        ]
        self.count: Final = count
        self.at: Final = list(range(slots))
        """The state of each slot."""
        self._windows: dict[int, list[int]] = {}
        """The states behind the tokens of rows that verify in the step that computed last, by slot."""
        self._kept: list[Tensor] = []

    @property
    def _own(self) -> list[Tensor]:
        return [*self.heads, *self.inputs]

    def reserve(self, places: int) -> None:
        """Set memory aside for copies of so many states, beside those. Uninitialised: the system hands it out
        as places are first written."""
        self._kept = [own.new_empty(places, *own.shape[1:]) for own in self._own]

    def open(self, verifying: Sequence[Row]) -> Mapping[int, Sequence[int]]:
        """Give up the windows of the step before. Returns where each of these rows leaves the states behind
        its tokens, by slot."""
        if self._windows or verifying:
            held = set(self.at)
            free = (state for state in range(self.count) if state not in held)
            self._windows = {
                row.slot: [self.at[row.slot], *(next(free) for _ in range(row.length - 1))]
                for row in verifying
            }
        return self._windows

    def select(self, slot: int, right: int) -> None:
        """Let a slot whose row verified go on behind so many right drafts."""
        self.at[slot] = self._windows[slot][right]

    def _before(self, slot: int, back: int) -> int:
        """The state that a slot had so many tokens before its own, if that is there still."""
        if not back:
            return self.at[slot]
        passed = self._windows[slot]
        own = passed.index(self.at[slot])
        assert back <= own, f"slot {slot} was not {back} tokens before in its last row"
        return passed[own - back]

    def copy(self, saved: Sequence[Saved], restored: Sequence[Restored]) -> None:
        """Copy states from slots to places, then from places to slots."""
        if saved:
            moves = [(self._before(slot, back), place) for slot, place, back in saved]
            self._copy(self._own, self._kept, moves)
        if restored:
            self._copy(self._kept, self._own, [(place, self.at[slot]) for place, slot in restored])

    def _copy(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Sequence[tuple[int, int]]
    ) -> None:
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
            self.copy([(0, 0, 0)], [(0, 0)])
            if self._kept[0].is_cuda:
                torch.cuda.synchronize()
            rounds.append(time.perf_counter() - started_s)
        return min(rounds) / 2

    def begin(self, rows: Sequence[Row]) -> None:
        """Clear the states of those rows that begin at position 0 (first rule)."""
        for at in (self.at[row.slot] for row in rows if not row.start):
            for state in self._own:
                state[at].zero_()
