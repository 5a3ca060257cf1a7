"""Whole decode steps and prefills of true shapes, random weights, bf16, as shares of their floors.

The rows that have targets come first, model by model. Their decode steps overlap kernels where an engine's
start would choose that. Then plain and overlapping steps are measured beside each other, at every batch size;
last come the rows that only compare.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from engine.contract.messages import SamplingParams
from engine.runtime.attention.triton_paged import LibraryPrefill, TritonDecode, TritonPrefill
from engine.runtime.device.device_decoder import (
    DecodeStep,
    DeviceDecoder,
    DeviceSampler,
    StepTables,
    StepTokens,
)
from engine.runtime.device.device_sampling import DeviceSampling, SamplingScratch, sample
from engine.runtime.device.device_shard import DRAFTS_MAX, OVERLAP_CAPABILITY
from engine.runtime.device.graphs import CudaGraphDevice, DecodeGraphs, Drafted, StepShape
from engine.runtime.device.kernel_timing import DeviceTimer, shortest_replay_us
from engine.runtime.kernels.autotune import (
    DeviceLinear,
    MatmulTable,
    fused_shape,
    measured_rows,
    shape_of,
)
from engine.runtime.kernels.launching import compiling_in
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.reference.delta_net import StepStates
from engine.runtime.setup.hardware import usable_cores
from engine.runtime.step.batch import Row
from engine.runtime.step.kv_cache import KVCache, KVGeometry
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.states import StateGeometry, States
from tests.bench.engine.gpu.measuring import check, graph_ms, span_ms
from tests.bench.engine.gpu.results import floors, write
from tests.bench.engine.gpu.shapes import (
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_5_08B,
    RandomWeights,
    decode_floor_s,
    head_parameters,
    kv_bytes,
    layer_parameters,
    prefill_floor_s,
)
from tests.bench.engine.gpu.tuning import tuned

CUDA = torch.device("cuda")
PAGE = 64
CONTEXT = 2048
ROW_LIMIT_S = 150.0
"""The longest time of a row: the first one of a model compiles its kernels."""
DRAFTED_BATCHES, DRAFTED = (1, 8, 32), (0, 1, 2, 3, 4, 6, 8)
_TABLES: dict[str, MatmulTable] = {}
"""The fastest kernels of each model, which is made more than once."""


class Bench:
    """A model of random weights, tuned to the card."""

    def __init__(self, name: str, config: DecoderSpec, *, fp8: bool = False) -> None:
        began = time.perf_counter()
        self.name, self.config, self.fp8 = name, config, fp8
        self.spec = AttentionSpec.of(config)
        self.decoder = DeviceDecoder(config, RandomWeights(CUDA), CUDA, fp8=fp8)
        if name not in _TABLES:
            _TABLES[name] = tuned(self._kinds, DeviceTimer(), CUDA)
        self.decoder.table = _TABLES[name]
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        write("steps", f"{name} made and tuned", took_s=time.perf_counter() - began)

    @property
    def _kinds(self) -> list[DeviceLinear]:
        """A product of each shape: those of a layer of each kind, and the head."""
        return list({(shape_of(own.weight, 1), own.gated): own for own in self.decoder.linears}.values())

    def cache(self, tokens: int, kv_dtype: torch.dtype = torch.bfloat16) -> KVCache:
        config = self.config
        geometry = KVGeometry(len(config.attentions), config.kv_heads, PAGE, config.head_dim, kv_dtype)
        cache = KVCache(geometry, -(-tokens // PAGE) + 1, device=CUDA)
        for part in (*cache.keys, *cache.values):
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=CUDA))
        return cache

    def decode(self, batch: int, context: int, kv_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """Measure a step of random tokens, each row at `context`, sampled at temperature 1, as a graph in the
        form that a start would choose."""
        step, overlapping = self._step(batch, context, kv_dtype), None
        if torch.cuda.get_device_properties(0).major >= OVERLAP_CAPABILITY[0]:
            overlapping = replace(step, launches_dependently=True)
            _compile(overlapping, batch, context)
        graphs = DecodeGraphs(step, [batch], batch, CUDA, overlapping=overlapping)
        graphs.capture(CudaGraphDevice(timer=shortest_replay_us), lambda *_: None)
        ms, _ = _replayed(graphs, batch, context)
        overlap = [found.value for found in graphs.overlaps.values()]
        return self._shares(ms, batch, context, kv_dtype) | {"overlap": overlap}

    def verify(self, batch: int, context: int, drafts: int) -> dict[str, Any]:
        """Measure a step in which each row verifies so many drafts, as a graph."""
        tokens, slots = drafts + 1, range(batch)
        step = self._step(batch, context, torch.bfloat16, tokens)
        together = next(count for count in step.kept.attention.together if count >= tokens)
        shape = StepShape(batch * tokens, together)
        graphs = DecodeGraphs(step, [batch], batch, CUDA, verified=[shape])
        before = [at for _ in slots for at in range(tokens)]
        drafted = Drafted(before, [drafts - at for at in before], [-1] * len(before))
        rows = [slot for slot in slots for _ in range(tokens)], [context - drafts + at for at in before]
        with ThreadPoolExecutor(usable_cores()) as workers, compiling_in(workers, CUDA):
            graphs.run(*rows, drafted)
        graphs.capture(CudaGraphDevice(), lambda *_: None)
        assert (graphs.run(*rows, drafted)[0] >= 0).all(), "logits are not finite"
        ms = span_ms(lambda: graphs.run(*rows, drafted))
        found = self._shares(ms, batch, context, torch.bfloat16, tokens)
        return found | {"drafts": drafts, "together": together}

    def replayer(self, batch: int, context: int, *, dependently: bool) -> Callable[[], object]:
        """Runs a step of random tokens by its graph."""
        step = replace(self._step(batch, context, torch.bfloat16), launches_dependently=dependently)
        _compile(step, batch, context)
        graphs = _captured(step, batch)
        return partial(graphs.run, list(range(batch)), [context] * batch)

    def choices(self, batch: int) -> dict[str, str]:
        """The kernels that were chosen for each product at this batch."""
        found = {}
        for linear in self._kinds:
            name = str(shape_of(linear.weight, batch))
            product = self.decoder.table.measured.get(shape_of(linear.weight, measured_rows(batch)))
            fused = self.decoder.table.fused.get(fused_shape(linear, batch))
            found[name] = f"{product}; {fused}"
        return found

    def decode_dependently(self, batch: int, context: int) -> dict[str, Any]:
        """Check that dependent launches give the same bits as plain ones, and measure the same step with
        them."""
        step = self._step(batch, context, torch.bfloat16)
        plain_ms, plain = _replayed(_captured(step, batch), batch, context)
        dependent_step = replace(step, launches_dependently=True)
        _compile(dependent_step, batch, context)
        ms, found = _replayed(_captured(dependent_step, batch), batch, context)
        for own, expected in zip(found, plain, strict=True):
            assert torch.equal(own, expected), "differs from the step whose launches are plain"
        return self._shares(ms, batch, context, torch.bfloat16) | {"plain_ms": plain_ms}

    def _step(self, batch: int, context: int, kv_dtype: torch.dtype, each: int = 1) -> DecodeStep:
        """`each`: the tokens of a row."""
        config, width = self.config, -(-context // PAGE)
        cache = self.cache(batch * width * PAGE, kv_dtype)
        sizes: dict[str, Any] = {"rows_max": batch * each, "multiprocessors": self.multiprocessors}
        sizes |= {"together_max": DRAFTS_MAX + 1} if each > 1 else {}
        attention = TritonDecode(cache, self.spec, **sizes, dtype=self.decoder.dtype)
        table = torch.zeros(batch + 1, width, dtype=torch.int32, device=CUDA)
        table[:batch] = torch.randperm(batch * width, device=CUDA).int().view(batch, width)
        table[batch] = batch * width
        tokens = torch.randint(config.vocab_size, (batch + 1, context + 1), device=CUDA).int()
        sampling = DeviceSampling.empty(batch + 1, config.vocab_size, CUDA)
        asked = [SamplingParams(seed=slot, max_tokens=1) for slot in range(batch)]
        sampling.seat_all(range(batch), asked, [context + 1] * batch)
        scratch = SamplingScratch.empty(batch * each, config.vocab_size, self.decoder.dtype, CUDA)
        kept = StepTables(tokens, table, cache, attention, self._states(batch + 1, batch * (each - 1)))
        return DecodeStep(kept, DeviceSampler(self.decoder, kept.tokens, sampling, scratch, kept.states))

    def _states(self, slots: int, windows: int = 0) -> States | None:
        geometry = StateGeometry.of(self.config, self.decoder.dtype)
        return States(geometry, slots, CUDA, windows) if self.config.deltas else None

    def _shares(
        self, ms: float, batch: int, context: int, kv_dtype: torch.dtype, tokens: int = 1
    ) -> dict[str, Any]:
        sizes = 1.0 if self.fp8 else 2.0, kv_dtype.itemsize, tokens
        floor_ms = decode_floor_s(self.config, batch, context, floors(), *sizes) * 1e3
        fields = {"model": self.name, "batch": batch, "context": context, "ms": ms, "floor_ms": floor_ms}
        return fields | {"share": floor_ms / ms, "tokens_per_s": batch / ms * 1e3}

    def prefill(self, length: int, backend: type[TritonPrefill] | type[LibraryPrefill]) -> dict[str, Any]:
        """Measure one prompt of random tokens without a cached context, and the logits of its last token."""
        config, cache = self.config, self.cache(length)
        positions = torch.arange(length, device=CUDA)
        tables = torch.randperm(cache.pages - 1, device=CUDA).int()[None]
        pages = tables[0].long()[positions // PAGE]
        token_ids = torch.randint(config.vocab_size, (length,), device=CUDA)
        step = StepTokens(token_ids, positions, pages, positions % PAGE)
        attend = backend(cache, self.spec).of_chunks([Row(0, 0, length, 0)], tables)
        kept, none = self._states(1), torch.zeros(0, dtype=torch.int32, device=CUDA)
        states = None if kept is None else StepStates(kept, [Row(0, 0, length, 0)], 0, none, none)

        def run() -> Tensor:
            stream = self.decoder.forward(self.decoder.rows(step), cache, attend, states)
            return self.decoder.logits(self.decoder.normed(stream)[-1:])

        assert torch.isfinite(run()).all(), "logits are not finite"
        ms = span_ms(run, 5)
        floor_ms = prefill_floor_s(config, length, floors()[1]) * 1e3
        fields = {"model": self.name, "tokens": length, "ms": ms, "floor_ms": floor_ms}
        return fields | {"share": floor_ms / ms, "tokens_per_s": length / ms * 1e3}


Graphs = DecodeGraphs[tuple[Tensor, Tensor]]


def _captured(step: DecodeStep, batch: int) -> Graphs:
    graphs = DecodeGraphs(step, [batch], batch, CUDA)
    graphs.capture(CudaGraphDevice(), lambda *_: None)
    return graphs


def _replayed(graphs: Graphs, batch: int, context: int) -> tuple[float, tuple[Tensor, ...]]:
    """The time of a step, ms, and its results."""
    slots, lengths = list(range(batch)), [context] * batch
    found = graphs.run(slots, lengths)
    assert (found[0] >= 0).all(), "logits are not finite"
    ms = span_ms(lambda: graphs.run(slots, lengths))
    return ms, tuple(tensor.clone() for tensor in found)


def _compile(step: DecodeStep, batch: int, context: int) -> None:
    """Compile a step's kernels by all cores."""
    with ThreadPoolExecutor(usable_cores()) as workers, compiling_in(workers, CUDA):
        DecodeGraphs(step, [batch], batch, CUDA).run(list(range(batch)), [context] * batch)


