"""A decoder's parameters, as data: the role of each, its name in a checkpoint, its shape, and the part of it
that a tensor-parallel rank holds.

All that walks over a model's parameters (the check of a checkpoint, the loaders of the networks, a rehearsal)
walks over `layer_parameters`, so that no list of names is kept twice.

A rank has its heads' rows of q, k and v and its part of the rows of gate and up; of the output and down
matrices it has the columns that these feed, so that the ranks' outputs add up to the whole. Biases of
these two belong to rank 0.

What a description says about weights alone is done here, once for all networks: the order of a head's
elements (`Rope.order`), what is added to a norm's weight, and matrices that a checkpoint has fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.collective.shard import WHOLE, Shard, Span
from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet, Names
from engine.runtime.weights.checkpoint import Fp8Source, TensorPart, WeightSource
from engine.runtime.weights.fp8 import Fp8Weight, quantise


class Matrix(Enum):
    """The roles of a layer's matrices."""

    QKV = "qkv"
    OUTPUT = "output"
    GATE_UP = "gate_up"
    DOWN = "down"
    DELTA = "delta"
    """The inputs of a delta net: what is convolved, the gate, the strength and the decay of each head."""


class Vector(Enum):
    """The roles of what is no matrix in a layer: norms, and a delta net's parameters."""

    ATTENTION_NORM = "attention_norm"
    ATTENTION_POST_NORM = "attention_post_norm"
    MLP_NORM = "mlp_norm"
    MLP_POST_NORM = "mlp_post_norm"
    QK_NORM = "qk_norm"
    DELTA_CONV = "delta_conv"
    DELTA_RATE = "delta_rate"
    DELTA_STEP_BIAS = "delta_step_bias"
    DELTA_NORM = "delta_norm"


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The first `heads` of a rank's rows of heads have their elements in another order than the
    checkpoint."""

    heads: int
    elements: Sequence[int]
    gates: int = 0
    """The first so many heads of the checkpoint have a gate behind each. Here all gates are behind all
    else."""

    def rows(self, count: int, device: torch.device) -> Tensor:
        """The stored row for each of `count` rows."""
        order = torch.arange(count, device=device)
        if self.gates:
            gated, others = order.tensor_split([2 * self.gates * len(self.elements)])
            heads, gates = gated.view(self.gates, 2, -1).unbind(1)
            order = torch.cat((heads.flatten(), others, gates.flatten()))
        turned = order[: self.heads * len(self.elements)].view(self.heads, -1)
        turned.copy_(turned[:, list(self.elements)].clone())
        return order


@dataclass(frozen=True, slots=True)
class LinearParameters:
    """Matrices over the same input, stacked into one."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    """The rows of each module, whole."""
    columns: int
    bias: bool
    part: TensorPart
    order: HeadOrder | None = None

    def read(self, source: WeightSource) -> tuple[Tensor, Tensor | None]:
        """The rank's part of the weight [sum of rows, columns], and of the bias [sum of rows], None without
        one."""
        weight = source.stack(self._weights, self.rows, self.columns, part=self.part)
        return self._ordered(weight), self._bias(source)

    def read_fp8(self, source: WeightSource, device: torch.device) -> tuple[Fp8Weight, Tensor | None]:
        """The part on the device and in fp8: as the checkpoint stores it, or else rounded on the device."""
        held = None
        if isinstance(source, Fp8Source):
            held = source.stack_fp8(self._weights, self.rows, self.columns, part=self.part)
        if held is None:
            weight, bias = self.read(source)
            return quantise(weight.to(device)), bias
        if self.order is not None:
            held = held.taken(self.order.rows(len(held.values), held.values.device))
        return held.to(device), self._bias(source)

    @property
    def elements(self) -> int:
        """The number of the rank's weights."""
        rows, columns = self.part.shape(self.rows, [self.columns])
        return rows * columns

    @property
    def _weights(self) -> list[str]:
        return [f"{module}.weight" for module in self.modules]

    def _bias(self, source: WeightSource) -> Tensor | None:
        if not self.bias:
            return None
        names = [f"{module}.bias" for module in self.modules]
        return self._ordered(source.stack(names, self.rows, part=TensorPart(self.part.rows)))

    def _ordered(self, stacked: Tensor) -> Tensor:
        return stacked if self.order is None else stacked[self.order.rows(len(stacked), stacked.device)]


