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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
    """Of a delta net, all of its inputs: what is convolved, the gate, the strength and the decay of each
    head."""


class NormRole(Enum):
    """The roles of a layer's norms."""

    ATTENTION = "attention_norm"
    ATTENTION_POST = "attention_post_norm"
    MLP = "mlp_norm"
    MLP_POST = "mlp_post_norm"
    QK = "qk_norm"


class DeltaRole(Enum):
    """The roles of a delta net's parameters that are no matrices."""

    CONV = "conv"
    RATE = "rate"
    STEP_BIAS = "step_bias"
    NORM = "norm"


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
        """The same part, on the device and in fp8: as the checkpoint stores it, or else rounded on the
        device."""
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
class NormParameters:
    """Weights of norms, one behind the other."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """The size of each, whole."""
    offset: float
    part: TensorPart
    order: HeadOrder | None = None

    def read(self, source: WeightSource) -> Tensor:
        """The factors of what is normed, [sum of sizes]: float32 with an offset, else in the source's
        type."""
        weight = source.stack(self.names, self.sizes, part=self.part)
        if self.order is not None:
            weight = weight[self.order.rows(len(weight), weight.device)]
        return weight.float() + self.offset if self.offset else weight


@dataclass(frozen=True, slots=True)
class DeltaParameters:
    """A parameter of a delta net that is no matrix: one number, or one filter, for each of its rows."""

    name: str
    size: int
    """The stored rows."""
    columns: tuple[int, ...]
    spans: tuple[Span, ...]
    """The rank's rows."""

    def read(self, source: WeightSource) -> Tensor:
        """[rank's rows, *columns], float32"""
        names, sizes = [self.name] * len(self.spans), [self.size] * len(self.spans)
        return source.stack(names, sizes, *self.columns, part=TensorPart(self.spans)).float()


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Those that a layer has, in the order in which it uses them."""

    matrices: dict[Matrix, LinearParameters]
    norms: dict[NormRole, NormParameters]
    delta: dict[DeltaRole, DeltaParameters]


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
    def read(parameters: Mapping[DeltaRole, DeltaParameters], source: WeightSource) -> DeltaWeights:
        read = {role: each.read(source) for role, each in parameters.items()}
        conv, rate = read[DeltaRole.CONV][:, 0].T.contiguous(), read[DeltaRole.RATE].exp()
        return DeltaWeights(conv, rate, read[DeltaRole.STEP_BIAS], read[DeltaRole.NORM])

    def to(self, device: torch.device) -> DeltaWeights:
        return DeltaWeights(*(getattr(self, own.name).to(device) for own in fields(self)))


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

    delta: dict[DeltaRole, DeltaParameters] = {}
    if isinstance(attention, DeltaNet):
        delta = _delta(attention, names, at, shard)
        modules, rows, spans = _delta_inputs(attention, names, shard)
        matrices = {
            Matrix.DELTA: stacked(modules, rows, spans, bias=False),
            Matrix.OUTPUT: back(
                names.delta_output, attention.values, shard.span(attention.values), bias=False
            ),
        }
    else:
        dim, count = attention.head_dim, attention.heads
        rows, spans = _qkv(attention, shard)
        matrices = {
            Matrix.QKV: stacked(names.qkv, rows, spans, attention.bias, _order(decoder, index, shard)),
            Matrix.OUTPUT: back(names.output, count * dim, shard.span(count, dim), attention.out_bias),
        }
    up = [inner] * (2 if mlp.gated else 1)
    matrices[Matrix.GATE_UP] = stacked(names.gate_up, up, [shard.span(inner)] * len(up), mlp.bias)
    matrices[Matrix.DOWN] = back(names.down, inner, shard.span(inner), mlp.bias)
    return LayerParameters(matrices, _norms(decoder, index, shard), delta)


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


def _delta(delta: DeltaNet, names: Names, at: str, shard: Shard) -> dict[DeltaRole, DeltaParameters]:
    channels, heads = _channel_spans(delta, shard), (shard.span(delta.value_heads),)
    of_norm: tuple[Span, ...] = ((0, delta.value_dim),)
    return {
        DeltaRole.CONV: DeltaParameters(at + names.delta_conv, delta.channels, (1, delta.kernel), channels),
        DeltaRole.RATE: DeltaParameters(at + names.delta_rate, delta.value_heads, (), heads),
        DeltaRole.STEP_BIAS: DeltaParameters(at + names.delta_step_bias, delta.value_heads, (), heads),
        DeltaRole.NORM: DeltaParameters(at + names.delta_norm, delta.value_dim, (), of_norm),
    }


def _norms(decoder: DecoderSpec, index: int, shard: Shard) -> dict[NormRole, NormParameters]:
    layer, names, at = decoder.layers[index], decoder.names, f"{decoder.names.layers}.{index}."
    attention, hidden, offset = layer.attention, decoder.hidden_size, decoder.norm.offset
    found = {}
    for role, name, places in (
        (NormRole.ATTENTION, names.attention_norm, ("before", "both", "parallel")),
        (NormRole.ATTENTION_POST, names.attention_post_norm, ("behind", "both")),
        (NormRole.MLP, names.mlp_norm, ("before", "both")),
        (NormRole.MLP_POST, names.mlp_post_norm, ("behind", "both")),
    ):
        if layer.norms in places:
            found[role] = NormParameters((f"{at}{name}.weight",), (hidden,), offset, TensorPart())
    if isinstance(attention, Attention) and attention.qk_norm is not None:
        counts = (attention.heads, attention.kv_heads) if attention.qk_norm == "width" else (1, 1)
        dim, is_wide = attention.head_dim, attention.qk_norm == "width"
        spans = tuple(shard.span(count, dim) if is_wide else (0, dim) for count in counts)
        order = _order(decoder, index, shard)
        if order is not None and not is_wide:
            order = HeadOrder(2, order.elements)
        weights = tuple(f"{at}{name}.weight" for name in names.qk_norm)
        sizes = tuple(count * dim for count in counts)
        found[NormRole.QK] = NormParameters(weights, sizes, offset, TensorPart(spans), order)
    return found


def _order(decoder: DecoderSpec, index: int, shard: Shard) -> HeadOrder | None:
    """The order of the rank's heads of queries and keys."""
    attention = decoder.layers[index].attention
    assert isinstance(attention, Attention)
    elements = None if attention.rope is None else attention.rope.order(attention.head_dim)
    if elements is None and not attention.output_gate:
        return None
    heads, kv_heads = (last - first for first, last in map(shard.span, (attention.heads, attention.kv_heads)))
    gates = heads if attention.output_gate else 0
    return HeadOrder(heads + kv_heads, elements or range(attention.head_dim), gates)


