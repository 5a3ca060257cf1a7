"""OLMo 2: norms of what blocks give, not of what they take; queries and keys are normed over their whole
width."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.spec import Names


class Olmo2Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    names = Names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
    norms = "behind"
    qk_norm = "width"