@dataclass(frozen=True, slots=True)
class VectorParameters:
    """Tensors that are no matrices of products, one behind the other."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    """The rows of each, whole."""
    part: TensorPart
    columns: tuple[int, ...] = ()
    order: HeadOrder | None = None
    held: Callable[[Tensor], Tensor] = lambda stored: stored
    """Makes what networks hold of what is stored."""

    def read(self, source: WeightSource) -> Tensor:
        """The rank's part, as networks hold it."""
        stacked = source.stack(self.names, self.rows, *self.columns, part=self.part)
        if self.order is not None:
            stacked = stacked[self.order.rows(len(stacked), stacked.device)]
        return self.held(stacked)


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """A layer's parameters, in the order in which it uses them."""

    matrices: dict[Matrix, LinearParameters]
    vectors: dict[Vector, VectorParameters]


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A delta net's parameters that are no matrices, as networks hold them: float32, a rank's part."""

    conv: Tensor
    """[kernel, channels]"""
    rate: Tensor
    """[Hv]"""
    step_bias: Tensor
    """[Hv]"""
    norm: Tensor
    """[Dv]"""

    @staticmethod
    def of(vectors: Mapping[Vector, Tensor]) -> DeltaWeights:
        return DeltaWeights(
            vectors[Vector.DELTA_CONV],
            vectors[Vector.DELTA_RATE],
            vectors[Vector.DELTA_STEP_BIAS],
            vectors[Vector.DELTA_NORM],
        )


def layer_parameters(decoder: DecoderSpec, index: int, shard: Shard = WHOLE) -> LayerParameters:
    """The rank's parameters of a layer, by its number. `decoder` describes the whole model."""
    layer, names, hidden = decoder.layers[index], decoder.names, decoder.hidden_size
    attention, mlp, at = layer.attention, layer.mlp, f"{names.layers}.{index}."
    inner, is_first = mlp.inner, shard.rank == 0

    def stacked(
        modules: tuple[str, ...],
        rows: Sequence[int],
        spans: Sequence[Span],
        bias: bool,
        order: HeadOrder | None = None,
    ) -> LinearParameters:
        if len(modules) < len(rows):  # fused: all spans are of one tensor
            starts = [sum(rows[:i]) for i in range(len(rows))]
            spans = [
                (first + start, last + start) for start, (first, last) in zip(starts, spans, strict=True)
            ]
            modules, rows = modules * len(rows), [sum(rows)] * len(rows)
        whole = tuple(at + module for module in modules)
        return LinearParameters(whole, tuple(rows), hidden, bias, TensorPart(tuple(spans)), order)

    def back(module: str, columns: int, span: Span, bias: bool) -> LinearParameters:
        return LinearParameters(
            (at + module,), (hidden,), columns, bias and is_first, TensorPart(columns=span)
        )

    vectors = _norms(decoder, index)
    if isinstance(attention, DeltaNet):
        vectors |= _delta(attention, names, at, shard)
        modules, rows, spans = _delta_inputs(attention, names, shard)
        matrices = {
            Matrix.DELTA: stacked(modules, rows, spans, bias=False),
            Matrix.OUTPUT: back(
                names.delta_output, attention.values, shard.span(attention.values), bias=False
            ),
        }
    else:
        dim, count, order = attention.head_dim, attention.heads, _order(attention, shard)
        if attention.qk_norm is not None:
            vectors[Vector.QK_NORM] = _qk_norm(decoder, attention, at, shard, order)
        rows, spans = _qkv(attention, shard)
        matrices = {
            Matrix.QKV: stacked(names.qkv, rows, spans, attention.bias, order),
            Matrix.OUTPUT: back(names.output, count * dim, shard.span(count, dim), attention.out_bias),
        }
    up = [inner] * (2 if mlp.gated else 1)
    matrices[Matrix.GATE_UP] = stacked(names.gate_up, up, [shard.span(inner)] * len(up), mlp.bias)
    matrices[Matrix.DOWN] = back(names.down, inner, shard.span(inner), mlp.bias)
    return LayerParameters(matrices, vectors)


