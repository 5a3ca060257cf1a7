"""The dense decoder in torch: Llama, Mistral, Qwen2 and Qwen3 differ only in the settings of their
DecoderConfig.

    x += output(attention(rotate(norm(q)), rotate(norm(k)), v))     q, k, v = qkv(rms_norm(x))
    x += down(silu(gate) * up)                                      gate, up = gate_up(rms_norm(x))

Tokens are packed: T is the sum over all rows of the step. The attention knows the step: which keys a token
sees, and where keys and values lie.

A tensor-parallel rank computes the same with its own heads and its part of the MLP; the results of `output`
and `down` are added up over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.collective.shard import Shard
from engine.runtime.host.layers import PackedLinear, rms_norm, rotate
from engine.runtime.models.decoder_config import DecoderConfig
from engine.runtime.models.features import lacking
from engine.runtime.models.rotary import Rotary
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.parameters import EMBEDDING, FINAL_NORM, LayerParameters, read_lm_head

IMPLEMENTED: Final = frozenset(
    {f"architecture {name}ForCausalLM" for name in ("Llama", "Ministral", "Mistral", "Qwen2", "Qwen3")}
    | {"activation silu", "norm rms", "rope.llama3", "windows", "tied_embeddings", "fp8"}
    | {"qkv_bias", "output_bias", "mlp_bias", "qk_norm"}
)
"""The features of models (`engine.runtime.models.features`) that the code below follows."""


class StepAttention(Protocol):
    """Attention, bound to one step's rows and to the KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [T, Hkv, D] -> the attention of q [T, H, D], in q's shape."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear
    qk_norm: Tensor | None
    """[H + Hkv, D]: the query heads' weight, then the key heads', so that one multiplication does both."""
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class TorchDecoder:
    """The weights and the forward pass, without state between calls. H and Hkv count the rank's own heads."""

    def __init__(self, config: DecoderConfig, source: WeightSource, ranks: Collective = ALONE) -> None:
        """`config` describes the whole model; the rank's part of it is read."""
        assert self.implements(config) is None
        self.ranks: Final = ranks
        self._config = ranks.shard.of(config)
        self._rotary = Rotary(config.rope, config.head_dim)
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = source.stack([EMBEDDING], [vocab], hidden)
        self._layers = [_load_layer(config, source, layer, ranks.shard) for layer in range(config.layers)]
        self._norm = source.stack([FINAL_NORM], [hidden])
        # Tied weights are kept twice on CPU, once to look rows up and once laid out for the multiplication.
        self._lm_head = PackedLinear(read_lm_head(config, source, ranks.shard, self._embedding))

    @staticmethod
    def implements(config: DecoderConfig) -> str | None:
        """Why this network does not compute the model, whatever its sizes; None where it does."""
        return lacking(config, IMPLEMENTED)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """token_ids and positions [T] -> final hidden states [T, hidden], normed."""
        eps = self._config.norm_eps
        x = F.embedding(token_ids, self._embedding)
        angles = self._rotary.angles(positions, x.dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, rms_norm(x, layer.input_norm, eps), angles)
            x = x + self.ranks.all_reduce_(layer.output(attention(index, q, k, v).flatten(1)))
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x = x + self.ranks.all_reduce_(layer.down(F.silu(gate) * up))
        return rms_norm(x, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab], float32."""
        return self.ranks.all_gather(self._lm_head(hidden))[:, : self._config.vocab_size].float()

    def _qkv(self, layer: _Layer, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q [T, H, D], k and v [T, Hkv, D]; q and k rotated."""
        heads, kv_heads = self._config.heads, self._config.kv_heads
        by_head = layer.qkv(x).view(len(x), -1, self._config.head_dim)
        qk, v = by_head.tensor_split([heads + kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = rms_norm(qk, None, self._config.norm_eps) * layer.qk_norm
        q, k = rotate(qk, angles).tensor_split([heads], dim=1)
        return q, k, v


def _load_layer(config: DecoderConfig, source: WeightSource, layer: int, shard: Shard) -> _Layer:
    own, share = LayerParameters(config, layer, shard), shard.of(config)

    def qk_norm() -> Tensor:
        of_query, of_key = own.qk_norm(source)
        return torch.cat((of_query.expand(share.heads, -1), of_key.expand(share.kv_heads, -1)))

    return _Layer(
        input_norm=own.input_norm(source),
        qkv=PackedLinear(*own.qkv.read(source)),
        qk_norm=qk_norm() if config.qk_norm else None,
        output=PackedLinear(*own.output.read(source)),
        mlp_norm=own.mlp_norm(source),
        gate_up=PackedLinear(*own.gate_up.read(source)),
        down=PackedLinear(*own.down.read(source)),
    )