def fitting_context(config: DecoderSpec, batch: int, context: int) -> int:
    """The longest context, of `context` and its halves, at which weights and cache leave a tenth of the card
    free."""
    weights = 2 * (layer_parameters(config) + head_parameters(config))
    room = 0.9 * torch.cuda.get_device_properties(0).total_memory - weights
    while batch * context * kv_bytes(config) > room:
        context //= 2
    return context


MakeBench = Callable[[], Bench]
"""Makes and tunes the weights when a row first needs them: a process that resumes behind it may need none."""


def _decode(
    make: MakeBench, batch: int, kv_dtype: torch.dtype = torch.bfloat16, context: int = CONTEXT
) -> dict[str, Any]:
    return make().decode(batch, context, kv_dtype)


def _verify(make: MakeBench, batch: int, drafts: int) -> dict[str, Any]:
    return make().verify(batch, CONTEXT, drafts)


def _decode_dependently(make: MakeBench, batch: int, context: int) -> dict[str, Any]:
    return make().decode_dependently(batch, context)


def _prefill(
    make: MakeBench, length: int, backend: type[TritonPrefill] | type[LibraryPrefill]
) -> dict[str, Any]:
    return make().prefill(length, backend)


LLAMA, QWEN, FP8, HYBRID = "Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-8B fp8", "Qwen3.5-0.8B"
_CONFIGS = {LLAMA: LLAMA_8B, QWEN: QWEN3_06B, FP8: LLAMA_8B, HYBRID: QWEN3_5_08B}


