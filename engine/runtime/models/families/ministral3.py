"""Ministral 3: Mistral with YaRN, whose queries grow with their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.rope import RopeRules, UnsupportedRope, chosen, positive_number
from engine.runtime.models.spec import Attention, DeltaNet, Llama3, Rope, Tempering, Yarn

BETA = "llama_4_scaling_beta"
SILENT: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}  # where config.json is silent


class Ministral3Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"
    slides = True
    layers_alike = True
    rope_rules = RopeRules(also=(BETA, "max_position_embeddings"))

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        stated = super().rope_fields
        return {**stated, "rope_parameters": SILENT} if stated.get("rope_parameters") is None else stated

    def rope(self, kind: str) -> Rope:
        found = super().rope(kind)
        if found is None or not isinstance(found.scaling, Yarn | Llama3):
            raise UnsupportedRope("a rope without an original length is not supported")
        positive_number(chosen(self.rope_fields)[1].get(BETA), BETA)
        return found

    def attention(self, kind: str, **options: Any) -> Attention | DeltaNet:
        scaling = self.rope(kind).scaling
        assert isinstance(scaling, Yarn | Llama3)
        beta = float(chosen(self.rope_fields)[1][BETA])
        return super().attention(kind, tempering=Tempering(beta, scaling.original_context_len), **options)
