"""Arcee: Llama with an MLP that has no gate, and the square of ReLU."""

from __future__ import annotations

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.spec import Names


class ArceeKeys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    hidden_act: str = "relu2"
    attention_bias: bool = False
    mlp_bias: bool = False

    model_type = "arcee"
    architecture = "ArceeForCausalLM"
    names = Names(gate_up=("mlp.up_proj",))
    acts = "relu2", "silu"
    gated = False
