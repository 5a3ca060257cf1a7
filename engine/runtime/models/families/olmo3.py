"""OLMo 3: OLMo 2 with windows in three of four layers, and a rope for each kind of layer."""

from __future__ import annotations

from engine.runtime.models.dense import DEFAULT_WINDOW
from engine.runtime.models.families.olmo2 import Olmo2Keys
from engine.runtime.models.rope import RopeRules, read_ropes
from engine.runtime.models.spec import Rope


class Olmo3Keys(Olmo2Keys, frozen=True, kw_only=True):
    sliding_window: int | None = DEFAULT_WINDOW

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    slides = True
    rope_rules = RopeRules(theta=500_000.0)

    @property
    def kinds(self) -> list[str]:
        return self.every(4)

    def rope(self, kind: str) -> Rope | None:
        return read_ropes(self.rope_fields, self.rope_rules, self.width)[kind]
