"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 are this page with different declarations.

    x += output(attention(rotate(norm(q)), rotate(norm(k)), v))     q, k, v = qkv(rms_norm(x))
    x += down(silu(gate) * up)                                      gate, up = gate_up(rms_norm(x))

Tokens come packed: T is the sum over all rows of the step. What is particular to a step (which
token may see which, where keys and values lie) is the attention's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.layers import Linear, Rotary, rms_norm, rotate
from engine.runtime.models.config import ModelConfig
from engine.runtime.weights import WeightSource

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class StepAttention(Protocol):
    """Attention, bound to one step's rows and to the KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D]; k, v [T, Hkv, D], which are stored -> [T, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    """[H + Hkv, D]: the query heads' weight, then the key heads', so that one multiplication does both."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and forward pass. Stateless between calls."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        self._config = config
        self._rotary = Rotary(config.rope, config.head_dim)
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = source.stack([EMBEDDING], [vocab], hidden)
        self._layers = [_load_layer(config, source, layer) for layer in range(config.layers)]
        self._norm = source.stack(["model.norm.weight"], [hidden])
        # Tied weights are kept twice on CPU, once to look rows up and once laid out for the multiplication.
        tied = config.tied_embeddings
        self._lm_head = Linear(self._embedding if tied else source.stack([LM_HEAD], [vocab], hidden))

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """token_ids [T], positions [T] -> final hidden states [T, hidden], normed."""
        eps = self._config.norm_eps
        x = F.embedding(token_ids, self._embedding)
        angles = self._rotary.angles(positions, x.dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, rms_norm(x, layer.input_norm, eps), angles)
            x = x + layer.output(attention(index, q, k, v).flatten(1))
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return rms_norm(x, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab], float32."""
        return self._lm_head(hidden).float()

    def _qkv(self, layer: _Layer, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q [T, H, D], k and v [T, Hkv, D]; q and k rotated."""
        heads, kv_heads = self._config.heads, self._config.kv_heads
        by_head = layer.qkv(x).view(len(x), -1, self._config.head_dim)
        qk, v = by_head.tensor_split([heads + kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = rms_norm(qk, None, self._config.norm_eps) * layer.qk_norm
        q, k = rotate(qk, angles).tensor_split([heads], dim=1)
        return q, k, v


def _load_layer(config: ModelConfig, source: WeightSource, layer: int) -> _Layer:
    prefix = f"model.layers.{layer}"
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def linear(module: str, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Linear:
        paths = [f"{prefix}.{module}.{name}" for name in names]
        weight = source.stack([f"{path}.weight" for path in paths], rows, columns)
        return Linear(weight, source.stack([f"{path}.bias" for path in paths], rows) if bias else None)

    def qk_norm() -> Tensor:
        q = source.stack([f"{prefix}.self_attn.q_norm.weight"], [config.head_dim])
        k = source.stack([f"{prefix}.self_attn.k_norm.weight"], [config.head_dim])
        return torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))

    qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    return _Layer(
        input_norm=source.stack([f"{prefix}.input_layernorm.weight"], [hidden]),
        qkv=linear("self_attn", qkv, [q_rows, kv_rows, kv_rows], hidden, config.qkv_bias),
        qk_norm=qk_norm() if config.qk_norm else None,
        output=linear("self_attn", ("o_proj",), [hidden], q_rows, config.output_bias),
        mlp_norm=source.stack([f"{prefix}.post_attention_layernorm.weight"], [hidden]),
        gate_up=linear("mlp", gate_up, [inner, inner], hidden, config.mlp_bias),
        down=linear("mlp", ("down_proj",), [hidden], inner, config.mlp_bias),
    )
