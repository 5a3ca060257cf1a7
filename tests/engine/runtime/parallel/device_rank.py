"""A rank on a CPU in a GPU's place: kernels in Triton's interpreter, graphs that run again."""

from __future__ import annotations

import sys
from dataclasses import replace

from engine.runtime.config import RunnerConfig
from engine.runtime.device.load import DeviceNetwork, load_network
from engine.runtime.load import Progress, set_threads
from engine.runtime.parallel import loading, rank
from engine.runtime.parallel.group import Group
from tests.engine.runtime.device.card import FakeCard


def load_shard(config: RunnerConfig, ranks: Group, progress: Progress) -> DeviceNetwork:
    set_threads(1)
    config = replace(config, attention_backend="triton")  # which nobody may ask of a CPU
    return load_network(config, FakeCard(), progress, ranks)


if __name__ == "__main__":
    loading.load_shard = load_shard
    sys.exit(rank.main())
