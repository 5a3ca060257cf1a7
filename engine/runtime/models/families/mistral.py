"""Mistral: every layer has a window, where there is one. With `layer_types` it is Ministral."""

from __future__ import annotations

from engine.runtime.models.dense import DEFAULT_WINDOW, DenseKeys


class MistralKeys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 8
    sliding_window: int | None = DEFAULT_WINDOW

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    slides = True
