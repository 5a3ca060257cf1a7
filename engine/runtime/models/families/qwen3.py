"""Qwen3: heads of queries and keys are normed; windows as in Qwen2."""

from __future__ import annotations

from engine.runtime.models.families.qwen2 import Qwen2Keys


class Qwen3Keys(Qwen2Keys, frozen=True, kw_only=True):
    attention_bias: bool = False

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    qk_norm = "heads"
    qkv_bias = False

    @property
    def width(self) -> int:
        return 128 if self.head_dim is None else self.head_dim
