"""OLMo 2: norms of what blocks give, not of what they take; queries and keys are normed over their whole
width."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec, Names

NAMES = Names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


class Olmo2Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


def describe(hf: Olmo2Keys, architecture: str = "Olmo2ForCausalLM") -> DecoderSpec:
    return hf.decoder(architecture, hf.layers("behind", qk_norm="width"), names=NAMES)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", Olmo2Keys, describe)
