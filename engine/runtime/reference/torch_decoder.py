"""The dense decoder in torch: the reference, which follows every piece of a description
(`engine.runtime.models.spec`).

    x += post(output(attention(rotate(norm(q)), rotate(norm(k)), v)))     q, k, v = qkv(norm(x))
    x += post(down(act(gate) * up))                                       gate, up = gate_up(norm(x))

A family has some of these norms, and may have delta nets instead of attention (`delta_net`). Tokens are
packed: T is the sum over all rows of the step. The attention knows the step: which keys a token sees, and
where keys and values lie.

A tensor-parallel rank computes the same with its own heads and its part of the MLP; the results of `output`
and `down` are added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.models import spec
from engine.runtime.models.pieces import EVERYWHERE, lacking
from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet, Rope, Tempering
from engine.runtime.reference.delta_net import StepStates, TorchDeltaNet
from engine.runtime.reference.exact import sigmoid, silu
from engine.runtime.reference.layers import PackedLinear, layer_norm, rms_norm, rotate
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.parameters import (
    DeltaWeights,
    Matrix,
    Vector,
    final_norm,
    layer_parameters,
    read_embedding,
    read_lm_head,
)

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
NORMS: Final[Mapping[str, Callable[[Tensor, Tensor | None, float], Tensor]]] = {
    "rms": rms_norm,
    "layer": layer_norm,
}
IMPLEMENTED: Final = EVERYWHERE | {"norm.kind layer", "layer.norms parallel"}
"""The pieces of models that the code below follows."""
Angles = tuple[Tensor, Tensor]


class StepAttention(Protocol):
    """Attention, bound to one step's rows and to the KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, Hkv, D] -> the attention of q [T, H, D], in q's shape."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: spec.Layer
    """The layer as this rank computes it."""
    matrices: Mapping[Matrix, PackedLinear]
    norms: Mapping[Vector, Tensor]
    qk_norm: Tensor | None
    """[H + Hkv, D]: the query heads' weight, then the key heads', so that one multiplication does both."""
    place: int
    """Its number among the layers with keys and values, or among those with a state."""
    delta: TorchDeltaNet | None


