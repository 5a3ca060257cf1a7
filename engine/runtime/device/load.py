"""From a model directory to a warm runner on a GPU.

    load       weights, and for each matrix the kernel that multiplies fastest, measured
    size       what is left for the KV cache: the largest step is run once over a cache of one page, the
               largest and the smallest graph are captured, and what that took is set aside
    build      cache, slots' tables, graphs for all batch sizes
    warm up    one of each family of steps

The stages are apart so that several ranks can agree on sizes between them.

What does not fit says so before the first request: nothing is allocated later that the largest step did not
allocate while its memory was being measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from engine.core.messages import Plan, RunnerInfo, SamplingParams, SlotStart
from engine.runtime.attention import AttentionSpec
from engine.runtime.attention.device import Bounds, build_backends
from engine.runtime.backends import Choice, Need, choose
from engine.runtime.config import RunnerConfig
from engine.runtime.device.card import Card, MemoryReading
from engine.runtime.device.precision import Precision
from engine.runtime.device.runner import DeviceRunner
from engine.runtime.device.slots import DeviceSlots
from engine.runtime.errors import DoesNotFit
from engine.runtime.graphs import DecodeGraphs, batch_buckets
from engine.runtime.hardware import available_memory_bytes, usable_cores
from engine.runtime.kernels.autotune import MatmulTable
from engine.runtime.kernels.decoder import DecodeStep, DeviceDecoder, DeviceModel, DeviceSampler
from engine.runtime.kernels.memory import MemoryProfile, kv_page_count
from engine.runtime.kernels.sampling import SamplingScratch
from engine.runtime.kv_cache import (
    HostPages,
    KVCache,
    KVGeometry,
    host_page_count,
    page_count,
    useful_pages,
)
from engine.runtime.load import (
    Progress,
    checked_checkpoint,
    choose_dtype,
    choose_max_model_len,
    dtype_name,
    set_threads,
    untimed_info,
    warm_up,
)
from engine.runtime.models.config import ModelConfig, read_model_config
from engine.runtime.parallel.collective import ALONE, Collective
from engine.runtime.weights import WeightSource

GRAPH_ROWS_MAX: Final = 512
"""Beyond, a step takes longer than launching it kernel by kernel, which is what happens then."""
OVERLAPS: Final = False
"""Whether kernels of a decode step start while those before them end: not before a card has shown that it is
right and faster, which `tests/gpu/run.sh tokens steps` does."""
OUT_OF_MEMORY: Final = ("out of memory", "ALLOC_FAILED")
"""As CUDA and Triton say it, and as cuBLAS and cuDNN do."""
LIKELIEST_MAX: Final = 20
"""Log-probabilities that every row of the measured step asks for: the most that a client can."""


@dataclass(frozen=True, slots=True)
class DeviceNetwork:
    """Weights on a device, before there is a cache."""

    config: RunnerConfig
    model: ModelConfig
    """As this rank computes it."""
    max_model_len: int
    card: Card
    decoder: DeviceDecoder
    attention: Choice
    precision: Precision
    kv_scales: Sequence[tuple[float, float]] | None
    at_start: MemoryReading

    @staticmethod
    def load(
        config: RunnerConfig,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        max_model_len: int,
        card: Card,
        progress: Progress,
        ranks: Collective = ALONE,
    ) -> DeviceNetwork:
        """`model` is the whole one, of which this rank's part is read. Raises ModelError."""
        at_start, share = card.memory(), ranks.shard.of(model)
        precision = Precision.of(config, model, dtype, card.capability)
        attention = choose(config.attention_backend, _need(config, share, dtype, precision, card))
        progress(str(attention))
        kv_scales = precision.kv_scales(model, source)
        if said := precision.describe(model, kv_scales):
            progress(said)
        with enough_memory("loading weights", "end what else uses this GPU, or use fp8 weights"):
            decoder = DeviceDecoder(model, source, card.device, fp8=precision.weights_fp8, ranks=ranks)
            progress("measuring which kernels multiply fastest")
            decoder.table = MatmulTable.fill(decoder.linears, decoder.dtype, card.timer())
        return DeviceNetwork(
            config, share, max_model_len, card, decoder, attention, precision, kv_scales, at_start
        )

    @property
    def geometry(self) -> KVGeometry:
        model = self.model
        return KVGeometry(
            model.layers, model.kv_heads, self.config.page_size, model.head_dim, self.precision.kv_dtype
        )

    def info(self, pages: int) -> RunnerInfo:
        """Before anything was timed."""
        info = untimed_info(
            self.config, self.model, self.geometry, self.decoder.dtype, self.max_model_len, pages
        )
        return replace(info, is_async=True)

    def page_count(self) -> int:
        """How many pages to allocate. Raises DoesNotFit."""
        config, geometry = self.config, self.geometry
        if config.kv_cache_bytes is not None:
            return page_count(config, self.model, geometry, self.max_model_len, available_bytes=0)
        useful = useful_pages(config, self.max_model_len)
        return kv_page_count(self._profile(), config.gpu_memory_utilization, geometry.page_bytes, useful)

    def build(self, info: RunnerInfo, progress: Progress) -> DeviceRunner:
        """Of these sizes. Raises DoesNotFit."""
        with enough_memory("allocating the KV cache and capturing graphs", "lower gpu_memory_utilization"):
            runner, step = self._assemble(info)
            if not self.config.enforce_eager:
                graphs = self._graphs(step, runner.slots, batch_buckets(runner.decode_rows_max))
                graphs.capture(self.card.graphs(), partial(_tell, progress))
                runner.decode = graphs.replay
            progress("planning attention of long prompts")
            tokens_max = min(self.config.step_tokens_max, self.max_model_len)
            runner.model.prefill.warm_up(tokens_max, self.decoder.dtype)
        return runner

    def _assemble(self, info: RunnerInfo) -> tuple[DeviceRunner, DecodeStep]:
        """A runner that launches kernel by kernel, and its decode step."""
        device, decoder, model = self.card.device, self.decoder, self.model
        pages = info.pages + 1  # the last is for rows that pad
        cache = KVCache(self.geometry, pages, self.kv_scales, device)
        cache.pool.zero_()  # fresh memory may be NaN: our kernels mask it, a library may multiply it by 0
        slots = DeviceSlots(
            info.slots, info.max_model_len, info.page_size, info.vocab_size, info.pages, device
        )
        scratch = SamplingScratch.empty(info.slots, info.vocab_size, decoder.dtype, device)
        spec = AttentionSpec(model.heads, model.kv_heads, model.head_dim, model.windows)
        bounds = Bounds(info.slots, info.max_model_len, self.card.multiprocessors)
        decode, prefill = build_backends(self.attention, cache, spec, decoder.dtype, bounds)
        tables = slots.tokens, slots.page_table, slots.sampling
        step = DecodeStep(decoder, cache, decode, *tables, scratch, overlaps=OVERLAPS)
        rows_max = min(info.slots, GRAPH_ROWS_MAX)
        runner = DeviceRunner(
            info=info,
            model=DeviceModel(decoder, cache, decode, prefill),
            cache=cache,
            host=HostPages(cache, info.host_pages),
            slots=slots,
            sampler=DeviceSampler(decoder, slots.tokens, slots.sampling, scratch),
            decode=self._graphs(step, slots, batch_buckets(rows_max)).eager,
            decode_rows_max=rows_max,
        )
        return runner, step

    def _graphs(
        self, step: DecodeStep, slots: DeviceSlots, buckets: Sequence[int]
    ) -> DecodeGraphs[tuple[Tensor, Tensor]]:
        return DecodeGraphs(step, buckets, slots.padding_slot, slots.device, step.attention.plan)

    def _profile(self) -> MemoryProfile:
        """Runs the largest step. What it needs, and what is outside of torch's sight."""
        card, start = self.card, self.at_start
        with enough_memory("running the largest step", "lower step_tokens_max or max_num_seqs"):
            runner, step = self._assemble(self.info(pages=1))
            idle = card.memory()
            card.start_peak()
            for plan in largest_plans(runner.info, self.config.step_tokens_max):
                runner.run(plan)
            stepped = card.memory()
            graphs = 0 if self.config.enforce_eager else self._graph_bytes(step, runner)
        return MemoryProfile(
            total=start.total,
            free_at_start=start.free,
            weights=idle.reserved - runner.cache.pages * self.geometry.page_bytes,
            step_peak=stepped.reserved_peak - idle.reserved,
            outside_torch=max(0, start.free - stepped.free - stepped.reserved),
            graphs=graphs,
        )

    def _graph_bytes(self, step: DecodeStep, runner: DeviceRunner) -> int:
        """The largest brings the pool that all share; each has kernels and arguments of its own besides, as
        many in the smallest as in any."""
        rows_max = runner.decode_rows_max
        free: list[int] = []

        def note(*_: int) -> None:
            free.append(self.card.memory().free)

        self._graphs(step, runner.slots, sorted({1, rows_max})).capture(self.card.graphs(), note)
        largest, *smallest = (before - after for before, after in pairwise(free))
        return max(0, largest) + max(0, *smallest, 0) * (len(batch_buckets(rows_max)) - 1)


