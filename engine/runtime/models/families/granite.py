"""Granite 3: Llama with factors of embeddings, attention, residual and logits."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec


class GraniteKeys(DenseKeys, frozen=True, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    positives: ClassVar[tuple[str, ...]] = (
        *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    )

    @property
    def scale(self) -> float:
        return self.attention_multiplier

    @property
    def factors(self) -> dict[str, Any]:
        return {
            "embed_scale": self.embedding_multiplier,
            "residual_scale": self.residual_multiplier,
            "logit_scale": 1 / self.logits_scaling,
        }


def describe(hf: GraniteKeys) -> DecoderSpec:
    return hf.decoder("GraniteForCausalLM", hf.layers(), **hf.factors)


FAMILY = Family("granite", "GraniteForCausalLM", GraniteKeys, describe)
