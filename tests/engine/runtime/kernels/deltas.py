"""Delta nets that kernels are checked with, on whatever device they run: rows over states, and torch's
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engine.runtime.kernels.delta_net import CHUNK, DeltaLayer, DeltaRows, delta_chunks, delta_step
from engine.runtime.models.spec import DeltaNet
from engine.runtime.reference.delta_net import StepStates, TorchDeltaNet
from engine.runtime.step.batch import Row
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
    """Rows of one token, and then rows of many. Slots that no row has, and all that rows from position 0 on
    find, are NaN."""

    net: DeltaNet
    rows: Sequence[Row]
    decode_rows: int
    x: Tensor
    weights: DeltaWeights
    heads: Tensor
    inputs: Tensor

    def expected(self) -> Found:
        """By torch, token by token, in float32 on the CPU."""
        states = States(StateGeometry((self.net,), torch.float32), len(self.heads))
        states.heads[0].copy_(self.heads)
        states.inputs[0].copy_(self.inputs)
        weights = self.weights
        layer = TorchDeltaNet(self.net, weights, EPS)
        out = layer(self.x.float(), StepStates(states, self.rows, self.decode_rows), 0)
        return Found(out, states.heads[0], states.inputs[0])

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
        layer, count = DeltaLayer(self.net, weights, EPS), self.decode_rows
        out = x.new_full((len(x), self.net.values), torch.nan)
        if count:
            slots = torch.tensor([row.slot for row in self.rows[:count]], dtype=torch.int32, device=device)
            lengths = torch.tensor([row.end for row in self.rows[:count]], dtype=torch.int32, device=device)
            delta_step(x, slots, lengths, layer, inputs, heads, out)
        if rows := self.rows[count:]:
            delta_chunks(x, DeltaRows.of(rows, device, size), layer, inputs, heads, out, size=size)
        return Found(out, heads, inputs)


def delta_case(
    net: DeltaNet,
    rows: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    alike: float = 0.0,
    seed: int = 0,
) -> DeltaCase:
    """`rows`: first position and tokens of each. `alike`: the share of every token's inputs that is the
    same."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    slots = torch.randperm(len(rows) + 2, generator=generator).tolist()
    listed, offset = [], 0
    for slot, (start, length) in zip(slots, rows, strict=False):
        listed.append(Row(slot, start, length, offset))
        offset += length
    width = net.channels + net.values + 2 * net.value_heads
    x = ((1 - alike) * drawn(offset, width) + alike * drawn(1, width)).to(dtype)
    heads = drawn(len(slots), net.value_heads, net.key_dim, net.value_dim) * 0.3
    inputs = drawn(len(slots), net.kernel - 1, net.channels).to(dtype)
    fresh = {row.slot for row in listed if not row.start} | set(slots[len(listed) :])
    for states in (heads, inputs):
        states[list(fresh)] = torch.nan
    weights = DeltaWeights(
        drawn(net.kernel, net.channels) * 0.5,
        drawn(net.value_heads).exp(),
        drawn(net.value_heads),
        1 + drawn(net.value_dim) * 0.2,
    )
    count = next((at for at, (_, length) in enumerate(rows) if length > 1), len(rows))
    return DeltaCase(net, listed, count, x, weights, heads, inputs)
