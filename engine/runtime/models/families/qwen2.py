"""Qwen2 and 2.5: biases of queries, keys and values; windows where they are switched on."""

from __future__ import annotations

from engine.runtime.models.dense import DEFAULT_WINDOW, FULL_ATTENTION, SLIDING_ATTENTION, DenseKeys


class Qwen2Keys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 32
    sliding_window: int | None = DEFAULT_WINDOW
    use_sliding_window: bool = False
    max_window_layers: int = 28

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    slides = True
    qkv_bias = True

    @property
    def kinds(self) -> list[str]:
        if self.layer_types is not None:
            return self.layer_types
        first = self.num_hidden_layers if self.window is None else self.max_window_layers
        layers = range(self.num_hidden_layers)
        return [SLIDING_ATTENTION if layer >= first else FULL_ATTENTION for layer in layers]
