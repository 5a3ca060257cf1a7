"""Delta nets that kernels are checked with, on whatever device they run: rows over states, and torch's
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engine.runtime.device.graphs import Drafted
from engine.runtime.kernels.delta_net import (
    CHUNK,
    Cells,
    DeltaLayer,
    DeltaRows,
    delta_chunks,
    delta_step,
    turn_windows,
)
from engine.runtime.models.spec import DeltaNet
from engine.runtime.reference.delta_net import StepStates, TorchDeltaNet
from engine.runtime.step.batch import Row
from engine.runtime.step.protocols import Ahead
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.parameters import DeltaWeights

EPS = 1e-6
SMALL = DeltaNet(key_heads=1, value_heads=2, key_dim=16, value_dim=32, kernel=4)
"""With its own sizes of keys and values, and two value heads of one key head."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a step leaves."""

    out: Tensor
    heads: Tensor
    inputs: Tensor


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """Rows of one token, then rows that verify, and then rows of many. Slots that no row has, and all that
    rows from position 0 on find, are NaN."""

    net: DeltaNet
    rows: Sequence[Row]
    decode_rows: int
    x: Tensor
    weights: DeltaWeights
    heads: Tensor
    inputs: Tensor
    verifying: int = 0
    order: Sequence[int] = ()
    """The state in each cell; empty: that of its number."""

    @property
    def drafts(self) -> list[int]:
        """Of the rows that decode or verify."""
        return [row.length - 1 for row in self.rows[: self.decode_rows + self.verifying]]

    def states(self) -> States:
        """A CPU's, with the rows' windows open."""
        windows = sum(self.drafts)
        states = States(StateGeometry((self.net,), torch.float32), len(self.heads) - windows, windows=windows)
        states.heads[0].copy_(self.heads)
        states.inputs[0].copy_(self.inputs)
        states.at[:] = self.order or states.at
        return states

    def expected(self) -> Found:
        """By torch, token by token, in float32 on the CPU."""
        states = self.states()
        windows = states.open(self.rows[self.decode_rows : self.decode_rows + self.verifying])
        weights = self.weights
        layer = TorchDeltaNet(self.net, weights, EPS)
        out = layer(self.x.float(), StepStates(states, self.rows, self.decode_rows, windows=windows), 0)
        return Found(out, states.heads[0], states.inputs[0])

    def ahead(self, device: torch.device) -> Ahead:
        drafts = self.drafts
        before = [at for own in drafts for at in range(own + 1)]
        behind = [own - at for own in drafts for at in range(own + 1)]
        columns = Drafted(before, behind, before).columns
        first, last, masked, windows = (
            torch.tensor(column, dtype=torch.int32, device=device) for column in columns
        )
        return Ahead(first, last, masked, max(drafts) + 1, windows)

    def turned(self, right: Sequence[int], device: torch.device) -> tuple[list[int], list[int]]:
        """The states in all cells once so many drafts of the rows that verify are right: by the kernel, and
        on a CPU."""
        states, rows = self.states(), self.rows[self.decode_rows : self.decode_rows + self.verifying]
        states.open(rows)
        for row, own in zip(rows, right, strict=True):
            states.select(row.slot, own)
        counts = [0] * self.decode_rows + list(right)
        agreed = [
            int(at != own)  # what is behind a wrong one may agree again
            for own, drafts in zip(counts, self.drafts, strict=True)
            for at in range(drafts + 1)
        ]
        slots = [row.slot for row, own in zip(self.rows, self.drafts, strict=False) for _ in range(own + 1)]
        placed = (torch.tensor(own, dtype=torch.int32, device=device) for own in (slots, agreed, self.order))
        token_slots, agreed_there, order = placed
        turn_windows(token_slots, self.ahead(device), agreed_there, Cells(order, states.slots))
        return order.tolist(), states.at

    def in_two(self, first: int, device: torch.device, size: int = CHUNK) -> Found:
        """The case's only row in two steps, the first of so many tokens."""
        (row,) = self.rows
        begin = replace(self, rows=[Row(row.slot, row.start, first, 0)], x=self.x[:first])
        left = begin.found(device, size)
        rest = [Row(row.slot, row.start + first, row.length - first, 0)]
        kept = replace(self, heads=left.heads, inputs=left.inputs)
        found = replace(kept, rows=rest, x=self.x[first:]).found(device, size)
        return replace(found, out=torch.cat((left.out, found.out)))

    def found(self, device: torch.device, size: int = CHUNK) -> Found:
        """By the kernels. `size`: tokens of a chunk."""
        x, heads, inputs = (t.to(device, copy=True) for t in (self.x, self.heads, self.inputs))
        weights = DeltaWeights(*(getattr(self.weights, own.name).to(device) for own in fields(DeltaWeights)))
        layer, count = DeltaLayer(self.net, weights, EPS), self.decode_rows + self.verifying
        out = x.new_full((len(x), self.net.values), torch.nan)
        cells = ahead = None
        if self.order:
            order = torch.tensor(self.order, dtype=torch.int32, device=device)
            cells = Cells(order, len(self.heads) - sum(self.drafts))
            ahead = self.ahead(device) if self.verifying else None
        if count:
            tokens = [(row.slot, row.start + at + 1) for row in self.rows[:count] for at in range(row.length)]
            slots, lengths = torch.tensor(tokens, dtype=torch.int32, device=device).T.contiguous()
            delta_step(x, slots, lengths, layer, inputs, heads, out, cells, ahead)
        if rows := self.rows[count:]:
            table = DeltaRows.of(rows, device, size, None if cells is None else cells.order)
            delta_chunks(x, table, layer, inputs, heads, out, size=size)
        return Found(out, heads, inputs)


def delta_case(
    net: DeltaNet,
    rows: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    alike: float = 0.0,
    seed: int = 0,
    verifying: int = 0,
) -> DeltaCase:
    """`rows`: first position and tokens of each. `alike`: the share of every token's inputs that is the
    same. `verifying`: so many rows behind those of one token verify drafts; states lie in cells then, in some
    order."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    slots = torch.randperm(len(rows) + 2, generator=generator).tolist()
    listed, offset = [], 0
    for slot, (start, length) in zip(slots, rows, strict=False):
        listed.append(Row(slot, start, length, offset))
        offset += length
    count = next((at for at, (_, length) in enumerate(rows) if length > 1), len(rows))
    windows = sum(length - 1 for _, length in rows[count : count + verifying])
    cells = len(slots) + windows
    order = torch.randperm(cells, generator=generator).tolist() if verifying else []
    width = net.channels + net.values + 2 * net.value_heads
    x = ((1 - alike) * drawn(offset, width) + alike * drawn(1, width)).to(dtype)
    heads = drawn(cells, net.value_heads, net.key_dim, net.value_dim) * 0.3
    inputs = drawn(cells, net.kernel - 1, net.channels).to(dtype)
    fresh = {row.slot for row in listed if not row.start} | set(slots[len(listed) :])
    fresh |= set(range(len(slots), cells))
    for states in (heads, inputs):
        states[[order[cell] if order else cell for cell in fresh]] = torch.nan
    weights = DeltaWeights(
        drawn(net.kernel, net.channels) * 0.5,
        drawn(net.value_heads).exp(),
        drawn(net.value_heads),
        1 + drawn(net.value_dim) * 0.2,
    )
    return DeltaCase(net, listed, count, x, weights, heads, inputs, verifying, order)
