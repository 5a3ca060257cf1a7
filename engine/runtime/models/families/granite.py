"""Granite 3: Llama with factors of embeddings, attention, residual and logits."""

from __future__ import annotations

from typing import Any

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.spec import DecoderSpec


class GraniteKeys(DenseKeys, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    positives = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"

    @property
    def scale(self) -> float:
        return self.attention_multiplier

    def describe(self, **options: Any) -> DecoderSpec:
        scales = {"residual_scale": self.residual_multiplier, "logit_scale": 1 / self.logits_scaling}
        return super().describe(embed_scale=self.embedding_multiplier, **scales, **options)
