"""A rank's own runner, the same way on every rank: its shard first, then, once rank 0 has chosen the sizes,
the cache and what runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.core.messages import RunnerInfo
from engine.runtime.config import RunnerConfig
from engine.runtime.hardware import available_memory_bytes, usable_cores
from engine.runtime.kv_cache import HostPages, KVCache, KVGeometry
from engine.runtime.load import (
    TorchNetwork,
    checked_checkpoint,
    choose_dtype,
    choose_max_model_len,
    set_threads,
)
from engine.runtime.model_runner import ModelRunner
from engine.runtime.models.config import ModelConfig, read_model_config
from engine.runtime.models.registry import DECODERS
from engine.runtime.parallel.collective import Collective, Group
from engine.runtime.parallel.shard import Shard
from engine.runtime.slots import Slots


def connect(config: RunnerConfig, rank: int, store_file: str) -> Group:
    """Waits for the other ranks. Raises CollectiveFailed."""
    return Group(Shard(rank, config.tensor_parallel), store_file, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """Weights, before there is a cache."""

    config: RunnerConfig
    model: ModelConfig
    """As this rank computes it."""
    dtype: torch.dtype
    max_model_len: int
    network: TorchNetwork
    available_bytes: int
    """For the cache, if this rank were alone on the machine."""

    @property
    def geometry(self) -> KVGeometry:
        model = self.model
        return KVGeometry(model.layers, model.kv_heads, self.config.page_size, model.head_dim, self.dtype)

    @torch.inference_mode()
    def build(self, info: RunnerInfo) -> ModelRunner:
        cache = KVCache(self.geometry, info.pages)
        return ModelRunner(
            info=info,
            model=self.network.attach(cache),
            cache=cache,
            host=HostPages(cache, info.host_pages),
            slots=Slots(info.slots, info.max_model_len, info.page_size, info.vocab_size),
        )


@torch.inference_mode()
def load_shard(config: RunnerConfig, ranks: Collective) -> LoadedShard:
    """Raises ModelError. Sets torch's thread counts, which belong to the process."""
    size = ranks.shard.size
    set_threads(max(1, (config.threads or usable_cores()) // size))
    model = read_model_config(Path(config.model_dir))
    share = ranks.shard.of(model)
    dtype = choose_dtype(config.dtype)
    decoder = DECODERS[model.architecture](model, checked_checkpoint(config, model, dtype), ranks)
    network = TorchNetwork(decoder, share, f"on {size} ranks: native kernels take no shards")
    return LoadedShard(
        config, share, dtype, choose_max_model_len(config, model), network, available_memory_bytes()
    )
