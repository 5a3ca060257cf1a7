"""Llama 2 and 3.x, and the many models that are published under its name (MiniCPM5, InternLM3, Yi, ...)."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec


class LlamaKeys(DenseKeys, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


def describe(hf: LlamaKeys) -> DecoderSpec:
    return hf.decoder("LlamaForCausalLM", hf.layers())


FAMILY = Family("llama", "LlamaForCausalLM", LlamaKeys, describe)
