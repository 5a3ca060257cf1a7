"""The dense decoder on a GPU: the network of `engine.runtime.reference.torch_decoder`, in fewer and larger
kernels.

Per layer, in decode: norm, QKV, norm-rotate-store, attention, output, norm, gate-up, SiLU, down. Norms and
SiLU may be parts of the products beside them (`kernels/autotune.py`): six kernels are left of the nine. All
matrix multiplications go through a `MatmulTable`; weights may be fp8, but for the embedding and the head.

`DecodeStep` is the whole of a decode step as a function of tensors on the device: gather the tokens, run the
network, sample, put the tokens where the next step finds them. It is what `engine.runtime.device.graphs`
captures. Before the first layer and behind the last one few kernels are left, too: one that begins the step
(`kernels/begin.py`), one per width of window that lists attention's work, the head, four that sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.collective.shard import WHOLE, Shard
from engine.runtime.device.device_sampling import DeviceSampling, SamplingScratch, sample
from engine.runtime.device.graphs import DecodeInputs
from engine.runtime.kernels.autotune import DeviceLinear, MatmulTable
from engine.runtime.kernels.begin import StepRows, begin_step
from engine.runtime.kernels.dependent_launch import dependent_launches
from engine.runtime.kernels.fused import Norm, QKNorm, ResidualStream, norm_rotate_store, norm_stream
from engine.runtime.kernels.matmul import Weight
from engine.runtime.models.pieces import lacking
from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.protocols import DecodePages, PrefillPages
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.parameters import (
    LinearParameters,
    Matrix,
    NormRole,
    final_norm,
    layer_parameters,
    read_embedding,
    read_lm_head,
)

IMPLEMENTED: Final = frozenset(
    {"norm.kind rms", "layer.norms before", "mlp.act silu", "mlp.bias", "attention.window", "attention.bias"}
    | {"attention.out_bias", "attention.qk_norm heads", "tied_embeddings", "fp8 Fp8Scheme"}
)
"""The pieces of models (`engine.runtime.models.pieces`) that the kernels implement, called as below."""

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
class _Layer:
    qkv: DeviceLinear
    qk_norm: QKNorm | None
    output: DeviceLinear
    gate_up: DeviceLinear
    down: DeviceLinear

    @property
    def linears(self) -> tuple[DeviceLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


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

    def hidden(self, step: StepTokens, cache: KVCache, attend: Attend) -> Tensor:
        """Store keys and values -> the final hidden states [T, hidden], normed."""
        ...

    def decode(
        self,
        inputs: DecodeInputs,
        tokens: Tensor,
        page_table: Tensor,
        cache: KVCache,
        attention: DecodePages,
    ) -> Tensor | ResidualStream:
        """A token for each of some slots, from the device's tables by slot -> what `logits` takes."""
        ...

    def logits(self, hidden: Any, out: Tensor | None = None) -> Tensor:
        """What `hidden` or `decode` gave, or rows of it -> logits [S, vocab], in `out` where that is
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
    ) -> None:
        """`config` describes the whole model; the rank's part of it is read. `fp8`: whether matrices are held
        in fp8."""
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
        self._rope_of = [ropes.index(own.rope) for own in config.attentions]
        load = _Loader(config, source, device, fp8, ranks.shard)
        self._embedding = read_embedding(config, source).to(device)
        self._layers = [load.layer(layer) for layer in range(len(config.layers))]
        norm = load.norm(final_norm(config).read(source))
        lm_head = read_lm_head(config, source, ranks.shard, self._embedding).to(device)
        self._lm_head = DeviceLinear(lm_head, norm=norm)

    @staticmethod
    def implements(config: DecoderSpec) -> str | None:
        """Why this network does not compute the model; None where it does."""
        if config.head_dim & (config.head_dim - 1):
            return f"head_dim {config.head_dim} is not a power of two"
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
        return self._embedding.dtype

    def rows(self, step: StepTokens) -> StepRows:
        """The rows of a step with tokens of any kind, gathered by torch."""
        angles = [rotary.angles(step.positions, torch.float32) for rotary in self._rotaries]
        return StepRows(F.embedding(step.token_ids, self._embedding), angles, step.pages, step.offsets)

    def begin(
        self, inputs: DecodeInputs, tokens: Tensor, page_table: Tensor, page_size: int
    ) -> tuple[StepRows, Tensor]:
        """A decode step's rows and their page tables, gathered from the device's tables by slot."""
        return begin_step(
            inputs.slots, inputs.lengths, tokens, page_table, self._embedding, self._frequencies, page_size
        )

    def hidden(self, step: StepTokens, cache: KVCache, attend: Attend) -> Tensor:
        return self.normed(self.forward(self.rows(step), cache, attend))

    def decode(
        self,
        inputs: DecodeInputs,
        tokens: Tensor,
        page_table: Tensor,
        cache: KVCache,
        attention: DecodePages,
    ) -> ResidualStream:
        step, tables = self.begin(inputs, tokens, page_table, cache.geometry.page_size)
        return self.forward(step, cache, attention.on_device(tables, inputs.lengths))

    def forward(self, step: StepRows, cache: KVCache, attend: Attend) -> ResidualStream:
        """Store keys and values -> the stream behind the last layer, [T, hidden]."""
        stream = ResidualStream(step.residual)
        for index, layer in enumerate(self._layers):
            qkv, stream = self.table.of_stream(stream, layer.qkv)
            keys, values = cache.keys[index], cache.values[index]
            q = norm_rotate_store(
                qkv,
                step.angles[self._rope_of[index]],
                layer.qk_norm,
                keys,
                values,
                step.pages,
                step.offsets,
                kv_scales=cache.scales[index],
                clear_tails=cache.clear_tails,
            )
            attended = attend(index, q).flatten(1)
            stream = self._added(stream, attended, layer.output)
            inner, stream = self.table.of_stream(stream, layer.gate_up)
            stream = self._added(stream, inner, layer.down)
        return stream

    def _added(self, stream: ResidualStream, x: Tensor, linear: DeviceLinear) -> ResidualStream:
        """The stream with a product added."""
        return stream.plus(self.ranks.all_reduce_(self.table.linear(x, linear.weight, linear.bias)))

    def normed(self, stream: ResidualStream) -> Tensor:
        """The final hidden states [T, hidden], as the head multiplies them. Overwrites the stream."""
        assert self._lm_head.norm is not None
        return norm_stream(stream, self._lm_head.norm)[0]

    def logits(self, hidden: Tensor | ResidualStream, out: Tensor | None = None) -> Tensor:
        """Normed hidden states [S, hidden], or the stream that is still to be normed -> logits [S, vocab] in
        the weights' type, in `out` where that is given."""
        own = self._own_logits(hidden, out if self.is_whole else None)
        if self.is_whole:
            return own
        logits = self.ranks.all_gather(own)[:, : self.config.vocab_size]
        return logits if out is None else out.copy_(logits)

    def _own_logits(self, hidden: Tensor | ResidualStream, out: Tensor | None) -> Tensor:
        """The logits of this rank's part of the vocabulary."""
        if isinstance(hidden, ResidualStream):
            return self.table.of_stream(hidden, self._lm_head, out=out)[0]
        return self.table.linear(hidden, self._lm_head.weight, out=out)


