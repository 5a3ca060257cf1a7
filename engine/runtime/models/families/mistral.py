"""Mistral: every layer has a window, where there is one. With `layer_types` it is Ministral."""

from __future__ import annotations

from typing import ClassVar

from engine.runtime.models.dense import DEFAULT_WINDOW, DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec


class MistralKeys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    sliding_window: int | None = DEFAULT_WINDOW

    slides: ClassVar[bool] = True


def describe(hf: MistralKeys, architecture: str = "MistralForCausalLM") -> DecoderSpec:
    return hf.decoder(architecture, hf.layers())


FAMILY = Family("mistral", "MistralForCausalLM", MistralKeys, describe)