def made(name: str) -> Bench:
    return Bench(name, _CONFIGS[name], fp8=name == FP8)


def _made(name: str) -> MakeBench:
    """Makes a model once, for the rows that follow each other."""
    return cache(partial(made, name))


def targets(name: str, batches: Sequence[int], prompts: Sequence[int] = ()) -> bool:
    """Measure the rows of one model that have targets."""
    ok, make = True, _made(name)
    for batch in batches:
        ok &= _decode_row(name, make, batch)
    for length in prompts:
        run = partial(_prefill, make, length, LibraryPrefill)
        ok &= check("steps", f"prefill {name} {length}", run, limit_s=ROW_LIMIT_S)
        torch.cuda.empty_cache()
    return ok


def drafted(name: str, batches: Sequence[int], drafts: Sequence[int]) -> bool:
    """Measure steps in which each row verifies drafts."""
    ok, make = True, _made(name)
    for batch in batches:
        for count in drafts:
            row = f"drafts {name} batch {batch} of {count} context {CONTEXT}"
            if count:
                ok &= check("steps", row, partial(_verify, make, batch, count), limit_s=ROW_LIMIT_S)
            else:
                ok &= check("steps", row, partial(_decode, make, batch), limit_s=ROW_LIMIT_S)
            torch.cuda.empty_cache()
    return ok


