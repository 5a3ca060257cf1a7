"""The dense decoder on a GPU: the network of `engine.runtime.reference.torch_decoder`, in fewer and larger
kernels.

Per layer, in decode: norm, QKV, norm-rotate-store, attention, output, norm, gate-up, SiLU, down. Norms and
SiLU may be parts of the products beside them (`kernels/autotune.py`): six kernels are left of the nine. A
delta net is one in the place of norm-rotate-store and attention (`kernels/delta_net.py`). All matrix
multiplications go through a `MatmulTable`; weights may be fp8, but for the embedding and the head.

`DecodeStep` is the whole of a decode step as a function of tensors on the device: gather the tokens, run the
network, sample, put the tokens where the next step finds them. It is what `engine.runtime.device.graphs`
captures. Before the first layer and behind the last one few kernels are left, too: one that begins the step
(`kernels/begin.py`), one per width of window that lists attention's work, the head, four that sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.collective.shard import WHOLE, Shard
from engine.runtime.device.device_sampling import DeviceSampling, SamplingScratch, sample
from engine.runtime.device.graphs import DecodeInputs
from engine.runtime.device.slots import DeviceBatch
from engine.runtime.kernels.autotune import DeviceLinear, MatmulTable
from engine.runtime.kernels.begin import StepRows, begin_step
from engine.runtime.kernels.delta_net import (
    Cells,
    DeltaLayer,
    DeltaRows,
    delta_chunks,
    delta_step,
    turn_windows,
)
from engine.runtime.kernels.delta_net import implements as takes_delta
from engine.runtime.kernels.dependent_launch import dependent_launches
from engine.runtime.kernels.fused import (
    Norm,
    QKNorm,
    ResidualStream,
    mean_squares,
    norm_rotate_store,
    norm_stream,
    rms_norm,
    sigmoid_mul,
)
from engine.runtime.kernels.matmul import Weight
from engine.runtime.models.pieces import EVERYWHERE, lacking
from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet
from engine.runtime.reference.delta_net import StepStates
from engine.runtime.reference.torch_decoder import tempers
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import (
    Ahead,
    DecodePages,
    DecodeRows,
    PrefillPages,
    PrefillRows,
    chunks_of,
    to_device,
)
from engine.runtime.step.states import States
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.parameters import (
    DeltaWeights,
    LinearParameters,
    Matrix,
    Vector,
    final_norm,
    layer_parameters,
    read_embedding,
    read_lm_head,
)

IMPLEMENTED: Final = EVERYWHERE
"""The pieces of models that the kernels implement, called as below."""

Attend = Callable[[int, Tensor], Tensor]
"""(layer, queries [T, H, D]) -> the same shape; keys and values are in the cache."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step's tokens, packed: [T] int64 each, on the device."""

    token_ids: Tensor
    positions: Tensor
    pages: Tensor
    """The page that a token's keys and values go to."""
    offsets: Tensor
    """The token's place in that page."""


@dataclass(frozen=True, slots=True)
class StepTables:
    """The device's memory of sequences, in which a decode step finds its tokens."""

    tokens: Tensor
    """The known tokens by slot, [slots, more than max_model_len] int32."""
    page_table: Tensor
    """The page tables by slot, [slots, pages per sequence] int32."""
    cache: KVCache
    attention: DecodePages
    states: States | None = None
    """The states by slot, of a model that has them."""


@dataclass(frozen=True, slots=True)
class _Attention:
    rope: int
    """The number of its rope among the model's."""
    qk_norm: QKNorm | None
    gated: bool
    """True if what a head has found is multiplied by sigmoid of its gate."""
    wide: tuple[int, int] | None
    """The heads of queries and of keys, where those of all ranks are normed as one."""


@dataclass(frozen=True, slots=True)
class _Layer:
    inputs: DeviceLinear
    """The product for attention's queries, keys, values and gates, or for all that a delta net takes."""
    attention: _Attention | DeltaLayer
    place: int
    """Its number among the layers with keys and values, or among those with a state."""
    output: DeviceLinear
    post_norm: Norm | None
    """Norms what attention, or the delta net, adds to the stream."""
    gate_up: DeviceLinear
    down: DeviceLinear
    mlp_post_norm: Norm | None

    @property
    def linears(self) -> tuple[DeviceLinear, ...]:
        return self.inputs, self.output, self.gate_up, self.down


