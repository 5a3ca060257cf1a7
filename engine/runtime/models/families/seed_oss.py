"""Seed-OSS: Llama with a switch for the bias of each matrix."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys


class SeedOssKeys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False

    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"
