"""ERNIE 4.5, its dense models: Llama with a rope of neighbours, and one switch for all biases."""

from __future__ import annotations

from typing import ClassVar

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import DecoderSpec


class ErnieKeys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    tie_word_embeddings: bool = True
    use_bias: bool | None = False

    rope_rules: ClassVar[RopeRules] = RopeRules(theta=500_000.0, interleaved=True)


def describe(hf: ErnieKeys) -> DecoderSpec:
    bias = bool(hf.use_bias)
    layers = hf.layers(mlp=hf.mlp(bias=bias), bias=bias, out_bias=bias)
    return hf.decoder("Ernie4_5ForCausalLM", layers)


FAMILY = Family("ernie4_5", "Ernie4_5ForCausalLM", ErnieKeys, describe)
