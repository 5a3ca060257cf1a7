"""EXAONE 4: OLMo 2's norms of what blocks give, with heads that are normed one by one. Where layers have
windows, those without are not told positions."""

from __future__ import annotations

from collections.abc import Iterator

from engine.runtime.models.dense import DEFAULT_WINDOW, SLIDING_ATTENTION, DenseKeys
from engine.runtime.models.families.olmo2 import Olmo2Keys
from engine.runtime.models.spec import Rope
from shared.text.model_files import shown


class Exaone4Keys(DenseKeys, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    num_key_value_heads: int | None = 32
    sliding_window: int | None = DEFAULT_WINDOW
    sliding_window_pattern: int | str | None = 4

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    names = Olmo2Keys.names
    norms = "behind"
    qk_norm = "heads"
    slides = True

    @property
    def kinds(self) -> list[str]:
        period = self.sliding_window_pattern
        return self.every(period if isinstance(period, int) else 1)

    def rope(self, kind: str) -> Rope | None:
        return super().rope(kind) if self.window is None or kind == SLIDING_ATTENTION else None

    def contradictions(self) -> Iterator[str]:
        period = 0 if self.window is None else self.sliding_window_pattern
        if self.layer_types is None and (not isinstance(period, int) or period < 1):
            what = f"sliding_window {shown(self.window)} with sliding_window_pattern"
            yield f"{what} {shown(self.sliding_window_pattern)} needs layer_types"
        else:
            yield from super().contradictions()
