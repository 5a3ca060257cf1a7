"""A rank's own runner, made the same way on every rank: weights, then, once rank 0 has chosen the sizes, the
cache and all that runs on it.

On a GPU that is `engine.runtime.device.load`, rank r on card r. On a CPU the torch kernels compute, as the
native ones take no shards, and ranks share the machine's cores and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from engine.core.messages import Pending, Plan, RunnerInfo
from engine.runtime.config import RunnerConfig
from engine.runtime.errors import BadRunnerConfig
from engine.runtime.hardware import available_memory_bytes, usable_cores
from engine.runtime.kv_cache import HostPages, KVCache, KVGeometry, host_page_count, page_count
from engine.runtime.load import (
    Progress,
    TorchNetwork,
    checked_checkpoint,
    choose_device,
    choose_dtype,
    choose_max_model_len,
    dtype_name,
    read_model,
    set_threads,
    untimed_info,
)
from engine.runtime.model_runner import ModelRunner
from engine.runtime.models.config import ModelConfig
from engine.runtime.models.registry import DECODERS
from engine.runtime.parallel.collective import Collective
from engine.runtime.parallel.group import Group
from engine.runtime.parallel.shard import Shard
from engine.runtime.slots import Slots


class OwnRunner(Protocol):
    """A rank's part of a runner."""

    info: RunnerInfo

    @property
    def host(self) -> HostPages: ...

    def launch(self, plan: Plan) -> Pending: ...


class LoadedShard(Protocol):
    """Weights, before there is a cache."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def geometry(self) -> KVGeometry:
        """Of this rank's heads."""
        ...

    def page_count(self) -> int:
        """How many pages this rank has room for. Raises DoesNotFit. Steps that are run to find out are the
        same on every rank."""
        ...

    def info(self, pages: int) -> RunnerInfo:
        """Before anything was timed."""
        ...

    def build(self, info: RunnerInfo, progress: Progress) -> OwnRunner:
        """Of these sizes. Raises DoesNotFit."""
        ...


@dataclass(frozen=True, slots=True)
class HostShard:
    """On a CPU."""

    config: RunnerConfig
    model: ModelConfig
    """As this rank computes it."""
    dtype: torch.dtype
    max_model_len: int
    network: TorchNetwork

    @property
    def geometry(self) -> KVGeometry:
        model = self.model
        return KVGeometry(model.layers, model.kv_heads, self.config.page_size, model.head_dim, self.dtype)

    def page_count(self) -> int:
        config, available_bytes = self.config, available_memory_bytes() // self.config.tensor_parallel_size
        return page_count(config, self.model, self.geometry, self.max_model_len, available_bytes)

    def info(self, pages: int) -> RunnerInfo:
        return untimed_info(self.config, self.model, self.geometry, self.dtype, self.max_model_len, pages)

    def build(self, info: RunnerInfo, progress: Progress) -> ModelRunner:
        cache = KVCache(self.geometry, info.pages)
        return ModelRunner(
            info=info,
            model=self.network.attach(cache),
            cache=cache,
            host=HostPages(cache, info.host_pages),
            slots=Slots(info.slots, info.max_model_len, info.page_size, info.vocab_size),
        )


def connect(config: RunnerConfig, rank: int, store_file: str) -> Group:
    """Waits for the other ranks. Raises CollectiveFailed, BadRunnerConfig."""
    device = choose_device(config)
    own = torch.device("cuda", rank) if device.type == "cuda" else device
    if own.type == "cuda":
        if torch.cuda.device_count() < config.tensor_parallel_size:
            raise BadRunnerConfig(
                f"--tensor-parallel-size {config.tensor_parallel_size} needs a GPU for each rank, and there "
                f"are {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(own)
    return Group(Shard(rank, config.tensor_parallel_size), store_file, own)


def agreed(config: RunnerConfig, shard: LoadedShard, pages: int) -> RunnerInfo:
    """For every rank alike. `pages`: the fewest that any has room for."""
    host_bytes = available_memory_bytes() // config.tensor_parallel_size
    info = shard.info(pages)
    return msgspec.structs.replace(
        info,
        page_bytes=info.page_bytes * config.tensor_parallel_size,
        host_pages=host_page_count(config, shard.geometry, shard.max_model_len, host_bytes),
    )


def load_shard(config: RunnerConfig, ranks: Group, progress: Progress) -> LoadedShard:
    """Raises ModelError. Sets torch's thread counts, which belong to the process."""
    set_threads(max(1, (config.threads or usable_cores()) // ranks.shard.size))
    if ranks.device.type == "cpu":
        return _on_host(config, ranks, progress)
    from engine.runtime.device.card import CudaCard
    from engine.runtime.device.load import load_network

    return load_network(config, CudaCard(ranks.device), progress, ranks)


def _on_host(config: RunnerConfig, ranks: Collective, progress: Progress) -> HostShard:
    size, model, dtype = ranks.shard.size, read_model(config, progress), choose_dtype(config.dtype)
    progress(f"loading {model.architecture} in {dtype_name(dtype)}, in {size} shards")
    model, source = checked_checkpoint(config, model, dtype, progress)
    decoder = DECODERS[model.architecture](model, source, ranks)
    share = ranks.shard.of(model)
    network = TorchNetwork(decoder, share, f"on {size} ranks: native kernels take no shards")
    progress(f"computing with {network.name}")
    return HostShard(config, share, dtype, choose_max_model_len(config, model), network)
