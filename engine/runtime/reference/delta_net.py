"""The gated delta net (Yang et al. 2025) in torch: the reference, in the recurrent form.

    q, k, v = silu(convolved(inputs))              each channel by itself, over its latest tokens
    S = S * exp(-rate * softplus(a + step bias))   the head forgets, for each token anew
    S = S + k (sigmoid(b) * (v - S^T k))^T         then the state gives v for k
    output = norm(S^T q) * silu(z)                 q and k of length one, and q over sqrt(key_dim)

S [key_dim, value_dim] is a value head's state, in float32. Tokens are computed one after the other, whatever
the step, so that all chunks of a prompt and all batches have the same sums in the same order (`exact`). The
chunked form would be faster, and have other bits where a chunk begins elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.models.spec import DeltaNet
from engine.runtime.reference.exact import sigmoid, silu, softplus
from engine.runtime.step.batch import Row
from engine.runtime.step.protocols import Ahead
from engine.runtime.step.states import States
from engine.runtime.weights.parameters import DeltaWeights

LENGTH_EPS: Final = 1e-6
"""The summand of squares of queries and keys before they are divided by their length."""


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states, bound to a step's rows."""

    states: States
    rows: Sequence[Row]
    decode_rows: int
    """The rows at the start that have one token each, and are computed together."""
    slots: Tensor | None = None
    """The slots of those rows, [decode_rows] int32, on a device, which alone may know them: then `rows` may
    lack them, and no state is cleared here. None: `rows` has them."""
    lengths: Tensor | None = None
    """The tokens of those rows, the new one included, [decode_rows] int32, beside `slots`."""
    windows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Where rows that verify leave the states behind their tokens, by slot."""
    ahead: Ahead | None = None
    """Beside `slots`: of tokens of which some are drafts. Each is one of `decode_rows` then, and `rows` are
    those behind them alone."""

    def __post_init__(self) -> None:
        if self.slots is None:
            self.states.begin(self.rows)

    @property
    def chunks(self) -> Sequence[Row]:
        """The rows behind those of one token."""
        return self.rows if self.ahead is not None else self.rows[self.decode_rows :]

    @property
    def places(self) -> Tensor | list[int]:
        """The slots of the rows of one token, as an index."""
        if self.slots is not None:
            return self.slots.long()
        return [self.states.at[row.slot] for row in self.rows[: self.decode_rows]]

    def left(self, row: Row) -> Iterator[tuple[int, int]]:
        """The states that a row of several tokens leaves, behind so many of its tokens, and where."""
        windows = self.windows.get(row.slot)
        if windows is None:
            yield row.length, self.states.at[row.slot]
        else:
            yield from enumerate(windows, 1)

    def before(self, kept: Tensor) -> Tensor:
        """A copy of the states that the rows of one token find."""
        found = kept[self.places]
        if self.lengths is None:
            return found
        return torch.where(self.lengths.view(-1, *[1] * (found.ndim - 1)) > 1, found, 0)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The inputs of the recurrence, of the same tokens: q and k [T, Hv, Dk], v [T, Hv, Dv], the others [T,
    Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    kept: Tensor
    """The factor of the state before."""
    strength: Tensor

    def step(self, state: Tensor, at: slice) -> Tensor:
        """The outputs [t, Hv, Dv] of t tokens of as many sequences; `state` [t, Hv, Dk, Dv] becomes
        theirs."""
        k = self.k[at, ..., None]
        state *= self.kept[at, :, None, None]
        change = (self.v[at] - (state * k).sum(-2)) * self.strength[at, :, None]
        state += k * change[:, :, None]
        return (state * self.q[at, ..., None]).sum(-2)


@dataclass(frozen=True, slots=True)
class TorchDeltaNet:
    """One layer's parameters, as a rank holds them."""

    spec: DeltaNet
    weights: DeltaWeights
    eps: float

    def __call__(self, x: Tensor, step: StepStates, place: int) -> Tensor:
        """The inputs of all tokens, [T, any] -> [T, Hv * Dv]. `place`: the layer's, among those with
        states."""
        own = self.spec
        mixed, z, b, a = x.split([own.channels, own.values, own.value_heads, own.value_heads], dim=1)
        convolved = silu(self._convolved(mixed, step, step.states.inputs[place]).to(x.dtype)).float()
        q, k, v = convolved.split([own.keys, own.keys, own.values], dim=1)
        shared = own.value_heads // own.key_heads
        q, k = (_of_length_one(part.view(len(x), -1, own.key_dim)) for part in (q, k))
        q, k = (part.repeat_interleave(shared, dim=1) for part in (q / own.key_dim**0.5, k))
        kept = (-self.weights.rate * softplus(a.float() + self.weights.step_bias)).exp()
        v = v.reshape(len(x), own.value_heads, own.value_dim)
        out = _recurred(_Tokens(q, k, v, kept, sigmoid(b)), step, step.states.heads[place])
        normed = F.rms_norm(out.to(x.dtype).float(), (own.value_dim,), None, self.eps).to(x.dtype)
        normed = (normed.float() * self.weights.norm).to(x.dtype)
        gate = silu(z.float()).view(normed.shape)
        return (normed.float() * gate).to(x.dtype).flatten(1)

    def _convolved(self, mixed: Tensor, step: StepStates, inputs: Tensor) -> Tensor:
        """mixed [T, channels] -> the same shape, float32. `inputs` goes on to the rows' last tokens."""
        out = torch.empty(mixed.shape, device=mixed.device)
        if count := step.decode_rows:
            known = torch.cat((step.before(inputs), mixed[:count, None]), 1)
            inputs[step.places] = known[:, 1:]
            out[:count] = self._summed(known.transpose(0, 1), 1)[0]
        for row in step.chunks:
            own = slice(row.offset, row.offset + row.length)
            known = torch.cat((inputs[step.states.at[row.slot]], mixed[own]))
            for count, place in step.left(row):
                inputs[place] = known[count : count + self.spec.kernel - 1]
            out[own] = self._summed(known, row.length)
        return out

    def _summed(self, known: Tensor, count: int) -> Tensor:
        """The convolution of the last `count` of known inputs, [tokens, ..., channels]."""
        taps = (known[at : at + count].float() * self.weights.conv[at] for at in range(self.spec.kernel))
        total = next(taps)
        for tap in taps:
            total = total + tap
        return total


def _recurred(tokens: _Tokens, step: StepStates, heads: Tensor) -> Tensor:
    """[T, Hv, Dv]. The states of the rows' slots go on to their last tokens."""
    out = torch.empty_like(tokens.v)
    if count := step.decode_rows:
        state = step.before(heads)
        out[:count] = tokens.step(state, slice(count))
        heads[step.places] = state
    for row in step.chunks:
        done, state = 0, heads[step.states.at[row.slot]][None].clone()
        for count, place in step.left(row):
            for at in range(row.offset + done, row.offset + count):
                out[at] = tokens.step(state, slice(at, at + 1))[0]
            heads[place], done = state[0], count
    return out


def _of_length_one(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + LENGTH_EPS)
