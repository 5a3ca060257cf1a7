"""A rank on a CPU in a GPU's place: kernels in Triton's interpreter, graphs that run again."""

from __future__ import annotations

import sys
from dataclasses import replace

from engine.runtime.collective.group import Group
from engine.runtime.device import device_shard as device
from engine.runtime.device.device_shard import DeviceShard
from engine.runtime.parallel import loading, rank
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start.starting import Progress
from tests.engine.runtime.device.card import FakeCard


def load_shard(config: RunnerConfig, ranks: Group, progress: Progress) -> DeviceShard:
    config = replace(config, attention_backend="triton")  # which nobody may ask of a CPU
    return device.load_shard(config, FakeCard(), progress, ranks)


if __name__ == "__main__":
    loading.load_shard = load_shard
    sys.exit(rank.main())
