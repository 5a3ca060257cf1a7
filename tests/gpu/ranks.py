"""What ranks do together, over NCCL: launched kernel by kernel, and inside a CUDA graph.

With one card the group has one rank, which shows that its calls are NCCL's and can be captured; with two,
every family on both against the same on one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.runtime.collective.group import Group
from engine.runtime.collective.shard import Shard
from engine.runtime.device.graphs import CudaGraphDevice
from engine.runtime.load import load_runner
from engine.runtime.parallel.leader import lead
from engine.runtime.setup.runner_config import RunnerConfig
from tests.bench.engine.gpu.measuring import check
from tests.bench.engine.gpu.results import write
from tests.engine.models import make_tiny_model


def one_rank() -> dict[str, Any]:
    file = os.memfd_create("ranks")
    group = Group(Shard(), f"/proc/self/fd/{file}", torch.device("cuda", 0))
    x = torch.arange(12.0, device="cuda").reshape(3, 4)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        doubled = x * 2
        return group.all_gather(group.all_reduce_(doubled)), doubled

    assert torch.equal(run()[0], 2 * x)
    device = CudaGraphDevice()
    device.warm_up(run)
    captured = device.capture(run)
    for _ in range(3):
        x.add_(1)
        captured.replay()
        assert torch.equal(captured.output[0], 2 * x), "a graph's collectives are not those outside"
    torch.cuda.synchronize()
    del captured  # before the group whose calls it holds
    return {"replays": 3}


def two_ranks(path: Path) -> dict[str, Any]:
    from tests.engine.runtime.parallel.test_equality import said, small

    tokens, *_ = said(load_runner(RunnerConfig(str(path), **small(path, 1)), lambda stage: None))
    reasons: list[str] = []
    together = lead(
        RunnerConfig(str(path), tensor_parallel_size=2, **small(path, 2)), lambda stage: None, reasons.append
    )
    try:
        found, *_ = said(together)
    finally:
        together.close()
    assert found == tokens, "two cards say something else than one"
    assert not reasons, reasons
    return {"tokens": sum(map(len, tokens.values()))}


def main() -> int:
    ok = check("ranks", "one rank, eager and captured", one_rank)
    if torch.cuda.device_count() < 2:
        write("ranks", "two ranks", measured="not measured: one card")
        return 0 if ok else 1
    from tests.engine.runtime.parallel.test_equality import MODELS  # compiles the CPU's kernels

    with tempfile.TemporaryDirectory() as directory:
        for family, overrides in MODELS.items():
            path = make_tiny_model(family, Path(directory) / family, **overrides)
            ok &= check("ranks", f"{family} on two ranks", partial(two_ranks, path))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