def _qkv(attention: Attention, shard: Shard) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """The rows of queries, with their gates, of keys and of values, and the rank's of each."""
    dim, kv_heads = attention.head_dim, attention.kv_heads
    sizes = (attention.heads, dim * (2 if attention.output_gate else 1)), (kv_heads, dim), (kv_heads, dim)
    return tuple(count * width for count, width in sizes), tuple(shard.span(*size) for size in sizes)


def _channel_spans(delta: DeltaNet, shard: Shard) -> tuple[Span, ...]:
    """The rank's rows of what is convolved: of queries, keys and values."""
    first, last = shard.span(delta.key_heads, delta.key_dim)
    values = tuple(2 * delta.keys + at for at in shard.span(delta.value_heads, delta.value_dim))
    return (first, last), (delta.keys + first, delta.keys + last), (values[0], values[1])


def _delta_inputs(
    delta: DeltaNet, names: Names, shard: Shard
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[Span, ...]]:
    """The modules of a delta net's inputs, the rows of each, and the rank's."""
    mixed, *others = names.delta_inputs
    heads = shard.span(delta.value_heads)
    spans = *_channel_spans(delta, shard), shard.span(delta.value_heads, delta.value_dim), heads, heads
    sizes = delta.channels, delta.channels, delta.channels, delta.values, delta.value_heads, delta.value_heads
    return (mixed, mixed, mixed, *others), sizes, spans


def _delta(delta: DeltaNet, names: Names, at: str, shard: Shard) -> dict[Vector, VectorParameters]:
    heads = (shard.span(delta.value_heads),)

    def own(
        name: str,
        size: int,
        spans: tuple[Span, ...],
        *columns: int,
        held: Callable[[Tensor], Tensor] = Tensor.float,
    ) -> VectorParameters:
        count = len(spans)
        return VectorParameters((at + name,) * count, (size,) * count, TensorPart(spans), columns, held=held)

    return {
        Vector.DELTA_CONV: own(
            names.delta_conv,
            delta.channels,
            _channel_spans(delta, shard),
            *(1, delta.kernel),
            held=lambda conv: conv.float()[:, 0].T.contiguous(),
        ),
        Vector.DELTA_RATE: own(
            names.delta_rate, delta.value_heads, heads, held=lambda rate: rate.float().exp()
        ),
        Vector.DELTA_STEP_BIAS: own(names.delta_step_bias, delta.value_heads, heads),
        Vector.DELTA_NORM: own(names.delta_norm, delta.value_dim, ((0, delta.value_dim),)),
    }


def _norm(decoder: DecoderSpec, name: str) -> VectorParameters:
    """The factors of what is normed, [hidden]: float32 with an offset, else in the source's type."""
    return VectorParameters((name,), (decoder.hidden_size,), TensorPart(), held=_factors(decoder))


def _factors(decoder: DecoderSpec) -> Callable[[Tensor], Tensor]:
    offset = decoder.norm.offset
    return lambda weight: weight.float() + offset if offset else weight


def _norms(decoder: DecoderSpec, index: int) -> dict[Vector, VectorParameters]:
    """The norms around the layer's blocks."""
    names, placing = decoder.names, decoder.layers[index].norms
    return {
        role: _norm(decoder, f"{names.layers}.{index}.{name}.weight")
        for role, name, placings in (
            (Vector.ATTENTION_NORM, names.attention_norm, ("before", "both", "parallel")),
            (Vector.ATTENTION_POST_NORM, names.attention_post_norm, ("behind", "both")),
            (Vector.MLP_NORM, names.mlp_norm, ("before", "both")),
            (Vector.MLP_POST_NORM, names.mlp_post_norm, ("behind", "both")),
        )
        if placing in placings
    }


