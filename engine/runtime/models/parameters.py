"""A dense decoder's parameters, as data: what each is called in a checkpoint, and its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine.runtime.models.config import ModelConfig
from engine.runtime.weights import WeightSource

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
LM_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LinearParameters:
    """Matrices over the same input, stacked into one."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    bias: bool

    def read(self, source: WeightSource) -> tuple[Tensor, Tensor | None]:
        """[sum of rows, columns], and [sum of rows] where there are biases."""
        weight = source.stack([f"{module}.weight" for module in self.modules], self.rows, self.columns)
        if not self.bias:
            return weight, None
        return weight, source.stack([f"{module}.bias" for module in self.modules], self.rows)


class LayerParameters:
    """One layer's, by its number."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self._config = config
        self._at = f"model.layers.{layer}"

    @property
    def qkv(self) -> LinearParameters:
        config = self._config
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return self._linear(names, (q, kv, kv), config.hidden_size, config.qkv_bias)

    @property
    def output(self) -> LinearParameters:
        config = self._config
        columns = config.heads * config.head_dim
        return self._linear(("self_attn.o_proj",), (config.hidden_size,), columns, config.output_bias)

    @property
    def gate_up(self) -> LinearParameters:
        config = self._config
        rows = (config.intermediate_size, config.intermediate_size)
        return self._linear(("mlp.gate_proj", "mlp.up_proj"), rows, config.hidden_size, config.mlp_bias)

    @property
    def down(self) -> LinearParameters:
        config = self._config
        return self._linear(
            ("mlp.down_proj",), (config.hidden_size,), config.intermediate_size, config.mlp_bias
        )

    def input_norm(self, source: WeightSource) -> Tensor:
        """[hidden]"""
        return source.stack([f"{self._at}.input_layernorm.weight"], [self._config.hidden_size])

    def mlp_norm(self, source: WeightSource) -> Tensor:
        """[hidden]"""
        return source.stack([f"{self._at}.post_attention_layernorm.weight"], [self._config.hidden_size])

    def qk_norm(self, source: WeightSource) -> Tensor:
        """[2, D]: what a query's head is multiplied with, and what a key's."""
        names = [f"{self._at}.self_attn.{which}_norm.weight" for which in "qk"]
        dim = self._config.head_dim
        return source.stack(names, [dim, dim]).view(2, dim)

    def _linear(
        self, modules: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool
    ) -> LinearParameters:
        return LinearParameters(tuple(f"{self._at}.{module}" for module in modules), rows, columns, bias)
