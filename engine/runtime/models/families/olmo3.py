"""OLMo 3: OLMo 2 with windows in three of four layers, and a rope for each kind of layer."""

from __future__ import annotations

from typing import ClassVar

from engine.runtime.models.dense import DEFAULT_WINDOW
from engine.runtime.models.families.olmo2 import Olmo2Keys
from engine.runtime.models.families.olmo2 import describe as describe_olmo2
from engine.runtime.models.family import Family
from engine.runtime.models.rope import RopeRules, read_ropes
from engine.runtime.models.spec import DecoderSpec, Rope


class Olmo3Keys(Olmo2Keys, frozen=True, kw_only=True):
    sliding_window: int | None = DEFAULT_WINDOW

    slides: ClassVar[bool] = True
    rope_rules: ClassVar[RopeRules] = RopeRules(theta=500_000.0)

    @property
    def kinds(self) -> list[str]:
        return self.every(4)

    def rope(self, kind: str) -> Rope | None:
        return read_ropes(self.rope_fields, self.rope_rules, self.width)[kind]


def describe(hf: Olmo3Keys) -> DecoderSpec:
    return describe_olmo2(hf, "Olmo3ForCausalLM")


FAMILY = Family("olmo3", "Olmo3ForCausalLM", Olmo3Keys, describe)
