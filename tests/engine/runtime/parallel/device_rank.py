"""A rank on a CPU in a GPU's place: kernels in Triton's interpreter, graphs that run again."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from engine.runtime import load as loading
from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.device import device_shard
from engine.runtime.parallel import rank
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start.starting import LoadedShard, Progress, ShardRunner
from tests.engine.runtime.device.card import FakeCard


def load_shard(
    config: RunnerConfig, device: torch.device, progress: Progress, ranks: Collective = ALONE
) -> LoadedShard[ShardRunner]:
    config = replace(config, attention_backend="triton")  # which nobody may ask of a CPU
    return device_shard.load_shard(config, FakeCard(), progress, ranks)


if __name__ == "__main__":
    loading.load_shard = load_shard
    sys.exit(rank.main())
