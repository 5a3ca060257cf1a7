"""Ministral: Mistral with a kind of attention for each layer."""

from __future__ import annotations

from engine.runtime.models.families.mistral import MistralKeys


class MinistralKeys(MistralKeys, frozen=True, kw_only=True):
    model_type = "ministral"
    architecture = "MinistralForCausalLM"
    also_named = ("MistralForCausalLM",)
