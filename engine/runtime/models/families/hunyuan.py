"""Hunyuan, its dense models: heads are normed behind the rotation, and a rope whose base is stretched."""

from __future__ import annotations

from dataclasses import replace

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.rope import RopeRules, UnsupportedRope, chosen, positive_number, read_rope
from engine.runtime.models.spec import Names, Rope


class HunyuanKeys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    model_type = "hunyuan_v1_dense"
    architecture = "HunYuanDenseV1ForCausalLM"
    names = Names(qk_norm=("self_attn.query_layernorm", "self_attn.key_layernorm"))
    qk_norm = "rotated heads"
    rope_rules = RopeRules(also=("alpha",))

    def rope(self, kind: str) -> Rope | None:
        """The type `dynamic` with `alpha` is a plain rope with another base."""
        name, scaling = chosen(self.rope_fields)
        if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not scaling.get("alpha"):
            return super().rope(kind)
        if self.head_dim is None:
            raise UnsupportedRope("alpha without head_dim is not supported")
        plain = {**self.rope_fields, name: {**scaling, "rope_type": "default"}}
        rope, dim = read_rope(plain, self.rope_rules, self.width), self.width
        stretched = positive_number(scaling["alpha"], "alpha") ** (dim / (dim - 2))
        return replace(rope, theta=rope.theta * stretched)
