"""OLMo 2: norms of what blocks give, not of what they take; queries and keys are normed over their whole
width."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec, Layer, Names

NAMES = Names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


class Olmo2Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


def describe(hf: Olmo2Keys, architecture: str = "Olmo2ForCausalLM") -> DecoderSpec:
    options = {"bias": hf.attention_bias, "out_bias": hf.attention_bias, "qk_norm": "width"}
    layers = (Layer(hf.attention(kind, **options), hf.mlp(), "behind") for kind in hf.kinds)
    return hf.decoder(architecture, layers, names=NAMES)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", Olmo2Keys, describe)
