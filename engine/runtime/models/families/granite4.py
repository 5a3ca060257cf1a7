"""Granite 4, its dense models: Granite 3 with a fused MLP, and positions told where config.json says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from engine.runtime.models.dense import FULL_ATTENTION, LINEAR_ATTENTION, SIZE_MAX
from engine.runtime.models.families.granite import GraniteKeys
from engine.runtime.models.spec import Mlp, Names, Rope

OLD_KINDS: Mapping[str, str] = {"attention": FULL_ATTENTION}


class Granite4Keys(GraniteKeys, frozen=True, kw_only=True):
    num_local_experts: int = 8
    shared_intermediate_size: int = 1024
    position_embedding_type: Literal["rope"] | None = None

    model_type = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    names = Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
    also_kinds = (*OLD_KINDS,)

    @property
    def kinds(self) -> list[str]:
        return [OLD_KINDS.get(kind, kind) for kind in self.layer_types or [LINEAR_ATTENTION]]

    def rope(self, kind: str) -> Rope | None:
        return None if self.position_embedding_type is None else super().rope(kind)

    def mlp(self, **options: Any) -> Mlp:
        return super().mlp(inner=self.shared_intermediate_size, bias=False, **options)

    def problems(self) -> Iterator[str]:
        if others := sorted(set(self.kinds) - {FULL_ATTENTION}):
            yield f"{', '.join(others)} in layer_types is not supported"
        elif self.num_local_experts != 0:
            yield f"num_local_experts {self.num_local_experts} is not supported, only 0"
        elif not 1 <= self.shared_intermediate_size <= SIZE_MAX:
            yield f"shared_intermediate_size {self.shared_intermediate_size} is out of range"
        else:
            yield from super().problems()