def overlapped(name: str, batches: Sequence[int]) -> bool:
    """Check and measure one model's decode steps with launches that overlap."""
    ok, make = True, _made(name)
    for batch in batches:
        context = fitting_context(_CONFIGS[name], batch, CONTEXT)
        row = f"decode {name} batch {batch} context {context} launched dependently"
        run = partial(_decode_dependently, make, batch, context)
        ok &= check("steps", row, run, limit_s=ROW_LIMIT_S)
        torch.cuda.empty_cache()
    return ok


def compared(name: str, prompts: Sequence[int]) -> bool:
    """Measure one model's prefills by our attention alone."""
    ok, make = True, _made(name)
    for length in prompts:
        run = partial(_prefill, make, length, TritonPrefill)
        ok &= check("steps", f"prefill {name} {length} by our attention alone", run)
        torch.cuda.empty_cache()
    return ok


def in_eight_bits() -> bool:
    """Measure what fp8 weights with and without fp8 keys and values take, beside the row that has a
    target."""
    ok, make = True, _made(FP8)
    for batch, kv_dtype in ((32, torch.bfloat16), (1, torch.float8_e4m3fn), (32, torch.float8_e4m3fn)):
        suffix = "" if kv_dtype == torch.bfloat16 else " and KV fp8"
        row = f"decode {FP8}{suffix} batch {batch} context {CONTEXT}"
        ok &= check("steps", row, partial(_decode, make, batch, kv_dtype), limit_s=ROW_LIMIT_S)
        torch.cuda.empty_cache()
    return ok


