"""Ministral: Mistral with a kind of attention for each layer."""

from __future__ import annotations

from engine.runtime.models.families.mistral import MistralKeys
from engine.runtime.models.families.mistral import describe as describe_mistral
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec


def describe(hf: MistralKeys) -> DecoderSpec:
    return describe_mistral(hf, "MinistralForCausalLM")


FAMILY = Family("ministral", "MinistralForCausalLM", MistralKeys, describe, ("MistralForCausalLM",))
