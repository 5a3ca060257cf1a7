"""The C++ decoder: the compiled library through ctypes, with plain pointers and the interpreter lock released
in every call, and the `PagedModel` that hands it weights, pages and steps.
"""

from __future__ import annotations

import ctypes
import platform
import weakref
from collections.abc import Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, Array, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.collective.shard import WHOLE, Shard
from engine.runtime.models.pieces import EVERYWHERE, lacking
from engine.runtime.models.rotary import Rotary
from engine.runtime.models.spec import Attention, DecoderSpec, DeltaNet, Rope, Tempering
from engine.runtime.native.build import ISAS, library_path
from engine.runtime.setup.hardware import PROC, processor_flags
from engine.runtime.step.batch import PackedBatch
from engine.runtime.step.kv_cache import KVCache
from engine.runtime.step.seats import SamplingColumns
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.checkpoint import WeightSource
from engine.runtime.weights.parameters import (
    Matrix,
    Vector,
    final_norm,
    layer_parameters,
    read_embedding,
    read_lm_head,
)

# -- the library ----------------------------------------------------------------------------------


_AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
NEEDED_FLAGS: Final[Mapping[str, frozenset[str]]] = {
    "amx_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile"},
    "avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    "portable": frozenset(),
}
assert list(NEEDED_FLAGS) == list(ISAS)
# <asm/unistd_64.h>, <asm/prctl.h>, <asm/fpu/types.h>
SYS_ARCH_PRCTL: Final = 158
ARCH_REQ_XCOMP_PERM: Final = 0x1023
XFEATURE_XTILEDATA: Final = 18


