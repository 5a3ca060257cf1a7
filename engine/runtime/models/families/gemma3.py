"""Gemma 3, its text: norms on both sides, GeGLU, windows in five of six layers, and a rope for each kind."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.runtime.models.dense import DEFAULT_WINDOW, DenseKeys
from engine.runtime.models.rope import RopeRules, read_ropes
from engine.runtime.models.spec import DecoderSpec, Names, Rope
from shared.text.model_files import KeyMeanings, only


class Gemma3Keys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = DEFAULT_WINDOW
    sliding_window_pattern: int = 6
    rope_local_base_freq: float = 10_000.0
    final_logit_softcapping: float | None = None

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    names = Names(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
    norms = "both"
    norm_offset = 1.0
    qk_norm = "heads"
    slides = True
    period_key = "sliding_window_pattern"
    act_key = "hidden_activation"
    acts = ("gelu_pytorch_tanh",)
    limits: ClassVar[KeyMeanings] = {
        "attn_logit_softcapping": only(None),
        "use_bidirectional_attention": only(None, False),
    }
    positives = "query_pre_attn_scalar", "sliding_window_pattern", "final_logit_softcapping"
    rope_rules = RopeRules(theta=1_000_000.0)

    @property
    def scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    def rope(self, kind: str) -> Rope | None:
        return read_ropes(self.rope_fields, self.rope_rules, self.width, self.rope_local_base_freq)[kind]

    def describe(self, **options: Any) -> DecoderSpec:
        cap = self.final_logit_softcapping
        return super().describe(embed_scale=self.hidden_size**0.5, logit_softcap=cap, **options)