class DeviceNetwork(Protocol):
    """Weights on a device, and the forward pass: in our kernels below, in torch's operations in
    `torch_on_device.py`."""

    table: MatmulTable

    @property
    def ranks(self) -> Collective: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def linears(self) -> list[DeviceLinear]:
        """The products whose kernels are measured."""
        ...

    def hidden(
        self, step: StepTokens, cache: KVCache, attend: Attend, states: StepStates | None = None
    ) -> Tensor:
        """Store keys and values, move states on -> the final hidden states [T, hidden], normed. `states`: of
        a model that has them."""
        ...

    def decode(self, inputs: DecodeInputs, kept: StepTables) -> Tensor | ResidualStream:
        """A token for each of some slots, or several where they verify drafts -> what `logits` takes."""
        ...

    def logits(self, hidden: Any, out: Tensor | None = None) -> Tensor:
        """Take the result of `hidden` or `decode`, or rows of it -> logits [S, vocab], in `out` where that is
        given."""
        ...


class DeviceDecoder:
    """Implements `DeviceNetwork` with our kernels."""

    def __init__(
        self,
        config: DecoderSpec,
        source: WeightSource,
        device: torch.device,
        *,
        fp8: bool = False,
        ranks: Collective = ALONE,
        beside: DeviceDecoder | None = None,
    ) -> None:
        """`config` describes the whole model; the rank's part of it is read. `fp8`: whether matrices are held
        in fp8. `beside`: a network whose embedding and head are its own, too."""
        assert self.implements(config) is None
        self.config: Final = ranks.shard.of(config)
        self.ranks: Final = ranks
        self.device: Final = device
        self.table = MatmulTable({})
        """The table of kernels; replaced by one that was measured on the device."""
        ropes = config.ropes
        with device:
            self._rotaries = [Rotary(rope, config.head_dim, config.context_len) for rope in ropes]
        self._frequencies = torch.stack([rotary.table for rotary in self._rotaries])
        """[ropes, 2, D/2]"""
        self._tempering = config.attention.tempering
        load = _Loader(config, source, device, fp8, ranks.shard, self.config)
        self.embedding: Tensor = (
            read_embedding(config, source).to(device) if beside is None else beside.embedding
        )
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=self.embedding.dtype))
        """The factor is rounded to the embedding's type, as in transformers."""
        self._layers = [load.layer(layer) for layer in range(len(config.layers))]
        norm = load.norm(final_norm(config).read(source))
        self._lm_head: DeviceLinear = (
            DeviceLinear(read_lm_head(config, source, ranks.shard, self.embedding).to(device), norm=norm)
            if beside is None
            else replace(beside._lm_head, norm=norm)
        )

    @staticmethod
    def implements(config: DecoderSpec) -> str | None:
        """Why this network does not compute the model; None where it does."""
        if config.head_dim & (config.head_dim - 1):
            return f"head_dim {config.head_dim} is not a power of two"
        if len({own.tempering for own in config.attentions}) > 1:
            return "layers whose queries are tempered in different ways"
        if any(layer.mlp.gated == (layer.mlp.act == "relu2") for layer in config.layers):
            return "gated relu2, or others without gates: not implemented"
        if odd := [own for own in config.deltas if not takes_delta(own)]:
            return f"delta nets with keys of {odd[0].key_dim} and values of {odd[0].value_dim}"
        return lacking(config, IMPLEMENTED)

    @property
    def is_whole(self) -> bool:
        """True if no other rank has a part of the model."""
        return self.ranks.shard == WHOLE

    @property
    def linears(self) -> list[DeviceLinear]:
        """All products with weights: four per layer, and the head."""
        return [linear for layer in self._layers for linear in layer.linears] + [self._lm_head]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def rows(self, step: StepTokens) -> StepRows:
        """The rows of a step with tokens of any kind, gathered by torch."""
        angles = self.angles(step.positions)
        residual = F.embedding(step.token_ids, self.embedding)
        if self._embed_scale != 1.0:
            residual = residual * self._embed_scale
        own = self._tempering
        factors = None if own is None else tempers(own, step.positions).view(-1)
        return StepRows(residual, angles, step.pages, step.offsets, factors)

    def angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of positions [T], for each kind of layer."""
        return [rotary.angles(positions, torch.float32) for rotary in self._rotaries]

    def hidden(
        self, step: StepTokens, cache: KVCache, attend: Attend, states: StepStates | None = None
    ) -> Tensor:
        return self.normed(self.forward(self.rows(step), cache, attend, states))

    def decode(self, inputs: DecodeInputs, kept: StepTables) -> ResidualStream:
        page_size = kept.cache.geometry.page_size
        own = self.embedding, self._frequencies, page_size, self._embed_scale, self._tempering
        step, tables = begin_step(inputs.slots, inputs.lengths, kept.tokens, kept.page_table, *own)
        attend = kept.attention.on_device(tables, inputs.lengths, inputs.ahead)
        return self.forward(step, kept.cache, attend, inputs.bound(kept.states))

    def forward(
        self, step: StepRows, cache: KVCache, attend: Attend, states: StepStates | None = None
    ) -> ResidualStream:
        """Store keys and values, move states on -> the stream behind the last layer, [T, hidden]."""
        stream = ResidualStream(step.residual)
        recur = None if states is None else _Recurrence.of(states, self.device)
        for layer in self._layers:
            x, stream = self.table.of_stream(stream, layer.inputs)
            if isinstance(layer.attention, _Attention):
                mixed = self._attended(x, layer.attention, layer.place, step, cache, attend)
            else:
                assert recur is not None
                mixed = recur(x, layer.attention, layer.place)
            stream = self._added(stream, mixed, layer.output, layer.post_norm)
            inner, stream = self.table.of_stream(stream, layer.gate_up)
            if not layer.gate_up.gated:
                inner = inner.relu_().square_()
            stream = self._added(stream, inner, layer.down, layer.mlp_post_norm)
        return stream

    def store_first(self, step: StepRows, cache: KVCache) -> None:
        """Store the keys and values of the first layer, which attends."""
        layer = self._layers[0]
        assert isinstance(layer.attention, _Attention)
        qkv, _ = self.table.of_stream(ResidualStream(step.residual), layer.inputs)
        self._stored(qkv, layer.attention, layer.place, step, cache)

    def _attended(
        self, qkv: Tensor, own: _Attention, place: int, step: StepRows, cache: KVCache, attend: Attend
    ) -> Tensor:
        """[T, H * D]"""
        attended = attend(place, self._stored(qkv, own, place, step, cache)).flatten(1)
        return sigmoid_mul(attended, qkv) if own.gated else attended

    def _stored(self, qkv: Tensor, own: _Attention, place: int, step: StepRows, cache: KVCache) -> Tensor:
        """Queries [T, H, D], once keys and values are stored."""
        norm = own.qk_norm
        if own.wide is not None:
            assert norm is not None
            squares = mean_squares(qkv, *own.wide, self.config.head_dim)
            if not self.is_whole:
                squares = self.ranks.all_reduce_(squares).div_(self.ranks.shard.size)
            norm = replace(norm, squares=squares)
        return norm_rotate_store(
            qkv,
            step.angles[own.rope],
            norm,
            cache.keys[place],
            cache.values[place],
            step.pages,
            step.offsets,
            kv_scales=cache.scales[place],
            clear_tails=cache.clear_tails,
            gated=own.gated,
            tempers=step.tempers,
        )

    def _added(
        self, stream: ResidualStream, x: Tensor, linear: DeviceLinear, norm: Norm | None
    ) -> ResidualStream:
        """The stream with a product added, normed where there is a norm behind it."""
        change = self.ranks.all_reduce_(self.table.linear(x, linear.weight, linear.bias))
        if norm is not None:
            change = rms_norm(change, norm.weight, norm.eps)
        scale = self.config.residual_scale
        return stream.plus(change if scale == 1.0 else change.mul_(scale))

    def normed(self, stream: ResidualStream) -> Tensor:
        """The final hidden states [T, hidden], as the head multiplies them. Overwrites the stream."""
        assert self._lm_head.norm is not None
        return norm_stream(stream, self._lm_head.norm)[0]

    def logits(self, hidden: Tensor | ResidualStream, out: Tensor | None = None) -> Tensor:
        """Normed hidden states [S, hidden], or the stream that is still to be normed -> logits [S, vocab] in
        the weights' type, in `out` where that is given."""
        own = self._own_logits(hidden, out if self.is_whole else None)
        if self.is_whole:
            return self._shaped(own)
        logits = self._shaped(self.ranks.all_gather(own)[:, : self.config.vocab_size])
        return logits if out is None else out.copy_(logits)

    def _shaped(self, logits: Tensor) -> Tensor:
        """The head's products, scaled and capped in place."""
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if scale != 1.0:
            logits.mul_(scale)
        return logits if cap is None else logits.copy_((logits.float() / cap).tanh() * cap)

    def _own_logits(self, hidden: Tensor | ResidualStream, out: Tensor | None) -> Tensor:
        """The logits of this rank's part of the vocabulary."""
        if isinstance(hidden, ResidualStream):
            return self.table.of_stream(hidden, self._lm_head, out=out)[0]
        return self.table.linear(hidden, self._lm_head.weight, out=out)


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """The delta nets' states, bound to a step's rows."""

    states: StepStates
    chunks: DeltaRows | None
    """The rows of many tokens; None where there are none."""

    @staticmethod
    def of(states: StepStates, device: torch.device) -> _Recurrence:
        chunks, order = states.chunks, states.states.order
        return _Recurrence(states, DeltaRows.of(chunks, device, order=order) if chunks else None)

    def __call__(self, x: Tensor, layer: DeltaLayer, place: int) -> Tensor:
        """A delta net's inputs [T, any] -> [T, Hv * Dv]."""
        step, out = self.states, x.new_empty(len(x), layer.spec.values)
        kept = step.states.inputs[place], step.states.heads[place]
        if step.decode_rows:
            assert step.slots is not None
            assert step.lengths is not None
            cells = None if (order := step.states.order) is None else Cells(order, step.states.slots)
            delta_step(x, step.slots, step.lengths, layer, *kept, out, cells, step.ahead)
        if self.chunks is not None:
            delta_chunks(x, self.chunks, layer, *kept, out)
        return out


