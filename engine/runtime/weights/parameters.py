"""A dense decoder's parameters, as data: the name of each in a checkpoint, its shape, and the part of it that
a tensor-parallel rank holds.

A rank has its heads' rows of q, k and v and its part of the rows of gate and up; of the output and down
matrices it has the columns that these feed, so that the ranks' outputs add up to the whole. Biases of
these two belong to rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.collective.shard import WHOLE, Shard
from engine.runtime.models.decoder_config import DecoderConfig
from engine.runtime.weights.checkpoint import Fp8Source, TensorPart, WeightSource
from engine.runtime.weights.fp8 import Fp8Weight, quantise

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
    part: TensorPart

    def read(self, source: WeightSource) -> tuple[Tensor, Tensor | None]:
        """The rank's part of the weight [sum of rows, columns], and of the bias [sum of rows], None without
        one."""
        weight = source.stack(self._weights, self.rows, self.columns, part=self.part)
        return weight, self._bias(source)

    def read_fp8(self, source: WeightSource, device: torch.device) -> tuple[Fp8Weight, Tensor | None]:
        """The same part, on the device and in fp8: as the checkpoint stores it, or else rounded on the
        device."""
        held = None
        if isinstance(source, Fp8Source):
            held = source.stack_fp8(self._weights, self.rows, self.columns, part=self.part)
        if held is None:
            whole = source.stack(self._weights, self.rows, self.columns, part=self.part)
            return quantise(whole.to(device)), self._bias(source)
        return held.to(device), self._bias(source)

    @property
    def _weights(self) -> list[str]:
        return [f"{module}.weight" for module in self.modules]

    def _bias(self, source: WeightSource) -> Tensor | None:
        if not self.bias:
            return None
        names = [f"{module}.bias" for module in self.modules]
        return source.stack(names, self.rows, part=TensorPart(self.part.rows))


class LayerParameters:
    """The parameters of one layer, by its number. `config` describes the whole model."""

    def __init__(self, config: DecoderConfig, layer: int, shard: Shard = WHOLE) -> None:
        self._config = config
        self._shard = shard
        self._at = f"model.layers.{layer}"

    @property
    def qkv(self) -> LinearParameters:
        config = self._config
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        own_q = self._shard.span(config.heads, config.head_dim)
        own_kv = self._shard.span(config.kv_heads, config.head_dim)
        part = TensorPart(rows=(own_q, own_kv, own_kv))
        return self._linear(names, (q, kv, kv), config.hidden_size, config.qkv_bias, part)

    @property
    def output(self) -> LinearParameters:
        config = self._config
        columns = config.heads * config.head_dim
        part = TensorPart(columns=self._shard.span(config.heads, config.head_dim))
        bias = config.output_bias and self._shard.rank == 0
        return self._linear(("self_attn.o_proj",), (config.hidden_size,), columns, bias, part)

    @property
    def gate_up(self) -> LinearParameters:
        config = self._config
        rows = (config.intermediate_size, config.intermediate_size)
        own = self._shard.span(config.intermediate_size)
        names = ("mlp.gate_proj", "mlp.up_proj")
        return self._linear(names, rows, config.hidden_size, config.mlp_bias, TensorPart(rows=(own, own)))

    @property
    def down(self) -> LinearParameters:
        config = self._config
        part = TensorPart(columns=self._shard.span(config.intermediate_size))
        bias = config.mlp_bias and self._shard.rank == 0
        return self._linear(("mlp.down_proj",), (config.hidden_size,), config.intermediate_size, bias, part)

    def input_norm(self, source: WeightSource) -> Tensor:
        """[hidden]"""
        return source.stack([f"{self._at}.input_layernorm.weight"], [self._config.hidden_size])

    def mlp_norm(self, source: WeightSource) -> Tensor:
        """[hidden]"""
        return source.stack([f"{self._at}.post_attention_layernorm.weight"], [self._config.hidden_size])

    def qk_norm(self, source: WeightSource) -> Tensor:
        """The weights of the norms of a query's head and of a key's, [2, D]."""
        names = [f"{self._at}.self_attn.{which}_norm.weight" for which in "qk"]
        dim = self._config.head_dim
        return source.stack(names, [dim, dim]).view(2, dim)

    def _linear(
        self, modules: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool, part: TensorPart
    ) -> LinearParameters:
        names = tuple(f"{self._at}.{module}" for module in modules)
        return LinearParameters(names, rows, columns, bias, part)


def read_lm_head(config: DecoderConfig, source: WeightSource, shard: Shard, embedding: Tensor) -> Tensor:
    """The rank's rows of the head, [padded_len(vocab), hidden], with zeros behind those of the last rank.

    `embedding` [vocab, hidden]: tied weights are a part of it, and share its memory.
    """
    vocab = config.vocab_size
    start, stop = shard.padded_span(vocab)
    if config.tied_embeddings:
        head = embedding[start:stop]
    else:
        head = source.stack([LM_HEAD], [vocab], config.hidden_size, part=TensorPart(rows=((start, stop),)))
    missing = shard.padded_len(vocab) - len(head)
    return F.pad(head, (0, 0, 0, missing)) if missing else head


def read_all(config: DecoderConfig, source: WeightSource) -> None:
    """Ask `source` for every parameter of the model, once and whole."""
    embedding = source.stack([EMBEDDING], [config.vocab_size], config.hidden_size)
    for layer in range(config.layers):
        own = LayerParameters(config, layer)
        for linear in (own.qkv, own.output, own.gate_up, own.down):
            linear.read(source)
        own.input_norm(source)
        own.mlp_norm(source)
        if config.qk_norm:
            own.qk_norm(source)
    source.stack([FINAL_NORM], [config.hidden_size])
    read_lm_head(config, source, WHOLE, embedding)
