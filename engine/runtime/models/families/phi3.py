"""Phi-3 and Phi-4: fused matrices, a rope of a part of each head, and long ropes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import Names

ORIGINAL_LEN = 4096


class Phi3Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    names = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    slides = True
    layers_alike = True
    rope_rules = RopeRules(partial=True, types=("default", "longrope", "su"))

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        return {"original_max_position_embeddings": ORIGINAL_LEN, **super().rope_fields}
