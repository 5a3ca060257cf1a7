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
4. States lie in *cells*: a slot has one under its number, and behind those each draft of a step has one, a
   *window*. A row that verifies leaves the state behind its newest token in its slot's cell, and the one
   behind each draft in the draft's window. Once it is known how many are right, what the first of these cells
   have is turned round: the slot's has the state behind the last right draft then, and the windows those
   before it, the newest first. Only numbers move: no state is copied for it, and none is computed again. What
   the windows have stays until the next step computes, so that a plan may save what the slot has passed.
5. A CPU knows what is right when it has sampled, and the host has the numbers (`at`). On a device they lie
   there (`order`), and the step's last kernel turns them (`engine.runtime.kernels.delta_net.turn_windows`):
   the host knows which cells are whose, and need not know what is in them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import torch
from torch import Tensor

from engine.runtime.models.spec import DecoderSpec, DeltaNet
from engine.runtime.step.batch import Row
from engine.runtime.step.protocols import to_device

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
    are counted among those that have a state."""

    def __init__(
        self,
        geometry: StateGeometry,
        slots: int,
        device: torch.device | None = None,
        windows: int = 0,
        *,
        are_real: bool = True,
    ) -> None:
        """`device`: that of the states; None is torch's default. `windows`: the most drafts of a step.
        `are_real`: False: windows take no memory, and overwrite states of slots."""
        own, dtype, cells = geometry.layers, geometry.dtype, slots + windows
        states = cells if are_real else slots
        self.heads: Final = [
            torch.zeros(states, net.value_heads, net.key_dim, net.value_dim, device=device) for net in own
        ]
        self.inputs: Final = [
            torch.zeros(states, net.kernel - 1, net.channels, dtype=dtype, device=device) for net in own
        ]
        self.slots: Final = slots
        self.at: Final = [cell % states for cell in range(cells)]
        """The state in each cell, where the host knows it."""
        self.order: Final = (
            torch.tensor(self.at, dtype=torch.int32).to(device) if device is not None and windows else None
        )
        """The state in each cell on a device, [cells] int32. None: each state is in the cell of its
        number."""
        self._cells: dict[int, list[int]] = {}
        """The cells of the tokens of rows that verify in the step that computed last, by slot."""
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
        its tokens, by slot, as far as the host knows it."""
        if self._cells or verifying:
            window = count(self.slots)
            self._cells = {
                row.slot: [row.slot, *(next(window) for _ in range(row.length - 1))] for row in verifying
            }
        return {slot: [self.at[cell] for cell in cells] for slot, cells in self._cells.items()}

    def select(self, slot: int, right: int) -> None:
        """Let a slot whose row verified go on behind so many right drafts."""
        cells = self._cells[slot][: right + 1]
        for cell, state in zip(cells, [self.at[cell] for cell in reversed(cells)], strict=True):
            self.at[cell] = state

    def _cell(self, slot: int, back: int) -> int:
        """The cell of the state that a slot had so many tokens before its own: of those that it passed by
        right drafts in the step that computed last."""
        return self._cells[slot][back] if back else slot

    def copy(self, saved: Sequence[Saved], restored: Sequence[Restored]) -> None:
        """Copy states from slots to places, then from places to slots."""
        if saved:
            cells = [self._cell(slot, back) for slot, _, back in saved]
            self._copy(self._own, self._kept, self._in(cells), [place for _, place, _ in saved])
        if restored:
            cells = [slot for _, slot in restored]
            self._copy(self._kept, self._own, [place for place, _ in restored], self._in(cells))

    def _in(self, cells: Sequence[int]) -> Sequence[int] | Tensor:
        """The states in these cells, on the device where it alone knows them."""
        if self.order is None:
            return [self.at[cell] for cell in cells]
        return self.order[to_device(cells, self.order.device)]

    def _copy(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        taken: Sequence[int] | Tensor,
        left: Sequence[int] | Tensor,
    ) -> None:
        """Copy what lies at these numbers in each source to those in each target."""
        if self.order is not None:
            device = self.order.device
            at, to = (
                (own if isinstance(own, Tensor) else to_device(own, device)).long() for own in (taken, left)
            )
            for source, target in zip(sources, targets, strict=True):
                target.index_copy_(0, to, source.index_select(0, at))
            return
        layers = len(self.heads)
        for part in (slice(layers), slice(layers, None)):  # of one type each: few kernels copy all of them
            torch._foreach_copy_(
                [target[at] for target in targets[part] for at in left],
                [source[at] for source in sources[part] for at in taken],
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
