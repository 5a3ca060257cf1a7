"""A model's weights on a GPU, and the stages of a start that are a GPU's own.

    load       the weights, while kernels are compiled beside (`rehearsal.py`)
    tune       for each matrix the kernel that multiplies fastest, measured
    size       the memory left for the KV cache: the largest step is run once over a cache of one page, the
               largest and the smallest graph are captured, and the memory that this took is set aside
    build      the cache, the slots' tables, places for snapshots of states, graphs for all batch sizes

`engine.runtime.start.starting` calls these in order, so that several ranks can agree on sizes between them.

Memory that is too small is reported before the first request: later steps allocate nothing that the largest
step did not allocate while its memory was being measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final

import msgspec
import torch
from torch import Tensor

from engine.contract.messages import Plan, RunnerInfo, SamplingParams, SlotAssignment, Want
from engine.runtime.attention.build import Bounds, build_backends
from engine.runtime.collective.collective import ALONE, Alone, Collective
from engine.runtime.collective.shard import WHOLE, Shard
from engine.runtime.device.card import Card, MemoryReading, OwnCard
from engine.runtime.device.device_decoder import (
    DecodeStep,
    DeviceDecoder,
    DeviceModel,
    DeviceNetwork,
    DeviceSampler,
    StepTables,
)
from engine.runtime.device.device_mtp import DeviceMtp, DeviceMtpLayer
from engine.runtime.device.device_runner import DeviceRunner
from engine.runtime.device.device_sampling import SamplingScratch
from engine.runtime.device.graphs import (
    DecodeGraphs,
    DecodeInputs,
    GraphDevice,
    Overlap,
    StepShape,
    batch_buckets,
    verify_buckets,
    verify_shapes,
)
from engine.runtime.device.memory import MemoryProfile, kv_page_count, out_of_memory
from engine.runtime.device.precision import Precision
from engine.runtime.device.rehearsal import Blueprint, Shapes, rehearsed
from engine.runtime.device.slots import DeviceSlots
from engine.runtime.device.torch_on_device import TorchOnDevice
from engine.runtime.kernels import launching
from engine.runtime.kernels.autotune import MatmulTable
from engine.runtime.kernels.decode_attention import query_counts
from engine.runtime.kernels.dependent_launch import dependent_launches
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.reference.torch_decoder import TorchDecoder
from engine.runtime.setup.backends import Backend, BackendChoice, Chosen, Need, choose
from engine.runtime.setup.hardware import usable_cores
from engine.runtime.setup.model_errors import BadRunnerConfig, DoesNotFit, UnsupportedModel
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start.starting import (
    Progress,
    checked_checkpoint,
    choose_dtype,
    choose_max_model_len,
    dtype_name,
    load_pooler,
    read_model,
    set_threads,
    untimed_info,
)
from engine.runtime.step.kv_cache import (
    HostPages,
    KVCache,
    KVGeometry,
    page_count,
    useful_pages,
    useful_states,
    useful_windows,
    window_count,
)
from engine.runtime.step.pooling import Pooler
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.result_tensors import GUESSES_MAX
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.checkpoint import WeightSource

GRAPH_ROWS_MAX: Final = 512
"""The most rows of a decode step that is captured. A step of more rows takes longer than launching its
kernels one by one, and is launched that way."""
OVERLAP_CAPABILITY: Final = (9, 0)
"""The least capability of a card that launches a kernel while the one before it ends."""
DRAFTS_MAX: Final = 15
"""The most drafts of a row: a tile of attention has room for as many tokens and one more at most, and for
fewer where groups of query heads or heads are large."""
DRAFTS_TOGETHER_MAX: Final = 128
"""The most drafts of a step, over all rows. They take a share of the memory for sampling, 2 MB each with a
vocabulary of 152k; and products of more rows than about 180 take as long as their arithmetic, so that a draft
costs there what a token does."""
LIKELIEST_MAX: Final = 20
"""Log-probabilities that every row of the measured step asks for: the most that a client can ask for."""
_Graphs = DecodeGraphs[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Design:
    """The decisions that are made before a weight is read."""

    config: RunnerConfig
    model: DecoderSpec
    """The whole model."""
    dtype: torch.dtype
    max_model_len: int
    precision: Precision
    attention: BackendChoice
    lacks: str | None = None
    """Why our kernels do not compute the model, so that torch's operations do; None where they do."""

    @property
    def mtp_lacks(self) -> str | None:
        """Why our kernels do not compute the model's MTP layer, if it has one; None where they do."""
        assert self.model.mtp is not None
        return self.lacks or DeviceDecoder.implements(self.model.mtp_body)

    @property
    def drafts_by_mtp(self) -> bool:
        return self.model.mtp is not None and bool(self.config.max_drafts) and self.mtp_lacks is None

    @property
    def is_eager(self) -> bool:
        """True if steps are launched kernel by kernel."""
        return self.config.enforce_eager or self.lacks is not None

    @staticmethod
    def of(config: RunnerConfig, model: DecoderSpec, card: Card, shard: Shard) -> Design:
        """The design for this model on this card. Raises UnsupportedModel where no network computes the
        model, BadRunnerConfig where the card cannot do what is asked for."""
        lacks = DeviceDecoder.implements(model)
        if lacks is not None and (reason := TorchDecoder.implements(model)) is not None:
            raise UnsupportedModel(f"no network computes this model on a GPU: {reason}")
        if lacks is not None and config.weights == "fp8":
            raise BadRunnerConfig(f"weights=fp8 needs the Triton kernels: {lacks}")
        dtype = torch.bfloat16 if config.dtype == "auto" else choose_dtype(config.dtype)
        precision = Precision.of(config, model, dtype, card.capability)
        if lacks is not None:
            precision = replace(precision, weights_fp8=False)
        own, types = shard.of(model), (dtype_name(dtype), dtype_name(precision.kv_dtype))
        need = Need(own.heads, own.kv_heads, own.head_dim, config.page_size, *types, card.capability)
        attention = choose(config.attention_backend, need)
        max_model_len = choose_max_model_len(config, model)
        served = replace(model, context_len=max_model_len)
        return Design(config, served, dtype, max_model_len, precision, attention, lacks)


