"""A rank's part of the model, made the same way on every rank.

On a GPU that is `engine.runtime.device.load`, rank r on card r; on a CPU `engine.runtime.host.load`, where
ranks share the machine's cores and memory.
"""

from __future__ import annotations

import torch

from engine.runtime.config import RunnerConfig
from engine.runtime.errors import BadRunnerConfig
from engine.runtime.load import choose_device
from engine.runtime.parallel.group import Group
from engine.runtime.parallel.shard import Shard
from engine.runtime.starting import LoadedShard, Progress, ShardRunner


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


def load_shard(config: RunnerConfig, ranks: Group, progress: Progress) -> LoadedShard[ShardRunner]:
    """This rank's weights. Raises ModelError. Sets torch's thread counts, which belong to the process."""
    if ranks.device.type == "cpu":
        from engine.runtime.host import load as host

        return host.load_shard(config, progress, ranks)
    from engine.runtime.device import load as device
    from engine.runtime.device.card import CudaCard

    return device.load_shard(config, CudaCard(ranks.device), progress, ranks)
