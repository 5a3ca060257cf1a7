"""A rank's part of the model, made the same way on every rank.

On a GPU that is `engine.runtime.device.device_shard`, rank r of a machine on card r; on a CPU
`engine.runtime.host.host_shard`, where ranks share the machine's cores and memory.
"""

from __future__ import annotations

import torch

from engine.runtime.collective.group import Group, Meeting
from engine.runtime.collective.shard import Shard
from engine.runtime.load import choose_device
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start.starting import LoadedShard, Progress, ShardRunner


def connect(config: RunnerConfig, rank: int, store_file: str, meeting: Meeting | None = None) -> Group:
    """Waits for the other ranks. Raises CollectiveFailed, BadRunnerConfig."""
    device = choose_device(config)
    local_rank = rank if meeting is None else meeting.local_rank
    own = torch.device("cuda", local_rank) if device.type == "cuda" else device
    if own.type == "cuda":
        neighbours = config.tensor_parallel_size if meeting is None else meeting.neighbours
        if torch.cuda.device_count() < neighbours:
            raise BadRunnerConfig(
                f"--tensor-parallel-size {config.tensor_parallel_size} needs a GPU for each rank, which is "
                f"{neighbours} on this machine, and there are {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(own)
    return Group(Shard(rank, config.tensor_parallel_size), store_file, own, meeting)


def load_shard(config: RunnerConfig, ranks: Group, progress: Progress) -> LoadedShard[ShardRunner]:
    """This rank's weights. Raises ModelError. Sets torch's thread counts, which belong to the process."""
    if ranks.device.type == "cpu":
        from engine.runtime.host import host_shard as host

        return host.load_shard(config, progress, ranks)
    from engine.runtime.device import device_shard as device
    from engine.runtime.device.card import CudaCard

    return device.load_shard(config, CudaCard(ranks.device), progress, ranks)