def largest_plans(info: RunnerInfo, tokens: int) -> Iterator[Plan]:
    """The most rows that sample, then the longest prompt, of so many tokens; all in one page, as nobody reads
    what comes of it."""
    asked = SamplingParams(
        seed=0, max_tokens=1, top_p=0.9, logprobs=LIKELIEST_MAX, prompt_logprobs=LIKELIEST_MAX
    )
    longest = min(tokens, info.max_model_len - 1)
    rows = min(tokens, info.slots)
    left: list[int] = []
    for lengths in ([min(longest, tokens // rows)] * rows, [longest]):
        if longest < 1:
            return
        slots = list(range(len(lengths)))
        seated = [SlotStart(slot, [0] * n, n, asked) for slot, n in zip(slots, lengths, strict=True)]
        grown = [(slot, [0] * -(-n // info.page_size)) for slot, n in zip(slots, lengths, strict=True)]
        yield Plan(0, left, seated, grown, slots, [0] * len(slots), lengths, [True] * len(slots))
        left = slots


@contextmanager
def enough_memory(doing: str, advice: str) -> Iterator[None]:
    """Raises DoesNotFit where the device's memory ends, whoever says so: torch, a library, Triton, or what
    follows from it, as a capture that was broken off."""
    try:
        yield
    except RuntimeError as error:
        if (found := _out_of_memory(error)) is None:
            raise
        raise DoesNotFit(
            f"out of GPU memory while {doing}: {advice} ({str(found).split('. ')[0]})"
        ) from error


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            return error
        error = error.__context__
    return None


def _need(
    config: RunnerConfig, model: ModelConfig, dtype: torch.dtype, precision: Precision, card: Card
) -> Need:
    return Need(
        model.heads,
        model.kv_heads,
        model.head_dim,
        config.page_size,
        dtype_name(dtype),
        dtype_name(precision.kv_dtype),
        card.capability,
    )


def _tell(progress: Progress, done: int, of: int) -> None:
    progress(f"capturing decode steps, {done} of {of}")


@torch.inference_mode()
def load_on_card(config: RunnerConfig, card: Card, progress: Progress) -> DeviceRunner:
    """As `engine.runtime.load.load_runner`."""
    started_s = time.monotonic()
    set_threads(config.threads or usable_cores())
    model = read_model_config(Path(config.model_dir))
    dtype = torch.bfloat16 if config.dtype == "auto" else choose_dtype(config.dtype)
    max_model_len = choose_max_model_len(config, model)
    progress(f"loading {model.architecture} in {dtype_name(dtype)} on {card.name}")
    source = checked_checkpoint(config, model, dtype, card.device)
    network = DeviceNetwork.load(config, model, source, dtype, max_model_len, card, progress)
    progress("measuring the largest step")
    pages = network.page_count()
    loaded_s = time.monotonic()
    host_pages = host_page_count(config, network.geometry, max_model_len, available_memory_bytes())
    info = replace(network.info(pages), host_pages=host_pages, load_s=loaded_s - started_s)
    progress(f"allocating {pages} KV pages of {config.page_size} tokens")
    runner = network.build(info, progress)
    progress("warming up")
    warm_up(runner)
    page_copy_s, warmup_s = runner.host.measure(), time.monotonic() - loaded_s
    runner.info = replace(info, warmup_s=warmup_s, page_copy_s=page_copy_s)
    return runner