@dataclass(frozen=True, slots=True)
class _Loader:
    config: DecoderSpec
    source: WeightSource
    device: torch.device
    fp8: bool
    shard: Shard
    share: DecoderSpec
    """The model as this rank computes it."""

    def layer(self, layer: int) -> _Layer:
        own = layer_parameters(self.config, layer, self.shard)
        norms = {role: each.read(self.source).to(self.device) for role, each in own.vectors.items()}
        attention, mlp = self.share.layers[layer].attention, self.share.layers[layer].mlp
        mixing: _Attention | DeltaLayer
        if isinstance(attention, DeltaNet):
            inputs, eps = own.matrices[Matrix.DELTA], self.config.norm.eps
            mixing = DeltaLayer(attention, DeltaWeights.of(norms), eps)
        else:
            inputs, mixing = own.matrices[Matrix.QKV], self._attention(attention, norms.get(Vector.QK_NORM))
        return _Layer(
            inputs=self._linear(inputs, norms.get(Vector.ATTENTION_NORM)),
            attention=mixing,
            place=self.config.places[layer],
            output=self._linear(own.matrices[Matrix.OUTPUT]),
            post_norm=self.norm(norms.get(Vector.ATTENTION_POST_NORM)),
            gate_up=replace(
                self._linear(own.matrices[Matrix.GATE_UP], norms.get(Vector.MLP_NORM)),
                gated=mlp.gated,
                gelu=mlp.act == "gelu_tanh",
            ),
            down=self._linear(own.matrices[Matrix.DOWN]),
            mlp_post_norm=self.norm(norms.get(Vector.MLP_POST_NORM)),
        )

    def _attention(self, own: Attention, norm: Tensor | None) -> _Attention:
        qk_norm = None
        if norm is not None:
            counts = (own.heads, own.kv_heads) if own.qk_norm == "width" else (1, 1)
            q_weight, k_weight = norm.split([count * own.head_dim for count in counts])
            qk_norm = QKNorm(q_weight, k_weight, self.config.norm.eps, own.qk_norm == "rotated heads")
        wide = (own.heads, own.kv_heads) if own.qk_norm == "width" else None
        return _Attention(self.config.ropes.index(own.rope), qk_norm, own.output_gate, wide)

    def norm(self, weight: Tensor | None) -> Norm | None:
        return None if weight is None else Norm(weight.to(self.device).float(), self.config.norm.eps)

    def _linear(self, parameters: LinearParameters, norm: Tensor | None = None) -> DeviceLinear:
        """`norm`: the weight [hidden] of the norm before the product; None where there is no norm."""
        weight: Weight
        if self.fp8:
            weight, bias = parameters.read_fp8(self.source, self.device)
        else:
            weight, bias = parameters.read(self.source)
        return DeviceLinear(
            weight.to(self.device),
            None if bias is None else bias.to(self.device),
            self.norm(norm),
        )


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Implements `engine.runtime.host.model.PagedModel`: whole batches, prefill and decode rows, launched
    kernel by kernel."""

    decoder: DeviceNetwork
    cache: KVCache
    decode: DecodePages
    prefill: PrefillPages
    states: States | None = None
    """The states by slot, of a model that has them."""

    def forward(self, batch: PackedBatch) -> Tensor:
        """The final hidden states [T, hidden], on the device. Host tensors of the batch are copied without
        waiting."""
        return self._forward(batch, batch.decode_rows, *self._attending(batch), self._bound(batch))

    def _attending(self, batch: PackedBatch) -> tuple[DecodeRows | None, PrefillRows | None]:
        """Attention of the rows of one token, and of those behind them."""
        n, rows = batch.decode_rows, batch.rows
        tables = batch.page_tables.to(self.decoder.device, non_blocking=True)
        decode = self.decode.prepare([row.end for row in rows[:n]], tables[:n]) if n else None
        return decode, self.prefill.of_chunks(chunks_of(rows[n:]), tables[n:]) if n < len(rows) else None

    def verify(self, batch: DeviceBatch) -> Tensor:
        """`forward` of a batch in which rows verify drafts. What is for decodes computes their tokens, too,
        where it has kernels for several tokens of a row; else they are chunks."""
        ahead, n = batch.ahead, batch.stream_tokens
        assert ahead is not None
        own = ahead.first(n)
        rows = batch.rows[batch.decode_rows + len(batch.plan.drafts) :]
        states = None
        if self.states is not None:
            slots, lengths = batch.sampled_slots[:n], batch.stream_lengths
            states = StepStates(self.states, rows, n, slots, lengths, ahead=own)
        if not self.decode.together:
            return self._forward(batch, batch.decode_rows, *self._attending(batch), states)
        decode = self.decode.on_device(batch.token_tables[:n], batch.stream_lengths, own)
        prefill = None
        if rows:
            prefill = self.prefill.of_chunks(chunks_of(rows), batch.page_tables[-len(rows) :])
        return self._forward(batch, n, decode, prefill, states)

    def _forward(
        self,
        batch: PackedBatch,
        n: int,
        decode: DecodeRows | None,
        prefill: PrefillRows | None,
        states: StepStates | None,
    ) -> Tensor:
        """`decode` computes the first n tokens."""

        def attend(layer: int, q: Tensor) -> Tensor:
            if prefill is None:
                assert decode is not None
                return decode(layer, q)
            if decode is None:
                return prefill(layer, q)
            return torch.cat((decode(layer, q[:n]), prefill(layer, q[n:])))

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.decoder.device, non_blocking=True)

        places = batch.places
        step = StepTokens(
            moved(batch.token_ids), moved(batch.positions), moved(places.pages), moved(places.offsets)
        )
        return self.decoder.hidden(step, self.cache, attend, states)

    def _bound(self, batch: PackedBatch) -> StepStates | None:
        if self.states is None:
            return None
        count, device = batch.decode_rows, self.decoder.device
        rows = batch.rows[:count]
        slots = to_device([row.slot for row in rows], device)
        lengths = to_device([row.end for row in rows], device)
        return StepStates(self.states, batch.rows, count, slots, lengths)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden).float()


@dataclass(frozen=True, slots=True)
class DeviceSampler:
    """Samples tokens from hidden states, and stores them where the next step finds them."""

    decoder: DeviceNetwork
    tokens: Tensor
    """The known tokens by slot, [slots, more than max_model_len] int32: new ones are written here."""
    columns: DeviceSampling
    scratch: SamplingScratch
    states: States | None = None
    """The states of a model that has them: the windows of right drafts become their slots' own."""

    def __call__(
        self, hidden: Tensor | ResidualStream, slots: Tensor, lengths: Tensor, ahead: Ahead | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden with S rows, as `DeviceNetwork.logits` takes it; slots, lengths [S] int32 -> tokens [S]
        int64, NUMERIC_FAILURE where logits were not finite, and their log-probabilities [S]. The logits stay
        in `scratch` until the next call. `ahead`: of a step in which rows verify drafts."""
        logits = self.decoder.logits(hidden, self.scratch.logits[: len(slots)])
        found = sample(logits, slots, lengths, self.columns, self.scratch, self.tokens, ahead)
        if ahead is not None and self.states is not None:
            assert self.states.order is not None
            cells = Cells(self.states.order, self.states.slots)
            turn_windows(slots, ahead, self.scratch.agreed, cells)
        return found


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A whole decode step: one token for each of some slots, from the device's tables by slot, and one behind
    each of their drafts."""

    kept: StepTables
    sampler: DeviceSampler
    launches_dependently: bool = False
    """True if each kernel may start while the one before it ends (`kernels/dependent_launch.py`)."""
    hidden: Tensor | None = None
    """A place for the final hidden states, [rows, hidden], where an MTP layer goes on from them."""

    def __call__(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        """The rows' tokens and log-probabilities, [rows] each, as `DeviceSampler` gives them."""
        with dependent_launches(self.launches_dependently):
            decoder = self.sampler.decoder
            stream = decoder.decode(inputs, self.kept)
            if self.hidden is not None:
                assert isinstance(decoder, DeviceDecoder)
                assert isinstance(stream, ResidualStream)
                stream = self.hidden[: len(inputs.slots)].copy_(decoder.normed(stream))
            return self.sampler(stream, inputs.slots, inputs.lengths, inputs.ahead)