@dataclass(frozen=True, slots=True)
class DeviceShard:
    """Implements `LoadedShard` on a GPU: a rank's weights, before there is a cache."""

    design: Design
    model: DecoderSpec
    """The model as this rank computes it."""
    card: OwnCard
    decoder: DeviceNetwork
    kv_scales: Sequence[tuple[float, float]] | None
    at_start: MemoryReading
    """The card's memory before this process took any."""
    pooler: Pooler | None = None
    """Makes vectors of prompts, where the model embeds."""
    mtp: DeviceMtpLayer | None = None
    """The model's MTP layer, if it has one that drafts."""

    @staticmethod
    def load(
        design: Design, source: WeightSource, card: OwnCard, ranks: Collective, at_start: MemoryReading
    ) -> DeviceShard:
        """Read this rank's part of the weights. Raises ModelError."""
        precision = design.precision
        kv_scales = precision.kv_scales(design.model, source)
        with enough_memory("loading weights", "end what else uses this GPU, or use fp8 weights"):
            decoder: DeviceNetwork
            mtp = None
            if design.lacks is None:
                fp8 = precision.weights_fp8
                decoder = DeviceDecoder(design.model, source, card.device, fp8=fp8, ranks=ranks)
                if design.drafts_by_mtp:
                    mtp = DeviceMtpLayer(design.model, source, decoder, fp8=fp8, ranks=ranks)
            else:
                decoder = TorchOnDevice(design.model, source, card.device, ranks)
        share = ranks.shard.of(design.model)
        if mtp is not None and kv_scales is not None:
            kv_scales = [*kv_scales, (1.0, 1.0)]
        return DeviceShard(design, share, card, decoder, kv_scales, at_start, mtp=mtp)

    @property
    def max_model_len(self) -> int:
        return self.design.max_model_len

    def tune(self) -> None:
        """Measure which kernel multiplies each matrix fastest. Raises DoesNotFit."""
        with enough_memory("measuring kernels", "end what else uses this GPU, or use fp8 weights"):
            decoder = self.decoder
            linears = decoder.linears + ([] if self.mtp is None else self.mtp.linears)
            decoder.table = MatmulTable.fill(linears, decoder.dtype, self.card.timer())

    @property
    def geometry(self) -> KVGeometry:
        """The MTP layer's keys and values are the last."""
        model, page_size = self.model, self.design.config.page_size
        layers = len(model.attentions) + (self.mtp is not None)
        return KVGeometry(layers, model.kv_heads, page_size, model.head_dim, self.design.precision.kv_dtype)

    @property
    def states(self) -> StateGeometry:
        return StateGeometry.of(self.model, self.decoder.dtype)

    @property
    def undrafted(self) -> str | None:
        """Why no row verifies drafts, where they are asked for."""
        if self.design.lacks is not None and self.states.slot_bytes:
            return "torch's operations leave no state behind each token"
        return None

    @property
    def together_max(self) -> int:
        """The most tokens of a row; 1: none verifies drafts (`undrafted`)."""
        most = min(self.design.config.max_drafts, DRAFTS_MAX) + 1
        if self.undrafted is not None:
            return 1
        if self.design.attention.decode.backend is not Backend.TRITON:
            return most
        spec = AttentionSpec.of(self.model)
        return max(query_counts(spec.heads // spec.kv_heads, spec.head_dim, most), default=1)

    @property
    def drafts_together(self) -> int:
        """The most drafts of a step, where there is memory for their states."""
        config, most = self.design.config, self.together_max - 1
        useful = useful_windows(config, most) if self.states.slot_bytes else config.max_num_seqs * most
        return min(useful, DRAFTS_TOGETHER_MAX)

    @property
    def largest(self) -> RunnerInfo:
        """The sizes of steps that are measured or compiled: one page, and all drafts of a step."""
        windows = self.drafts_together if self.states.slot_bytes else 0
        return self._drafting(self.info(pages=1), self.drafts_together, windows)

    def _drafting(self, info: RunnerInfo, together: int, windows: int) -> RunnerInfo:
        """`info` with so many drafts in a step."""
        return msgspec.structs.replace(
            info,
            drafts_max=min(self.together_max - 1, together),
            guesses_max=0 if self.mtp is None else min(GUESSES_MAX, self.together_max - 1, together),
            drafts_together=together,
            verify_shapes=[] if self.design.is_eager else list(self._verify_buckets(together)),
            state_windows=windows,
        )

    def info(self, pages: int) -> RunnerInfo:
        """The runner's sizes and type, with times and host memory left at 0."""
        design, major, minor = self.design, *self.card.capability
        shards = self.decoder.ranks.shard.size
        network = "" if design.lacks is None else "torch network, "
        kernels = (
            f"{network}triton {launching.VERSION}, torch {torch.__version__}, capability {major}.{minor}"
        )
        arithmetic = f"{kernels}, {design.attention.arithmetic}, {design.precision}, {shards} shards"
        arithmetic += "" if self.mtp is None else ", MTP"
        sizes = self.geometry, self.decoder.dtype, self.max_model_len, pages
        rest = arithmetic, self.states.slot_bytes, self.pooler
        info = untimed_info(design.config, self.model, *sizes, *rest)
        together, windows = self.drafts_together, 0
        if info.state_bytes:
            together = windows = window_count(together, self.geometry, pages, info.state_bytes)
        return self._drafting(msgspec.structs.replace(info, is_async=True), together, windows)

    def _verify_buckets(self, drafts: int) -> tuple[int, ...]:
        """The padded numbers of tokens of steps in which rows verify drafts, so many at most."""
        tokens = min(self.design.config.max_num_seqs + drafts, GRAPH_ROWS_MAX)
        return verify_buckets(tokens) if drafts else ()

    def page_count(self) -> int:
        """The number of pages that fit beside the largest step. Raises DoesNotFit."""
        config, state_bytes = self.design.config, self.states.slot_bytes
        sizes = self.geometry, self.max_model_len
        snapshots = useful_states(config, *sizes, state_bytes) * state_bytes
        windows = self.drafts_together * state_bytes
        if config.kv_cache_memory is not None:
            states = config.max_num_seqs * state_bytes
            return page_count(config, self.model, *sizes, 0, states, snapshots, windows)
        own = useful_pages(config, self.max_model_len), snapshots, windows
        return kv_page_count(self._profile(), config.gpu_memory_utilization, self.geometry.page_bytes, *own)

    def build(self, info: RunnerInfo, progress: Progress) -> DeviceRunner:
        """A runner of the sizes in `info`. Raises DoesNotFit."""
        with enough_memory("allocating the KV cache and capturing graphs", "lower --gpu-memory-utilization"):
            runner, step = self._assemble(info)
            if runner.states is not None:
                runner.states.reserve(info.state_places)
                progress(self.states.describe(info.slots, info.state_places, info.state_windows))
            if not self.design.is_eager:
                runner.steps = self._captured(step, runner, self.card.graphs(), progress)
            progress("planning attention of long prompts")
            tokens_max = min(self.design.config.max_step_tokens, self.max_model_len)
            runner.model.prefill.warm_up(tokens_max, self.decoder.dtype)
        return runner

    def _captured(
        self, step: DecodeStep, runner: DeviceRunner, device: GraphDevice, progress: Progress
    ) -> _Graphs:
        """Graphs for all batch sizes, each of the faster form of the step."""
        overlapping = None
        buckets = runner.steps.buckets
        if device.timer is not None and self.card.capability >= OVERLAP_CAPABILITY:
            overlapping = replace(step, launches_dependently=True)
        graphs = self._graphs(step, runner.slots, buckets, overlapping, runner.steps.verified)
        if overlapping is not None:
            progress("compiling kernels that overlap")
            with ThreadPoolExecutor(usable_cores()) as workers, self.card.compiling(workers):
                for rows in graphs.timed_buckets:
                    overlapping(DecodeInputs.empty(rows, self.card.device))
        graphs.capture(device, partial(_tell, progress, "decode steps"))
        for found in Overlap:
            if own := [str(rows) for rows, how in sorted(graphs.overlaps.items()) if how is found]:
                progress(f"kernels that overlap: {found.value} for {', '.join(own)} rows")
        return graphs

    def _assemble(self, info: RunnerInfo, *, is_real: bool = True) -> tuple[DeviceRunner, DecodeStep]:
        """A runner that launches kernel by kernel, and its decode step. `is_real`: False where nobody reads
        what it computes."""
        device, decoder, model = self.card.device, self.decoder, self.model
        pages = info.pages + 1  # the last is for padding rows
        cache = KVCache(self.geometry, pages, self.kv_scales, device)
        cache.pool.zero_()  # fresh memory may be NaN: Triton kernels mask it, a library may multiply it
        slots = DeviceSlots(
            info.slots,
            info.max_model_len,
            info.page_size,
            info.vocab_size,
            info.pages,
            device,
            info.drafts_together,
        )
        sampled = info.slots + info.drafts_together
        scratch = SamplingScratch.empty(sampled, info.vocab_size, decoder.dtype, device)
        spec = AttentionSpec.of(model)
        bounds = Bounds(sampled, info.max_model_len, self.card.multiprocessors, self.together_max)
        decode, prefill = build_backends(self.design.attention, cache, spec, decoder.dtype, bounds)
        states = None
        if info.state_bytes:  # one more than there are sequences, for padding rows
            cells = info.slots + 1, device, info.state_windows
            states = States(self.states, *cells, are_real=is_real)
        hidden = mtp = None
        if self.mtp is not None:
            hidden = torch.empty(sampled, model.hidden_size, dtype=decoder.dtype, device=device)
            mtp = self._bound_mtp(self.mtp, cache, slots, scratch)
        kept = StepTables(slots.tokens, slots.page_table, cache, decode, states)
        sampler = DeviceSampler(decoder, slots.tokens, slots.sampling, scratch, states)
        step = DecodeStep(kept, sampler, hidden=hidden)
        rows_max = min(info.slots, GRAPH_ROWS_MAX)
        whole = DeviceModel(decoder, cache, decode, prefill, states)
        buckets = self._verify_buckets(info.drafts_together)
        verified = verify_shapes(buckets, decode.together or (self.together_max,))
        runner = DeviceRunner(
            info=info,
            model=whole,
            cache=cache,
            host=HostPages(cache, info.host_pages),
            slots=slots,
            sampler=sampler,
            steps=self._graphs(step, slots, batch_buckets(rows_max), verified=verified),
            pooler=self.pooler,
            mtp=mtp,
            hidden=hidden,
        )
        return runner, step

    def _bound_mtp(
        self, layer: DeviceMtpLayer, cache: KVCache, slots: DeviceSlots, scratch: SamplingScratch
    ) -> DeviceMtp:
        """The MTP layer over the last layer of the cache, which our kernels alone read: others may want to
        know on the host how many keys a row has."""
        own = cache.part(slice(len(self.model.attentions), None))
        spec = AttentionSpec.of(layer.body.config)
        triton = BackendChoice(Chosen(Backend.TRITON), Chosen(Backend.TRITON))
        bounds = Bounds(slots.slots, self.max_model_len, self.card.multiprocessors)
        decode, _ = build_backends(triton, own, spec, layer.body.dtype, bounds)
        return DeviceMtp(layer, own, slots, decode, scratch)

    def _graphs(
        self,
        step: DecodeStep,
        slots: DeviceSlots,
        buckets: Sequence[int],
        overlapping: DecodeStep | None = None,
        verified: Sequence[StepShape] = (),
    ) -> _Graphs:
        plan, padding = step.kept.attention.plan, slots.padding_slot
        return DecodeGraphs(step, buckets, padding, slots.device, plan, overlapping, verified)

    def _profile(self) -> MemoryProfile:
        """Run the largest step, and measure the memory that it takes from torch and past torch."""
        card, start = self.card, self.at_start
        with enough_memory("running the largest step", "lower --max-step-tokens or --max-num-seqs"):
            runner, step = self._assemble(self.largest, is_real=False)
            idle = card.memory()
            card.start_peak()
            for plan in largest_plans(runner.info, self.design.config.max_step_tokens):
                runner.run(plan)
            stepped = card.memory()
            graphs = 0 if self.design.is_eager else self._graph_bytes(step, runner)
        return MemoryProfile(
            total=start.total,
            free_at_start=start.free,
            weights=idle.reserved - runner.cache.pages * self.geometry.page_bytes,
            step_peak=stepped.reserved_peak - idle.reserved,
            outside_torch=max(0, start.free - stepped.free - stepped.reserved),
            graphs=graphs,
        )

    def _graph_bytes(self, step: DecodeStep, runner: DeviceRunner) -> int:
        """The memory of all graphs. There is one more decode step while two forms of it are compared."""
        steps, device = runner.steps, self.card.graphs()
        few = self._graphs(step, runner.slots, sorted({1, steps.buckets[-1]}), verified=steps.verified[-1:])
        return self._taken(partial(few.capture, device), len(steps.buckets) + len(steps.verified))

    def _taken(self, capture: Callable[[Callable[[int, int], None]], None], graphs: int) -> int:
        """The memory of so many graphs, from a capture of the largest and the smallest of them: the largest
        allocates the pool that all share, and every graph has as many kernels and arguments of its own as the
        smallest."""
        free: list[int] = []
        capture(lambda *_: free.append(self.card.memory().free))
        largest, *smallest = (before - after for before, after in pairwise(free))
        return max(0, largest) + max(0, *smallest, 0) * graphs

    def rehearse(self, *, clear_tails: bool, all_products: bool) -> None:
        """Launch every Triton kernel that a start launches, so that it is compiled. Only a product's kernel
        can be missed, where the start's measurements choose another tile.

        `all_products`: with overlap, too. A start compiles those of them that it needs once it has chosen
        its tiles.
        """
        forms = (False, True) if self.card.capability >= OVERLAP_CAPABILITY else (False,)
        for overlaps in forms if all_products else forms[:1]:
            with dependent_launches(overlaps):
                self.tune()
        runner, step = self._assemble(self.largest, is_real=False)
        runner.cache.clear_tails = clear_tails
        for plan in largest_plans(runner.info, self.design.config.max_step_tokens):
            runner.compute(plan)
        for rows in runner.steps.buckets:
            for overlaps in forms:
                replace(step, launches_dependently=overlaps)(DecodeInputs.empty(rows, self.card.device))
        for shape in runner.steps.verified:
            step(DecodeInputs.empty(shape.rows, self.card.device, shape.together))


def largest_plans(info: RunnerInfo, tokens: int) -> Iterator[Plan]:
    """The plans that take the most memory: the most rows that sample, the most tokens behind drafts, and the
    longest prompt that `tokens` allows. All rows share one page, since their results are not read."""
    asked = SamplingParams(
        seed=0, max_tokens=1, top_p=0.9, logprobs=LIKELIEST_MAX, prompt_logprobs=LIKELIEST_MAX
    )
    longest = min(tokens, info.max_model_len - 1)
    rows = min(tokens, info.slots)
    left: list[int] = []
    for lengths in ([min(longest, tokens // rows)] * rows, [longest]):
        if longest < 1:
            return
        if left and info.drafts_together:
            yield _verifying(info, len(left), min(longest, tokens // rows) + 1, tokens)
        slots, most = list(range(len(lengths))), info.drafts_max + 1
        seated = [SlotAssignment.of(slot, [0] * n, n, asked) for slot, n in zip(slots, lengths, strict=True)]
        ends = [min(n + most, info.max_model_len) for n in lengths]
        grown = [(slot, [0] * -(-end // info.page_size)) for slot, end in zip(slots, ends, strict=True)]
        guesses = [_guesses(info, end) for end in lengths] if info.guesses_max else []
        own = slots, [0] * len(slots), lengths, [Want.SAMPLE] * len(slots)
        yield Plan(0, left, seated, grown, *own, guesses=guesses)
        left = slots


def _guesses(info: RunnerInfo, known_len: int) -> int:
    """The guesses that there is room for behind so many known tokens, and the one that is sampled."""
    return max(0, min(info.guesses_max, info.max_model_len - known_len - 2))


def _verifying(info: RunnerInfo, rows: int, known_len: int, tokens: int) -> Plan:
    """A plan in which the first slots, which know so many tokens, go on with as many drafts as a step of
    `tokens` may have."""
    room = min(info.drafts_max, info.max_model_len - known_len)
    left = min(info.drafts_together, tokens - rows)
    lengths = []
    for _ in range(rows):
        lengths.append(1 + min(room, left))
        left -= lengths[-1] - 1
    lengths.sort(key=lambda length: length > 1)
    wants = [Want.VERIFY if length > 1 else Want.SAMPLE for length in lengths]
    drafts = [[0] * (length - 1) for length in lengths if length > 1]
    return Plan(0, [], [], [], list(range(rows)), [known_len - 1] * rows, lengths, wants, drafts=drafts)


@contextmanager
def enough_memory(doing: str, advice: str) -> Iterator[None]:
    """Raise DoesNotFit where the device's memory ends within. `doing` and `advice` go into the message.

    The error may come from torch, a library or Triton, or follow from one of these, as that of a capture
    which was broken off.
    """
    try:
        yield
    except RuntimeError as error:
        if (found := out_of_memory(error)) is None:
            raise
        raise DoesNotFit(
            f"out of GPU memory while {doing}: {advice} ({str(found).split('. ')[0]})"
        ) from error


def _tell(progress: Progress, what: str, done: int, of: int) -> None:
    progress(f"capturing {what}, {done} of {of}")


def load_shard(
    config: RunnerConfig, card: OwnCard, progress: Progress, ranks: Collective = ALONE
) -> DeviceShard:
    """One rank's part of the model, or the whole of it, with each matrix's kernel measured. Raises
    ModelError."""
    threads = set_threads(config, ranks.neighbours)
    model = read_model(config, progress)
    design = Design.of(config, model, card, ranks.shard)
    shards = "" if ranks.shard == WHOLE else f", in {ranks.shard.size} shards,"
    progress(f"loading {model.architecture} in {dtype_name(design.dtype)}{shards} on {card.name}")
    model, source = checked_checkpoint(config, design.model, design.dtype, progress, card.device)
    design = replace(design, model=model)
    if design.lacks is not None:
        progress(f"computing with torch's operations, without graphs: the Triton kernels lack {design.lacks}")
    progress(str(design.attention))
    at_start = card.memory()
    with rehearsed(card, partial(rehearse, design, Blueprint.of(card), ranks.shard), threads) as compiled:
        shard = DeviceShard.load(design, source, card, ranks, at_start)
        shard = replace(shard, pooler=load_pooler(config, model, card.device))
        if said := design.precision.describe(model, shard.kv_scales):
            progress(said)
        progress(compiled())
    if config.max_drafts and shard.undrafted is not None:
        progress(f"verifying no drafts: {shard.undrafted}")
    elif config.max_drafts and model.mtp is not None:
        progress(
            "drafting by the model's MTP layer"
            if shard.mtp is not None
            else f"drafting without the model's MTP layer: {design.mtp_lacks}"
        )
    progress("measuring which kernels multiply fastest")
    shard.tune()
    progress("measuring the largest step")
    return shard


def rehearse(design: Design, blueprint: Blueprint, shard: Shard, *, all_products: bool = False) -> None:
    """Compile the kernels of a start, by a walk through a model with one layer per kind. `all_products`: as
    `DeviceShard.rehearse` has it.

    Layers differ by their description, and the first from all others. Attention is rehearsed with the Triton
    kernels, which some libraries need beside them; a library's own kernels are not compiled here.
    """
    layers = (design.model.layers[0], *dict.fromkeys(design.model.layers))
    model = replace(design.model, layers=layers)
    triton = BackendChoice(Chosen(Backend.TRITON), Chosen(Backend.TRITON))
    rehearsal = DeviceShard.load(
        replace(design, model=model, attention=triton),
        Shapes(design.dtype, model.fp8),
        blueprint,
        Alone(shard),
        blueprint.memory(),
    )
    rehearsal.rehearse(clear_tails=design.attention.reads_whole_pages, all_products=all_products)
