"""Command R7B and A (Cohere 2): attention and MLP side by side, behind one centred norm; a rope of neighbours
in layers with a window, and none in others."""

from __future__ import annotations

from typing import Any

from engine.runtime.models.dense import DEFAULT_WINDOW, SLIDING_ATTENTION, DenseKeys
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import DecoderSpec, Rope


class Cohere2Keys(DenseKeys, frozen=True, kw_only=True):
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    logit_scale: float = 0.0625
    sliding_window: int | None = DEFAULT_WINDOW
    sliding_window_pattern: int = 4

    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"
    norms = "parallel"
    norm_kind = "layer"
    slides = True
    period_key = "sliding_window_pattern"
    eps_key = "layer_norm_eps"
    rope_rules = RopeRules(interleaved=True)
    positives = "logit_scale", "sliding_window_pattern"

    @property
    def width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def rope(self, kind: str) -> Rope | None:
        return super().rope(kind) if kind == SLIDING_ATTENTION else None

    def describe(self, **options: Any) -> DecoderSpec:
        return super().describe(logit_scale=self.logit_scale, **options)
