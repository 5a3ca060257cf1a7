"""The benched models, by shape alone: random weights, made on the device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.runtime.models.decoder_config import parse_model_config
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.step.states import StateGeometry
from engine.runtime.weights.checkpoint import ALL, TensorPart
from engine.runtime.weights.parameters import layer_parameters as parameters_of


def _model(model_type: str, **keys: Any) -> DecoderSpec:
    return parse_model_config(json.dumps({"model_type": model_type} | keys).encode())


LLAMA_8B = _model(
    "llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
)
QWEN3_06B = _model(
    "qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
)


QWEN3_5_08B = _model(
    "qwen3_5_text",
    vocab_size=248_320,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    max_position_embeddings=262_144,
    rms_norm_eps=1e-6,
    rope_theta=10_000_000.0,
    tie_word_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A WeightSource of normal numbers, small enough that activations stay finite."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def stack(
        self, names: Sequence[str], rows: Sequence[int], *columns: int, part: TensorPart = ALL
    ) -> Tensor:
        whole = torch.empty(part.shape(rows, columns), dtype=self.dtype, device=self.device)
        return whole.normal_(std=0.02) if columns else whole.fill_(1.0)


def layer_parameters(config: DecoderSpec) -> int:
    """The number of parameters in all layers' matrices, without the head."""
    layers = range(len(config.layers))
    return sum(own.elements for at in layers for own in parameters_of(config, at).matrices.values())


def head_parameters(config: DecoderSpec) -> int:
    return config.vocab_size * config.hidden_size


def kv_bytes(config: DecoderSpec, itemsize: int = 2) -> int:
    """Bytes of one token's keys and values, in all layers."""
    return 2 * len(config.attentions) * config.kv_heads * config.head_dim * itemsize


def state_bytes(config: DecoderSpec) -> int:
    """Bytes of one sequence's state, in all layers."""
    return StateGeometry.of(config, torch.bfloat16).slot_bytes


def decode_floor_s(
    config: DecoderSpec,
    batch: int,
    context: int,
    floors: tuple[float, float],
    weight_bytes: float = 2.0,
    kv_itemsize: int = 2,
    tokens: int = 1,
) -> float:
    """The least time of a decode step, by the package's formula. `weight_bytes`: bytes per parameter of the
    layers; the head is in bf16. `tokens`: those of each row, with the drafts that it verifies."""
    bandwidth, flops = floors
    layers, head = layer_parameters(config), head_parameters(config)
    reads = layers * weight_bytes + head * 2
    weights = max(reads / bandwidth, 2 * (layers + head) * batch * tokens / flops)
    kept = context * kv_bytes(config, kv_itemsize) + 2 * state_bytes(config)  # states are written, too
    return weights + batch * kept / bandwidth


def prefill_floor_s(config: DecoderSpec, tokens: int, flops: float) -> float:
    """The least time of one prompt with a causal mask; the head's single row is left out, and so is what
    delta nets compute between their products."""
    attention = 2 * config.heads * config.head_dim * len(config.attentions) * tokens
    return tokens * (2 * layer_parameters(config) + attention) / flops
