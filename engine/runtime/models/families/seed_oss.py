"""Seed-OSS: Llama with a switch for the bias of each matrix."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec


class SeedOssKeys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


def describe(hf: SeedOssKeys) -> DecoderSpec:
    return hf.decoder("SeedOssForCausalLM", hf.layers(out_bias=hf.attention_out_bias))


FAMILY = Family("seed_oss", "SeedOssForCausalLM", SeedOssKeys, describe)
