"""Gemma 3, its text: norms on both sides, GeGLU, windows in five of six layers, and a rope for each kind."""

from __future__ import annotations

from typing import ClassVar

from engine.runtime.models.dense import DEFAULT_WINDOW, DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.rope import RopeRules, read_ropes
from engine.runtime.models.spec import DecoderSpec, Names, Rope
from shared.text.model_files import KeyMeanings, only

NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


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

    slides: ClassVar[bool] = True
    period_key: ClassVar[str] = "sliding_window_pattern"
    acts: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)
    limits: ClassVar[KeyMeanings] = {
        "attn_logit_softcapping": only(None),
        "use_bidirectional_attention": only(None, False),
    }
    act_key: ClassVar[str] = "hidden_activation"
    positives: ClassVar[tuple[str, ...]] = (
        *("query_pre_attn_scalar", "sliding_window_pattern", "final_logit_softcapping"),
    )
    rope_rules: ClassVar[RopeRules] = RopeRules(theta=1_000_000.0)

    def rope(self, kind: str) -> Rope | None:
        return read_ropes(self.rope_fields, self.rope_rules, self.width, self.rope_local_base_freq)[kind]


def describe(hf: Gemma3Keys) -> DecoderSpec:
    layers = hf.layers("both", qk_norm="heads", scale=float(hf.query_pre_attn_scalar**-0.5))
    pieces = {"norm": hf.norm(offset=1.0), "embed_scale": hf.hidden_size**0.5, "names": NAMES}
    return hf.decoder("Gemma3ForCausalLM", layers, logit_softcap=hf.final_logit_softcapping, **pieces)


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", Gemma3Keys, describe)
