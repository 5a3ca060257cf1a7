"""Arcee: Llama with an MLP that has no gate, and the square of ReLU."""

from __future__ import annotations

from typing import ClassVar

from engine.runtime.models.dense import DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec, Names

NAMES = Names(gate_up=("mlp.up_proj",))


class ArceeKeys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    hidden_act: str = "relu2"
    attention_bias: bool = False
    mlp_bias: bool = False

    acts: ClassVar[tuple[str, ...]] = ("relu2", "silu")


def describe(hf: ArceeKeys) -> DecoderSpec:
    return hf.decoder("ArceeForCausalLM", hf.layers(mlp=hf.mlp(gated=False)), names=NAMES)


FAMILY = Family("arcee", "ArceeForCausalLM", ArceeKeys, describe)
