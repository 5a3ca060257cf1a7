"""A model's weights on a CPU: the network that computes it, chosen by what each one implements.

The native kernels compute where they are built, implement the model and take its sizes, or those of a rank's
part of it. Otherwise torch does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import msgspec
import torch

from engine.contract.messages import RunnerInfo
from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.collective.shard import WHOLE, Shard
from engine.runtime.host.exact_attention import ExactAttention
from engine.runtime.host.host_runner import HostRunner
from engine.runtime.host.model import TorchModel
from engine.runtime.host.mtp import Mtp, MtpLayer
from engine.runtime.host.sampler import draw_by_torch
from engine.runtime.host.torch_paged import PagedAttention, Workspace
from engine.runtime.models.spec import DecoderSpec
from engine.runtime.native.decoder import DRAFTS_MAX, NativeDecoder, built_isas, misfit
from engine.runtime.reference.torch_decoder import TorchDecoder
from engine.runtime.setup.hardware import available_memory_bytes
from engine.runtime.setup.model_errors import BadRunnerConfig, UnsupportedModel
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
    useful_states,
    useful_windows,
    window_count,
)
from engine.runtime.step.pooling import Pooler
from engine.runtime.step.protocols import AttentionSpec
from engine.runtime.step.result_tensors import GUESSES_MAX
from engine.runtime.step.seats import HostSlots
from engine.runtime.step.states import StateGeometry, States
from engine.runtime.weights.checkpoint import WeightSource


@dataclass(frozen=True, slots=True)
class TorchNetwork:
    """Weights in host memory, and the reference network, which computes with them where `NativeDecoder` does
    not."""

    decoder: TorchDecoder
    config: DecoderSpec
    """The model as this rank computes it."""
    reason: str
    """Why the native kernels do not compute, for the log."""
    draw: ClassVar[None] = None
    """The network has no way of its own to draw tokens: torch draws them."""

    @property
    def name(self) -> str:
        return f"torch kernels ({self.reason})"

    @property
    def arithmetic(self) -> str:
        """torch's version and instructions, and its threads: oneDNN splits sums between some numbers of them,
        so float32 has other last bits with 7 than with 1."""
        threads, shards = torch.get_num_threads(), self.decoder.ranks.shard.size
        kernels = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
        return f"{kernels}, {threads} threads, {shards} shards"

    @property
    def drafts_max(self) -> int:
        """The most drafts of a row that are verified with the bits of decodes. A model without states has
        none: a product of several rows has other last bits than one of a single row. Computed as it is of a
        model with states (`engine.runtime.host.exact_attention`), it has not, and attention over 500 tokens
        takes 2 times as long for one stream, and 10 times as long for 8: more than drafts save."""
        return DRAFTS_MAX if self.config.deltas else 0

    def attach(self, cache: KVCache, slots: int, windows: int = 0) -> TorchModel:
        """The model whose keys and values go to `cache`. `slots`: of which it keeps the states, if it has
        any, and `windows` for drafts."""
        spec = AttentionSpec.of(self.config)
        if self.config.deltas:
            states = States(StateGeometry.of(self.config, cache.geometry.dtype), slots, windows=windows)
            return TorchModel(self.decoder, partial(ExactAttention, cache, spec=spec), states)
        workspace = Workspace(cache.geometry.dtype)
        return TorchModel(self.decoder, partial(PagedAttention, cache, spec=spec, workspace=workspace))


HostNetwork = TorchNetwork | NativeDecoder


@dataclass(frozen=True, slots=True)
class HostShard:
    """Implements `LoadedShard` on a CPU."""

    config: RunnerConfig
    model: DecoderSpec
    """The model as this rank computes it."""
    dtype: torch.dtype
    max_model_len: int
    network: HostNetwork
    neighbours: int = 1
    """The ranks that share this machine's memory, this one included."""
    pooler: Pooler | None = None
    """Makes vectors of prompts, where the model embeds."""
    mtp: MtpLayer | None = None
    """Its MTP layer, if it has one that drafts."""

    @property
    def geometry(self) -> KVGeometry:
        """The MTP layer's keys and values are the last."""
        model = self.model
        layers = len(model.attentions) + (self.mtp is not None)
        return KVGeometry(layers, model.kv_heads, self.config.page_size, model.head_dim, self.dtype)

    @property
    def states(self) -> StateGeometry:
        return StateGeometry.of(self.model, self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return self.states.slot_bytes

    @property
    def drafts_max(self) -> int:
        """The most drafts of a row."""
        return min(self.config.max_drafts, self.network.drafts_max)

    def page_count(self) -> int:
        config, available_bytes = self.config, available_memory_bytes() // self.neighbours
        states, sizes = config.max_num_seqs * self.state_bytes, (self.geometry, self.max_model_len)
        snapshots = useful_states(config, *sizes, self.state_bytes) * self.state_bytes
        windows = useful_windows(config, self.drafts_max) * self.state_bytes
        return page_count(config, self.model, *sizes, available_bytes, states, snapshots, windows)

    def info(self, pages: int) -> RunnerInfo:
        arithmetic = self.network.arithmetic + ("" if self.mtp is None else ", MTP")
        sizes = self.geometry, self.dtype, self.max_model_len, pages
        info = untimed_info(self.config, self.model, *sizes, arithmetic, self.state_bytes, self.pooler)
        windows, drafts_max = 0, self.drafts_max
        if self.state_bytes:
            useful = useful_windows(self.config, drafts_max)
            windows = window_count(useful, self.geometry, pages, self.state_bytes)
            drafts_max = min(drafts_max, windows)
        return msgspec.structs.replace(
            info,
            drafts_max=drafts_max,
            state_windows=windows,
            guesses_max=min(GUESSES_MAX, drafts_max) if self.mtp is not None else 0,
        )

    def build(self, info: RunnerInfo, progress: Progress) -> HostRunner:
        cache = KVCache(self.geometry, info.pages)
        own = slice(len(self.model.attentions))
        model = self.network.attach(cache.part(own), info.slots, info.state_windows)
        slots = HostSlots(info.slots, info.max_model_len, info.page_size, info.vocab_size)
        draw, mtp = self.network.draw, None
        if self.mtp is not None:
            mtp = Mtp(self.mtp, cache.part(slice(own.stop, None)), slots, model.logits, draw or draw_by_torch)
        if (states := model.states) is not None:
            states.reserve(info.state_places)
            progress(self.states.describe(info.slots, info.state_places, info.state_windows))
        return HostRunner(
            info=info,
            model=model,
            cache=cache,
            host=HostPages(cache, info.host_pages),
            slots=slots,
            draw=draw,
            states=states,
            pooler=self.pooler,
            mtp=mtp,
        )


def load_shard(config: RunnerConfig, progress: Progress, ranks: Collective = ALONE) -> HostShard:
    """One rank's part of the model, or the whole of it. Raises ModelError."""
    shard = ranks.shard
    threads = set_threads(config, ranks.neighbours)
    model, dtype = read_model(config, progress), choose_dtype(config.dtype)
    max_model_len = choose_max_model_len(config, model)
    model = replace(model, context_len=max_model_len)
    stored = "" if model.fp8 is None else f", multiplied out of {model.fp8}"
    shards = "" if shard == WHOLE else f", in {shard.size} shards"
    progress(f"loading {model.architecture} in {dtype_name(dtype)}{stored}{shards}")
    model, source = checked_checkpoint(config, model, dtype, progress)
    network = host_network(config, model, source, dtype, threads, ranks)
    progress(f"computing with {network.name}")
    if network.draw is not None:
        # Little is left to torch, and its threads would compete with the network's own for the cores.
        torch.set_num_threads(1)
    pooler, mtp = load_pooler(config, model), None
    if model.mtp is not None and network.drafts_max:
        mtp = MtpLayer(model, source, ranks)
        progress("drafting by the model's MTP layer")
    loaded = HostShard(config, shard.of(model), dtype, max_model_len, network, ranks.neighbours, pooler, mtp)
    if config.max_drafts and not loaded.drafts_max:
        progress("verifying no drafts: by torch, bits would differ")
    return loaded


def host_network(
    config: RunnerConfig,
    model: DecoderSpec,
    source: WeightSource,
    dtype: torch.dtype,
    threads: int,
    ranks: Collective = ALONE,
) -> HostNetwork:
    """The native network where it computes this model, else torch's. Raises BadRunnerConfig; and
    UnsupportedModel where neither computes it."""
    hindrance = _hindrance(config, model, ranks.shard)
    if hindrance is not None:
        if (reason := TorchDecoder.implements(model)) is not None:
            raise UnsupportedModel(f"no network computes this model on a CPU: {reason}")
        return TorchNetwork(TorchDecoder(model, source, ranks), ranks.shard.of(model), hindrance)
    return NativeDecoder(
        built_isas()[0],
        model,
        source,
        dtype=dtype,
        page_size=config.page_size,
        threads=threads,
        int8=config.weights == "int8",
        ranks=ranks,
    )


def _hindrance(config: RunnerConfig, model: DecoderSpec, shard: Shard) -> str | None:
    """Why the native kernels do not compute; None where they do. Raises BadRunnerConfig where the settings
    ask for them."""
    hindrance: str | None
    if config.kernels == "torch":
        hindrance = "kernels=torch"
    elif not built_isas():
        hindrance = "native kernels are not built"
    else:
        hindrance = misfit(model, config.page_size, shard)
    if hindrance is not None and (config.kernels == "native" or config.weights == "int8"):
        what = "int8 weights need" if config.weights == "int8" else "kernels=native needs"
        raise BadRunnerConfig(f"{what} the native kernels: {hindrance}")
    return hindrance
