"""Seed-OSS: Llama with a switch for the bias of each matrix."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec, Layer


class SeedOssKeys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


def describe(hf: SeedOssKeys) -> DecoderSpec:
    def layer(kind: str) -> Layer:
        attention = hf.attention(kind, bias=hf.attention_bias, out_bias=hf.attention_out_bias)
        return Layer(attention, hf.mlp(bias=hf.mlp_bias))

    return hf.decoder("SeedOssForCausalLM", map(layer, hf.kinds))


FAMILY = Family("seed_oss", "SeedOssForCausalLM", SeedOssKeys, describe)