def _decode_row(name: str, make: MakeBench, batch: int) -> bool:
    """Measure decode steps of one batch, at a shorter context where this card is too small."""
    config = _CONFIGS[name]
    context = fitting_context(config, batch, CONTEXT)
    if context < CONTEXT:
        write("steps", f"decode {name} batch {batch} context {CONTEXT}", absent="larger than this card")
    row = f"decode {name} batch {batch} context {context}"
    ok = check("steps", row, partial(_decode, make, batch, context=context), limit_s=ROW_LIMIT_S)
    torch.cuda.empty_cache()
    return ok


def flat_rows() -> bool:
    """Measure the sampling of rows in which nearly all tokens are candidates."""
    ok = True
    for rows in (1, 32):
        ok &= check("steps", f"sampling flat rows {rows}", partial(sampling_of_flat_rows, rows))
    return ok


def sampling_of_flat_rows(rows: int, vocab_size: int = QWEN3_06B.vocab_size) -> dict[str, Any]:
    """Measure the four launches that sample, at temperature 2 and top-p 0.95 over random logits."""
    logits = torch.randn(rows, vocab_size, dtype=torch.bfloat16, device=CUDA)
    columns, slots = DeviceSampling.empty(rows, vocab_size, CUDA), torch.arange(rows, device=CUDA).int()
    asked = [SamplingParams(seed=row, max_tokens=1, temperature=2.0, top_p=0.95) for row in range(rows)]
    columns.seat_all(range(rows), asked, [1] * rows)
    scratch = SamplingScratch.empty(rows, vocab_size, logits.dtype, CUDA)
    known, positions = torch.zeros(rows, 2, dtype=torch.int32, device=CUDA), torch.ones_like(slots)
    run = partial(sample, logits, slots, positions, columns, scratch, known)
    assert (run()[0] >= 0).all(), "logits are not finite"
    return {"rows": rows, "vocab": vocab_size, "ms": graph_ms(run)}


def main() -> int:
    """Measure one model at a time: two may not fit beside the cache of 256 rows."""
    rows: tuple[Callable[[], bool], ...] = (
        partial(targets, LLAMA, (1, 32, 256), (2048, 8192)),
        partial(targets, QWEN, (1, 256)),
        partial(targets, FP8, (1,)),
        partial(targets, HYBRID, (1, 32, 256), (2048,)),
        flat_rows,
        partial(drafted, LLAMA, DRAFTED_BATCHES, DRAFTED),
        partial(drafted, QWEN, DRAFTED_BATCHES, DRAFTED),
        partial(drafted, HYBRID, (1, 32), (0, 1, 3, 7)),
        partial(overlapped, LLAMA, (1, 32, 256)),
        partial(overlapped, QWEN, (1, 32, 256)),
        partial(overlapped, HYBRID, (1,)),
        in_eight_bits,
        partial(targets, QWEN, (32,), (2048,)),
        partial(compared, LLAMA, (2048, 8192)),
        partial(compared, QWEN, (2048,)),
    )
    ok = True
    for run in rows:
        ok &= run()
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if ok else 1
