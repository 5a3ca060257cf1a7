"""GLM-4 (0414): norms on both sides, fused gates, and a rope of neighbours in half of each head."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import Names


class Glm4Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1.5625e-7
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    attention_bias: bool = True

    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    names = Names(
        gate_up=("mlp.gate_up_proj",),
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )
    norms = "both"
    attention_out_bias = False
    rope_rules = RopeRules(part=0.5, partial=True, interleaved=True)
