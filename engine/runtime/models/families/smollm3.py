"""SmolLM3: every fourth layer is not told positions, and may have a window."""

from __future__ import annotations

from collections.abc import Iterator

from engine.runtime.models.dense import FULL_ATTENTION, SLIDING_ATTENTION, DenseKeys
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import Layer


class Smollm3Keys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 4
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    slides = True
    positives = ("no_rope_layer_interval",)
    rope_rules = RopeRules(theta=2_000_000.0)

    @property
    def is_told(self) -> list[int]:
        if self.no_rope_layers is not None:
            return self.no_rope_layers
        return [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.num_hidden_layers)]

    @property
    def kinds(self) -> list[str]:
        if self.layer_types is not None:
            return self.layer_types
        slides = self.window is not None
        return [SLIDING_ATTENTION if slides and not told else FULL_ATTENTION for told in self.is_told]

    def contradictions(self) -> Iterator[str]:
        if len(self.is_told) != self.num_hidden_layers:
            yield f"no_rope_layers has {len(self.is_told)} entries for {self.num_hidden_layers} layers"
        else:
            yield from super().contradictions()

    def layers(self) -> Iterator[Layer]:
        for kind, told in zip(self.kinds, self.is_told, strict=True):
            yield self.layer(kind) if told else self.layer(kind, rope=None)
