"""SmolLM3: every fourth layer is not told positions, and may have a window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from engine.runtime.models.dense import FULL_ATTENTION, SLIDING_ATTENTION, DenseKeys
from engine.runtime.models.family import Family
from engine.runtime.models.rope import RopeRules
from engine.runtime.models.spec import DecoderSpec, Layer


class Smollm3Keys(DenseKeys, frozen=True, kw_only=True):
    num_key_value_heads: int | None = 4
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4

    slides: ClassVar[bool] = True
    positives: ClassVar[tuple[str, ...]] = ("no_rope_layer_interval",)
    rope_rules: ClassVar[RopeRules] = RopeRules(theta=2_000_000.0)

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

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


def describe(hf: Smollm3Keys) -> DecoderSpec:
    def layer(kind: str, told: int) -> Layer:
        return Layer(hf.attention(kind, rope=hf.rope(kind) if told else None), hf.mlp())

    return hf.decoder("SmolLM3ForCausalLM", map(layer, hf.kinds, hf.is_told))


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", Smollm3Keys, describe)