@dataclass(frozen=True, slots=True)
class _Loader:
    config: DecoderSpec
    source: WeightSource
    device: torch.device
    fp8: bool
    shard: Shard

    def layer(self, layer: int) -> _Layer:
        own = layer_parameters(self.config, layer, self.shard)
        norms = {role: each.read(self.source) for role, each in own.norms.items()}
        qk_norm = None
        if NormRole.QK in norms:
            q_weight, k_weight = norms[NormRole.QK].to(self.device).view(2, -1)
            qk_norm = QKNorm(q_weight, k_weight, self.config.norm.eps)
        return _Layer(
            qkv=self._linear(own.matrices[Matrix.QKV], norms[NormRole.ATTENTION]),
            qk_norm=qk_norm,
            output=self._linear(own.matrices[Matrix.OUTPUT]),
            gate_up=self._linear(own.matrices[Matrix.GATE_UP], norms[NormRole.MLP], gated=True),
            down=self._linear(own.matrices[Matrix.DOWN]),
        )

    def norm(self, weight: Tensor) -> Norm:
        return Norm(weight.to(self.device).float(), self.config.norm.eps)

    def _linear(
        self, parameters: LinearParameters, norm: Tensor | None = None, *, gated: bool = False
    ) -> DeviceLinear:
        """`norm`: the weight [hidden] of the norm before the product; None where there is no norm."""
        weight: Weight
        if self.fp8:
            weight, bias = parameters.read_fp8(self.source, self.device)
        else:
            weight, bias = parameters.read(self.source)
        return DeviceLinear(
            weight.to(self.device),
            None if bias is None else bias.to(self.device),
            None if norm is None else self.norm(norm),
            gated,
        )


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Implements `engine.runtime.host.model.PagedModel`: whole batches, prefill and decode rows, launched
    kernel by kernel."""

    decoder: DeviceNetwork
    cache: KVCache
    decode: DecodePages
    prefill: PrefillPages

    def forward(self, batch: PackedBatch) -> Tensor:
        """The final hidden states [T, hidden], on the device. Host tensors of the batch are copied without
        waiting."""
        n = batch.decode_rows
        tables = batch.page_tables.to(self.decoder.device, non_blocking=True)
        decode = self.decode.prepare(batch, tables[:n]) if n else None
        prefill = self.prefill.prepare(batch, tables[n:]) if n < len(batch.rows) else None

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
        return self.decoder.hidden(step, self.cache, attend)

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

    def __call__(
        self, hidden: Tensor | ResidualStream, slots: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden with S rows, as `DeviceNetwork.logits` takes it; slots, lengths [S] int32 -> tokens [S]
        int64, NUMERIC_FAILURE where logits were not finite, and their log-probabilities [S]. The logits stay
        in `scratch` until the next call."""
        logits = self.decoder.logits(hidden, self.scratch.logits[: len(slots)])
        return sample(logits, slots, lengths, self.columns, self.scratch, self.tokens)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A whole decode step: one token for each of some slots, from the device's tables by slot."""

    decoder: DeviceNetwork
    cache: KVCache
    attention: DecodePages
    tokens: Tensor
    """The known tokens by slot, [slots, more than max_model_len] int32."""
    page_table: Tensor
    """The page tables, [slots, pages per sequence] int32."""
    sampling: DeviceSampling
    scratch: SamplingScratch
    launches_dependently: bool = False
    """True if each kernel may start while the one before it ends (`kernels/dependent_launch.py`)."""

    def __call__(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        """The rows' tokens and log-probabilities, [rows] each, as `DeviceSampler` gives them."""
        with dependent_launches(self.launches_dependently):
            return self._run(inputs)

    def _run(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        stream = self.decoder.decode(inputs, self.tokens, self.page_table, self.cache, self.attention)
        sampler = DeviceSampler(self.decoder, self.tokens, self.sampling, self.scratch)
        return sampler(stream, inputs.slots, inputs.lengths)