def read_embedding(decoder: DecoderSpec, source: WeightSource) -> Tensor:
    """[vocab, hidden]"""
    return source.stack([decoder.names.embedding], [decoder.vocab_size], decoder.hidden_size)


def final_norm(decoder: DecoderSpec) -> NormParameters:
    """[hidden]"""
    names, sizes = (decoder.names.final_norm,), (decoder.hidden_size,)
    return NormParameters(names, sizes, decoder.norm.offset, TensorPart())


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


@dataclass(frozen=True, slots=True)
class MtpParameters:
    """What the MTP layer has before it: the norms of the next token's embedding and of the hidden state, and
    the matrix that makes one of both."""

    embedding_norm: NormParameters
    hidden_norm: NormParameters
    matrix: LinearParameters

    @staticmethod
    def of(decoder: DecoderSpec) -> MtpParameters:
        at, hidden = decoder.names.mtp, decoder.hidden_size

        def norm(name: str) -> NormParameters:
            return NormParameters((f"{at}.{name}.weight",), (hidden,), decoder.norm.offset, TensorPart())

        matrix = LinearParameters((f"{at}.fc",), (hidden,), 2 * hidden, bias=False, part=TensorPart())
        return MtpParameters(norm("pre_fc_norm_embedding"), norm("pre_fc_norm_hidden"), matrix)


def read_all(decoder: DecoderSpec, source: WeightSource) -> None:
    """Ask `source` for every parameter of the model, once and whole."""
    embedding = read_embedding(decoder, source)
    _read_layers(decoder, source)
    read_lm_head(decoder, source, WHOLE, embedding)
    if decoder.mtp is not None:
        before = MtpParameters.of(decoder)
        for each in (before.embedding_norm, before.hidden_norm, before.matrix):
            each.read(source)
        _read_layers(decoder.mtp_body, source)


def _read_layers(decoder: DecoderSpec, source: WeightSource) -> None:
    """Ask for those of all layers, and of the last norm."""
    for index in range(len(decoder.layers)):
        own = layer_parameters(decoder, index)
        for matrix in own.matrices.values():
            matrix.read(source)
        for norm in own.norms.values():
            norm.read(source)
        for other in own.delta.values():
            other.read(source)
    final_norm(decoder).read(source)
