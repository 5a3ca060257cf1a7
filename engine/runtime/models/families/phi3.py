"""Phi-3 and Phi-4: fused matrices, a rope of a part of each head, and long ropes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import DecoderSpec, Names

NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
ORIGINAL_LEN = 4096


class Phi3Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5

    slides: ClassVar[bool] = True
    rope_rules: ClassVar[RopeRules] = RopeRules(partial=True, types=("default", "longrope", "su"))

    @property
    def rope_fields(self) -> Mapping[str, Any]:
        return {"original_max_position_embeddings": ORIGINAL_LEN, **super().rope_fields}

    def contradictions(self) -> Iterator[str]:
        if not self.fits_window:
            yield "layer_types that differ from sliding_window are not supported"
        yield from super().contradictions()


def describe(hf: Phi3Keys) -> DecoderSpec:
    return hf.decoder("Phi3ForCausalLM", hf.layers(), names=NAMES)


FAMILY = Family("phi3", "Phi3ForCausalLM", Phi3Keys, describe)
