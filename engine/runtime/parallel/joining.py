"""A rank's way to the other ranks and to its device: rank r of a machine has card r, if there are any."""

from __future__ import annotations

import torch

from engine.runtime.collective.group import Group, Meeting
from engine.runtime.collective.shard import Shard
from engine.runtime.load import choose_device
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig


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