def _of(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type."""
    return tuple((name, kind) for name in names.split())


class Shape(ctypes.Structure):
    """`PenstockShape` in decoder.cpp."""

    _fields_ = (
        *_of(c_int64, "vocab hidden inner layers heads kv_heads head_dim page_size"),
        *_of(c_float, "norm_eps scale embed_scale residual_scale logit_scale logit_softcap temper_beta"),
        *_of(c_int64, "temper_len key_heads value_heads key_dim value_dim kernel"),
        *_of(c_int32, "act gated qk_norm output_gate centred parallel bf16 quantised"),
    )


class Step(ctypes.Structure):
    """`PenstockStep` in decoder.cpp."""

    _fields_ = (
        ("rows", c_int64),
        *_of(POINTER(c_int64), "slots starts lengths"),
        *_of(c_int64, "tokens_stride tables_stride"),
        *_of(c_void_p, "tokens tables"),
        *_of(POINTER(c_int64), "places behind"),
    )


class NativeDraw(ctypes.Structure):
    """`PenstockDraw` in decoder.cpp."""

    _fields_ = (
        *_of(c_int64, "count vocab"),
        *_of(POINTER(c_int64), "rows slots positions"),
        *_of(c_void_p, "logits temperature min_p top_k top_p seed"),
        ("masks", POINTER(c_char_p)),
        ("mask_len", c_int64),
    )


_NO_MEMORY: Final = -1
_AddUp: Final = CFUNCTYPE(c_int32, POINTER(c_float), c_int64)
"""`PenstockSum` in decoder.cpp."""
_SIGNATURES: Final[Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "penstock_isa": (c_char_p, ()),
    "penstock_new": (c_void_p, (POINTER(Shape), c_int32)),
    "penstock_delete": (None, (c_void_p,)),
    "penstock_set_linear": (c_int32, (c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int64, c_void_p)),
    "penstock_set_vector": (c_int32, (c_void_p, c_int64, c_int32, c_void_p, c_int64)),
    "penstock_set_cache": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "penstock_set_sum": (None, (c_void_p, _AddUp)),
    "penstock_set_states": (None, (c_void_p, c_int64, c_void_p, c_void_p)),
    "penstock_set_embedding": (None, (c_void_p, c_void_p)),
    "penstock_set_angles": (None, (c_void_p, c_int64, c_void_p, c_void_p)),
    "penstock_forward": (c_int32, (c_void_p, POINTER(Step), c_void_p)),
    "penstock_logits": (c_int32, (c_void_p, c_void_p, c_int64, c_void_p)),
    "penstock_draw": (c_int32, (c_void_p, POINTER(NativeDraw), c_void_p)),
}


def built_isas(proc: Path = PROC) -> list[str]:
    """The instruction sets that have a library and that this processor and its system support, best first."""
    flags = processor_flags(proc)
    return [
        isa
        for isa, needed in NEEDED_FLAGS.items()
        if needed <= flags and library_path(isa).exists() and ("amx_tile" not in needed or may_use_tiles())
    ]


@cache
def may_use_tiles() -> bool:
    """True if the registers of the matrix unit may be used: Linux (5.16 or later) grants them to all threads
    of the process on request, as they are 8 KiB more to save."""
    if platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _checked(result: int | None, function: Any, _: object) -> int | None:
    """The result of a function that returns a model, or whether it had the memory. Raises MemoryError."""
    if result == (None if function.restype is c_void_p else _NO_MEMORY):
        raise MemoryError("the native kernels can have no more memory, or no more threads")
    return result


@cache
def library(isa: str) -> ctypes.CDLL:
    """The library for one of `built_isas()`."""
    loaded = ctypes.CDLL(str(library_path(isa)))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
        if result in (c_int32, c_void_p):
            function.errcheck = _checked
    assert loaded.penstock_isa() == isa.encode()
    return loaded


# -- the model ------------------------------------------------------------------------------------


_LINEARS: Final = (*Matrix, None)
"""The roles of matrices in the order of `PenstockLinear`; None is the head."""
_VECTORS: Final = (*Vector, None)
"""The roles of what is no matrix in the order of `PenstockVector`; None is the last norm."""
LANES_MAX: Final = 16
"""The most lanes of a vector: sizes that are cut into vectors must be multiples of it."""
TAPS_MAX: Final = 16
"""The most tokens that the convolution of a delta net sees (delta_net.h)."""
DRAFTS_MAX: Final = 15
"""The most drafts of a row: with them it has the tokens of one of a prompt that is worth its own loop."""
_ACTS: Final = ("silu", "gelu_tanh", "relu2")
"""Functions of an MLP in the order of `PenstockAct`."""
_OF_ATTENTION: Final = ("heads", "kv_heads", "head_dim", "scale", "output_gate")
_OF_DELTA: Final = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
"""Fields of descriptions that `Shape` has by the same names."""
_QK_NORMS: Final = (None, "heads", "rotated heads", "width")
"""The places of norms of queries and keys in the order of `PenstockQKNorm`."""
IMPLEMENTED: Final = EVERYWHERE | {"norm.kind layer", "layer.norms parallel"}
"""The pieces of models that decoder.cpp and this module implement."""


def misfit(config: DecoderSpec, page_size: int, shard: Shard = WHOLE) -> str | None:
    """Why the native kernels do not compute this part of a model; None where they do."""
    if shard != WHOLE and config.attention.qk_norm == "width":
        return f"on {shard.size} ranks: norms over all heads"
    own = shard.of(config)
    return lacking(own, IMPLEMENTED) or _different_layers(own) or _odd_sizes(own, page_size)


def _different_layers(config: DecoderSpec) -> str | None:
    """Layers that attend may differ in their ropes and windows, delta nets in nothing."""
    attentions = {replace(own, rope=None, window=None) for own in config.attentions}
    others = {(layer.mlp, layer.norms) for layer in config.layers}
    alike = len(attentions) == len(others) == 1 and len({*config.deltas}) <= 1
    return None if alike else "layers that differ by more than rope and window"


def _odd_sizes(config: DecoderSpec, page_size: int) -> str | None:
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "page_size": page_size,
    }
    for own in config.deltas:
        if own.kernel > TAPS_MAX:
            return f"linear_conv_kernel_dim {own.kernel} is more than {TAPS_MAX}"
        sizes |= {"linear_key_head_dim": own.key_dim, "linear_value_head_dim": own.value_dim}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % LANES_MAX]
    return f"{', '.join(odd)} cannot be divided by {LANES_MAX}" if odd else None


class _Summing:
    """Adds up what the kernels ask for over all ranks, in float32."""

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks
        self.failure: BaseException | None = None
        """The error where no sum was to be had: it cannot pass through the kernels."""
        self.call: Final = _AddUp(self._add_up)

    def _add_up(self, values: Any, count: int) -> int:
        try:
            own = (c_float * count).from_address(ctypes.addressof(values.contents))
            self._ranks.all_reduce_(torch.frombuffer(own, dtype=torch.float32))
        except BaseException as failure:
            self.failure = failure
            return 1
        return 0


def _shape_of(config: DecoderSpec, page_size: int, dtype: torch.dtype, *, int8: bool) -> Shape:
    layer, tempering = config.layers[0], config.attention.tempering or Tempering(0.0, 1)
    delta = config.deltas[0] if config.deltas else DeltaNet(0, 0, 0, 0, 0)
    return Shape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        layers=len(config.layers),
        page_size=page_size,
        norm_eps=config.norm.eps,
        embed_scale=float(torch.tensor(config.embed_scale, dtype=dtype)),
        residual_scale=config.residual_scale,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap or 0.0,
        temper_beta=tempering.beta,
        temper_len=tempering.original_context_len,
        act=_ACTS.index(layer.mlp.act),
        gated=layer.mlp.gated,
        qk_norm=_QK_NORMS.index(config.attention.qk_norm),
        centred=config.norm.kind == "layer",
        parallel=layer.norms == "parallel",
        bf16=dtype == torch.bfloat16,
        quantised=int8,
        **{name: getattr(config.attention, name) for name in _OF_ATTENTION},
        **{name: getattr(delta, name) for name in _OF_DELTA},
    )


class NativeDecoder:
    """The weights in the kernels' order, and the forward pass. `attach` a cache before the first step.

    A token's bits are the same in a row of one token and of several, alone and in a batch (gemm.h,
    attention.h): so a row that verifies drafts samples what so many decodes would."""

    drafts_max: Final = DRAFTS_MAX

    def __init__(
        self,
        isa: str,
        config: DecoderSpec,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        page_size: int,
        threads: int,
        int8: bool = False,
        ranks: Collective = ALONE,
    ) -> None:
        """`config` describes the whole model; the rank's part of it is read. `int8`: matrices as int8 with a
        scale per output; embeddings and norms stay as they are."""
        shard = ranks.shard
        assert misfit(config, page_size, shard) is None
        kernels = f"{isa}, int8 weights" if int8 else isa
        if shard != WHOLE:
            kernels += f", {shard.size} shards"
        self.name: Final = f"native kernels ({kernels}, {threads} threads)"
        # Threads share out whole sums, so any number of them has the same bits. A page's order is the ISA's.
        self.arithmetic: Final = f"native kernels ({kernels})"
        self._library = library(isa)
        self._whole, self._config, self._ranks = config, shard.of(config), ranks
        self._attending: Final = [
            at for at, layer in enumerate(config.layers) if isinstance(layer.attention, Attention)
        ]
        """The numbers of layers that have keys and values."""
        self._dtype = dtype
        shape = _shape_of(self._config, page_size, dtype, int8=int8)
        shape.vocab = shard.padded_len(config.vocab_size)
        self._model = self._library.penstock_new(byref(shape), threads)
        weakref.finalize(self, self._library.penstock_delete, self._model)
        self._pages: tuple[Tensor, ...] = ()
        self.states: States | None = None
        self._summing = _Summing(ranks)
        if shard != WHOLE:
            self._library.penstock_set_sum(self._model, self._summing.call)
        self._logits = torch.empty(0, shape.vocab)
        self._borrowed = self._set_top(source, keep_embedding=int8 or shard != WHOLE)
        for layer in range(len(config.layers)):
            self._set_layer(layer, source)

    def attach(self, cache: KVCache, slots: int = 0, windows: int = 0) -> NativeDecoder:
        """This decoder, with `cache` for its keys and values, which have the native order within a page
        (attention.h), and with states of so many slots, and windows for drafts, if it has any."""
        for layer, window, keys, values in zip(
            self._attending, self._config.windows, cache.keys, cache.values, strict=True
        ):
            self._library.penstock_set_cache(
                self._model, layer, keys.data_ptr(), values.data_ptr(), window or 0
            )
        self._pages = (*cache.keys, *cache.values)
        if self._config.deltas:
            self.states = States(StateGeometry.of(self._config, self._dtype), slots, windows=windows)
            others = (layer for layer in range(len(self._config.layers)) if layer not in self._attending)
            for layer, heads, inputs in zip(others, self.states.heads, self.states.inputs, strict=True):
                self._library.penstock_set_states(self._model, layer, heads.data_ptr(), inputs.data_ptr())
        return self

    def forward(self, batch: PackedBatch) -> Tensor:
        """Store the tokens' keys and values -> final hidden states [T, hidden], normed."""
        plan, slots = batch.plan, batch.slots
        column = c_int64 * len(plan.slots)
        step = Step(
            rows=len(plan.slots),
            slots=column(*plan.slots),
            starts=column(*plan.positions),
            lengths=column(*plan.lengths),
            tokens_stride=slots.tokens.stride(0),
            tables_stride=slots.page_table.stride(0),
            tokens=slots.tokens.data_ptr(),
            tables=slots.page_table.data_ptr(),
        )
        if self.states is not None:
            self.states.begin(batch.rows)
            step.places = column(*[self.states.at[slot] for slot in plan.slots])
            step.behind = self._behind(batch, self.states)
        hidden = torch.empty(batch.tokens, self._config.hidden_size, dtype=self._dtype)
        self._library.penstock_forward(self._model, byref(step), hidden.data_ptr())
        if self._summing.failure is not None:
            raise self._summing.failure
        return hidden

    @staticmethod
    def _behind(batch: PackedBatch, states: States) -> Array[c_int64] | None:
        """Where the rows that verify leave the state behind each of their tokens; None without such rows."""
        windows = states.open(batch.verifying)
        if not windows:
            return None
        behind = [-1] * batch.tokens
        for row in batch.verifying:
            behind[row.offset : row.offset + row.length] = windows[row.slot]
        return (c_int64 * batch.tokens)(*behind)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, hidden] -> logits [S, vocab] float32, in memory that the next call overwrites.

        For more than 32 MiB, 64 rows of a large vocabulary, the C library would fetch fresh pages from the
        system in every step.
        """
        assert hidden.dtype == self._dtype
        assert hidden.is_contiguous()
        if len(hidden) > len(self._logits):
            self._logits = torch.empty(len(hidden), self._logits.shape[1])
        logits = self._logits[: len(hidden)]
        self._library.penstock_logits(self._model, hidden.data_ptr(), len(hidden), logits.data_ptr())
        if self._ranks.shard == WHOLE:
            return logits
        return self._ranks.all_gather(logits)[:, : self._config.vocab_size].contiguous()

    def draw(
        self,
        logits: Tensor,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        columns: SamplingColumns,
        masks: Sequence[bytes] = (),
    ) -> Tensor:
        """Implements `engine.runtime.host.sampler.Draw`."""
        assert logits.is_contiguous()
        column = c_int64 * len(rows)
        mask_len = max(map(len, masks), default=0)
        assert all(len(mask) in (0, mask_len) for mask in masks)
        wanted = NativeDraw(
            count=len(rows),
            vocab=logits.shape[1],
            rows=column(*rows),
            slots=column(*slots),
            positions=column(*positions),
            logits=logits.data_ptr(),
            temperature=columns.temperature.data_ptr(),
            min_p=columns.min_p.data_ptr(),
            top_k=columns.top_k.data_ptr(),
            top_p=columns.top_p.data_ptr(),
            seed=columns.seed.data_ptr(),
            masks=(c_char_p * len(masks))(*(mask or None for mask in masks)) if mask_len else None,
            mask_len=mask_len,
        )
        tokens = torch.empty(len(slots), dtype=torch.int64)
        self._library.penstock_draw(self._model, byref(wanted), tokens.data_ptr())
        return tokens

    def _set_top(self, source: WeightSource, *, keep_embedding: bool) -> tuple[Tensor, ...]:
        """Set the head, the last norm and the tables. Returns the tensors that the library reads in place:
        the angles, and the embedding, unless the head is the same."""
        config = self._config
        table = read_embedding(config, source)
        self._set_linear(0, None, read_lm_head(config, source, self._ranks.shard, table), None)
        self._set_vector(0, None, final_norm(config).read(source))
        shared = config.tied_embeddings and not keep_embedding
        self._library.penstock_set_embedding(self._model, None if shared else table.data_ptr())
        tables = {rope: self._angles(rope) for rope in config.ropes}
        for layer, own in zip(self._attending, config.attentions, strict=True):
            cosines, sines = (part.data_ptr() for part in tables[own.rope])
            self._library.penstock_set_angles(self._model, layer, cosines, sines)
        angles = [part for pair in tables.values() for part in pair]
        return tuple(angles) if shared else (*angles, table)

    def _angles(self, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [positions, D/2] each."""
        config = self._config
        rotary = Rotary(rope, config.head_dim, config.context_len)
        cosines, sines = rotary.angles(torch.arange(config.context_len), torch.float32)
        return cosines.contiguous(), sines.contiguous()

    def _set_layer(self, layer: int, source: WeightSource) -> None:
        own = layer_parameters(self._whole, layer, self._ranks.shard)
        for role, matrix in own.matrices.items():
            self._set_linear(layer, role, *matrix.read(source))
        for place, vector in own.vectors.items():
            self._set_vector(layer, place, vector.read(source))

    def _set_linear(self, layer: int, role: Matrix | None, weight: Tensor, bias: Tensor | None) -> None:
        assert weight.dtype == self._dtype
        assert weight.is_contiguous()
        exact = None if bias is None else bias.float().contiguous()
        self._library.penstock_set_linear(
            self._model,
            layer,
            _LINEARS.index(role),
            weight.data_ptr(),
            *weight.shape,
            None if exact is None else exact.data_ptr(),
        )

    def _set_vector(self, layer: int, role: Vector | None, values: Tensor) -> None:
        exact, which = values.float().contiguous(), _VECTORS.index(role)
        self._library.penstock_set_vector(self._model, layer, which, exact.data_ptr(), exact.numel())