def _qk_norm(
    decoder: DecoderSpec, attention: Attention, at: str, shard: Shard, order: HeadOrder | None
) -> VectorParameters:
    """The norms of queries and of keys: of one head each, or of all of the rank's."""
    is_wide, dim = attention.qk_norm == "width", attention.head_dim
    counts = (attention.heads, attention.kv_heads) if is_wide else (1, 1)
    spans = tuple(shard.span(count, dim) if is_wide else (0, dim) for count in counts)
    if order is not None and not is_wide:
        order = HeadOrder(2, order.elements)
    return VectorParameters(
        tuple(f"{at}{name}.weight" for name in decoder.names.qk_norm),
        tuple(count * dim for count in counts),
        TensorPart(spans),
        order=order,
        held=_factors(decoder),
    )


def _order(attention: Attention, shard: Shard) -> HeadOrder | None:
    """The order of the rank's heads of queries and keys."""
    elements = None if attention.rope is None else attention.rope.order(attention.head_dim)
    if elements is None and not attention.output_gate:
        return None
    heads, kv_heads = (last - first for first, last in map(shard.span, (attention.heads, attention.kv_heads)))
    gates = heads if attention.output_gate else 0
    return HeadOrder(heads + kv_heads, elements or range(attention.head_dim), gates)


def read_embedding(decoder: DecoderSpec, source: WeightSource) -> Tensor:
    """[vocab, hidden]"""
    return source.stack([decoder.names.embedding], [decoder.vocab_size], decoder.hidden_size)


def final_norm(decoder: DecoderSpec) -> VectorParameters:
    return _norm(decoder, decoder.names.final_norm)


def read_lm_head(decoder: DecoderSpec, source: WeightSource, shard: Shard, embedding: Tensor) -> Tensor:
    """The rank's rows of the head, [padded_len(vocab), hidden], with zeros behind those of the last rank.

    `embedding` [vocab, hidden]: tied weights are a part of it, and share its memory.
    """
    vocab = decoder.vocab_size
    start, stop = shard.padded_span(vocab)
    if decoder.tied_embeddings:
        head = embedding[start:stop]
    else:
        part = TensorPart(rows=((start, stop),))
        head = source.stack([decoder.names.head], [vocab], decoder.hidden_size, part=part)
    missing = shard.padded_len(vocab) - len(head)
    return F.pad(head, (0, 0, 0, missing)) if missing else head


def mtp_parameters(decoder: DecoderSpec) -> tuple[VectorParameters, VectorParameters, LinearParameters]:
    """The parameters before the MTP layer: the norms of the next token's embedding and of the hidden state,
    and the matrix that makes one of both."""
    at, hidden = decoder.names.mtp, decoder.hidden_size
    matrix = LinearParameters((f"{at}.fc",), (hidden,), 2 * hidden, bias=False, part=TensorPart())
    of_embedding, of_hidden = (
        _norm(decoder, f"{at}.pre_fc_norm_{name}.weight") for name in ("embedding", "hidden")
    )
    return of_embedding, of_hidden, matrix


def read_all(decoder: DecoderSpec, source: WeightSource) -> None:
    """Ask `source` for every parameter of the model, once and whole."""
    embedding = read_embedding(decoder, source)
    _read_layers(decoder, source)
    read_lm_head(decoder, source, WHOLE, embedding)
    if decoder.mtp is not None:
        for each in mtp_parameters(decoder):
            each.read(source)
        _read_layers(decoder.mtp_body, source)


def _read_layers(decoder: DecoderSpec, source: WeightSource) -> None:
    """Ask for those of all layers, and of the last norm."""
    for index in range(len(decoder.layers)):
        own = layer_parameters(decoder, index)
        for matrix in own.matrices.values():
            matrix.read(source)
        for vector in own.vectors.values():
            vector.read(source)
    final_norm(decoder).read(source)
