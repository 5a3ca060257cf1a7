"""Llama 2 and 3.x, and the many models that are published under its name (MiniCPM5, InternLM3, Yi, ...)."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys


class LlamaKeys(DenseKeys, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False

    model_type = "llama"
    architecture = "LlamaForCausalLM"
