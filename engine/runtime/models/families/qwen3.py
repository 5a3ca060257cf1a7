"""Qwen3: heads of queries and keys are normed; windows as in Qwen2."""

from __future__ import annotations

from engine.runtime.models.families.qwen2 import Qwen2Keys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec


class Qwen3Keys(Qwen2Keys, frozen=True, kw_only=True):
    attention_bias: bool = False

    @property
    def width(self) -> int:
        return 128 if self.head_dim is None else self.head_dim


def describe(hf: Qwen3Keys) -> DecoderSpec:
    return hf.decoder("Qwen3ForCausalLM", hf.layers(qk_norm="heads"))


FAMILY = Family("qwen3", "Qwen3ForCausalLM", Qwen3Keys, describe)
