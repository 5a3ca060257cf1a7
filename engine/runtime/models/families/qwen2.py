"""Qwen2 and 2.5: biases of queries, keys and values; windows where they are switched on."""

from __future__ import annotations

from typing import ClassVar

from engine.runtime.models.dense import DEFAULT_WINDOW, FULL_ATTENTION, SLIDING_ATTENTION, DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.spec import DecoderSpec


class Qwen2Keys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 32
    sliding_window: int | None = DEFAULT_WINDOW
    use_sliding_window: bool = False
    max_window_layers: int = 28

    slides: ClassVar[bool] = True

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def kinds(self) -> list[str]:
        if self.layer_types is not None:
            return self.layer_types
        first = self.num_hidden_layers if self.window is None else self.max_window_layers
        layers = range(self.num_hidden_layers)
        return [SLIDING_ATTENTION if layer >= first else FULL_ATTENTION for layer in layers]


def describe(hf: Qwen2Keys) -> DecoderSpec:
    return hf.decoder("Qwen2ForCausalLM", hf.layers(bias=True))


FAMILY = Family("qwen2", "Qwen2ForCausalLM", Qwen2Keys, describe)