class TorchLayers:
    """The weights of a decoder's layers and of its last norm, without state between calls. H and Hkv count
    the rank's own heads."""

    def __init__(self, config: DecoderSpec, source: WeightSource, ranks: Collective = ALONE) -> None:
        """`config` describes the whole model; the rank's part of it is read."""
        self.ranks: Final = ranks
        self.config: Final = ranks.shard.of(config)
        """The model as this rank computes it."""
        self._is_exact: Final = bool(config.deltas)
        """True if a token's result has the same bits in any company (`engine.runtime.reference.exact`)."""
        self._rotary = {rope: Rotary(rope, config.head_dim, config.context_len) for rope in config.ropes}
        self._layers = [self._load(config, source, index) for index in range(len(config.layers))]
        self._norm_of = NORMS[config.norm.kind]
        self._norm = final_norm(config).read(source)

    def through(
        self, x: Tensor, positions: Tensor, attention: StepAttention, states: StepStates | None = None
    ) -> Tensor:
        """x [T, hidden] and positions [T] -> final hidden states [T, hidden], normed. `states`: of a model
        that has them."""
        angles = {rope: own.angles(positions, x.dtype) for rope, own in self._rotary.items()}
        for layer in self._layers:
            normed = self._normed(layer, Vector.ATTENTION_NORM, x)
            if layer.delta is not None:
                assert states is not None
                mixed = layer.delta(layer.matrices[Matrix.DELTA](normed), states, layer.place)
            else:
                mixed = self._attended(layer, normed, angles, positions, attention)
            x = self._added(layer, x, layer.matrices[Matrix.OUTPUT](mixed), Vector.ATTENTION_POST_NORM)
            if layer.spec.norms != "parallel":
                normed = self._normed(layer, Vector.MLP_NORM, x)
            inner = layer.matrices[Matrix.GATE_UP](normed)
            x = self._added(
                layer,
                x,
                layer.matrices[Matrix.DOWN](self._activated(layer.spec.mlp, inner)),
                Vector.MLP_POST_NORM,
            )
        return self._norm_of(x, self._norm, self.config.norm.eps)

    def first_keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> the keys and values [T, Hkv, D] of the first layer, which attends."""
        layer = self._layers[0]
        own = layer.spec.attention
        assert isinstance(own, Attention)
        angles = {own.rope: self._rotary[own.rope].angles(positions, x.dtype)}
        _, k, v, _ = self._qkv(layer, own, self._normed(layer, Vector.ATTENTION_NORM, x), angles)
        return k, v

    def _normed(self, layer: _Layer, role: Vector, x: Tensor) -> Tensor:
        return self._norm_of(x, layer.norms[role], self.config.norm.eps) if role in layer.norms else x

    def _added(self, layer: _Layer, x: Tensor, change: Tensor, role: Vector) -> Tensor:
        """The residual with a block's output, which all ranks have a part of, added."""
        change = self._normed(layer, role, self.ranks.all_reduce_(change))
        scale = self.config.residual_scale
        return x + (change if scale == 1.0 else change * scale)

    def _attended(
        self,
        layer: _Layer,
        x: Tensor,
        angles: Mapping[Rope | None, Angles],
        positions: Tensor,
        attention: StepAttention,
    ) -> Tensor:
        """x [T, hidden] -> [T, H * D]"""
        own = layer.spec.attention
        assert isinstance(own, Attention)
        q, k, v, gate = self._qkv(layer, own, x, angles)
        if own.tempering is not None:
            q = q * tempers(own.tempering, positions).to(q.dtype)
        attended = attention(layer.place, q, k, v)
        if own.output_gate:
            attended = attended * sigmoid(gate).to(x.dtype)
        return attended.flatten(1)

    def _qkv(
        self, layer: _Layer, own: Attention, x: Tensor, angles: Mapping[Rope | None, Angles]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q [T, H, D], k and v [T, Hkv, D], the gate as q, or nothing; q and k rotated."""
        by_head = layer.matrices[Matrix.QKV](x).view(len(x), -1, own.head_dim)
        qk, v, gate = by_head.tensor_split([own.heads + own.kv_heads, own.heads + 2 * own.kv_heads], dim=1)
        if own.qk_norm == "width":
            qk = torch.cat([self._normed_wide(part) for part in qk.tensor_split([own.heads], dim=1)], dim=1)
            assert layer.qk_norm is not None
            qk = (qk * layer.qk_norm).to(x.dtype)
        elif own.qk_norm == "heads":
            qk = self._normed_heads(qk, layer.qk_norm)
        if own.rope is not None:
            qk = rotate(qk, angles[own.rope])
        if own.qk_norm == "rotated heads":
            qk = self._normed_heads(qk, layer.qk_norm)
        q, k = qk.tensor_split([own.heads], dim=1)
        return q, k, v, gate

    def _normed_heads(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        exact = heads if weight.dtype == heads.dtype else heads.float()
        return (self._norm_of(exact, None, self.config.norm.eps) * weight).to(heads.dtype)

    def _normed_wide(self, heads: Tensor) -> Tensor:
        """heads [T, any, D], float32, by the mean square over those of all ranks."""
        exact = heads.float()
        squares = self.ranks.all_reduce_(exact.square().sum(dim=(1, 2), keepdim=True))
        count = heads.shape[1] * heads.shape[2] * self.ranks.shard.size
        return exact * torch.rsqrt(squares / count + self.config.norm.eps)

    def _load(self, config: DecoderSpec, source: WeightSource, index: int) -> _Layer:
        own, share = layer_parameters(config, index, self.ranks.shard), self.config.layers[index]
        matrices = {
            role: PackedLinear(*each.read(source), exact=self._is_exact)
            for role, each in own.matrices.items()
        }
        norms = {role: each.read(source) for role, each in own.vectors.items()}
        attention, place = share.attention, config.places[index]
        if isinstance(attention, DeltaNet):
            delta = TorchDeltaNet(attention, DeltaWeights.of(norms), config.norm.eps)
            return _Layer(share, matrices, norms, None, place, delta)
        qk_norm = norms.pop(Vector.QK_NORM, None)
        if qk_norm is not None and attention.qk_norm != "width":
            of_query, of_key = qk_norm.view(2, -1)
            heads = of_query.expand(attention.heads, -1), of_key.expand(attention.kv_heads, -1)
            qk_norm = torch.cat(heads)
        by_head = None if qk_norm is None else qk_norm.view(-1, attention.head_dim)
        return _Layer(share, matrices, norms, by_head, place, None)

    def _activated(self, mlp: spec.Mlp, x: Tensor) -> Tensor:
        act = silu if self._is_exact and mlp.act == "silu" else ACTIVATIONS[mlp.act]
        if not mlp.gated:
            return act(x)
        gate, up = x.chunk(2, dim=-1)
        return act(gate) * up


class TorchDecoder(TorchLayers):
    """The weights and the forward pass, without state between calls."""

    def __init__(self, config: DecoderSpec, source: WeightSource, ranks: Collective = ALONE) -> None:
        """`config` describes the whole model; the rank's part of it is read."""
        assert self.implements(config) is None
        super().__init__(config, source, ranks)
        self.embedding: Final = read_embedding(config, source)
        # Tied weights are kept twice on CPU, once to look rows up and once laid out for the multiplication.
        head = read_lm_head(config, source, ranks.shard, self.embedding)
        self._lm_head = PackedLinear(head, exact=self._is_exact)

    @staticmethod
    def implements(config: DecoderSpec) -> str | None:
        """Why this network does not compute the model, whatever its sizes; None where it does."""
        return lacking(config, IMPLEMENTED)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: StepAttention,
        states: StepStates | None = None,
    ) -> Tensor:
        """token_ids and positions [T] -> final hidden states [T, hidden], normed. `states`: of a model that
        has them."""
        x = F.embedding(token_ids, self.embedding)
        if self.config.embed_scale != 1.0:
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype, device=x.device)
        return self.through(x, positions, attention, states)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab], float32."""
        config = self.config
        logits = self.ranks.all_gather(self._lm_head(hidden))[:, : config.vocab_size].float()
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        cap = config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


def tempers(tempering: Tempering, positions: Tensor) -> Tensor:
    """The factors of queries at these positions, [T, 1, 1] float32."""
    periods = (positions // tempering.original_context_len).float()
    return (1 + tempering.beta * torch.log1p(periods))[:, None, None]
