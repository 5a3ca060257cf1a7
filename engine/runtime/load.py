"""The door to a runner, and to a rank's part of the model: choose the device, and hand over to
`engine.runtime.host.host_shard` or `engine.runtime.device.device_shard`."""

from __future__ import annotations

import torch

from engine.runtime.collective.collective import ALONE, Collective
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig
from engine.runtime.start.starting import LoadedShard, Progress, ShardRunner, start_alone


def load_runner(config: RunnerConfig, progress: Progress) -> ShardRunner:
    """A warm runner. `progress` hears of each stage. Raises ModelError with a message for the operator.

    Sets torch's thread counts, which belong to the process: one runner per process.
    """
    device = choose_device(config)
    progress(f"device {device.type}, {'chosen by auto' if config.device == 'auto' else 'as asked for'}")
    return start_alone(config, lambda: load_shard(config, device, progress), progress)


def load_shard(
    config: RunnerConfig, device: torch.device, progress: Progress, ranks: Collective = ALONE
) -> LoadedShard[ShardRunner]:
    """A rank's weights on its device, or those of the whole model. Raises ModelError. Sets torch's thread
    counts, which belong to the process."""
    if device.type == "cpu":
        from engine.runtime.host import host_shard

        return host_shard.load_shard(config, progress, ranks)
    from engine.runtime.device import device_shard
    from engine.runtime.device.card import CudaCard

    return device_shard.load_shard(config, CudaCard(device), progress, ranks)


def choose_device(config: RunnerConfig) -> torch.device:
    """`auto` is the CPU where a setting is for CPUs only, and else a GPU if there is one. Raises
    BadRunnerConfig where settings contradict each other, or there is no GPU."""
    for_cpu = _set_to(config, weights=("int8",), kernels=("native", "torch"))
    for_gpu = _set_to(config, weights=("fp8",), kv_cache_dtype=("fp8",))
    if config.attention_backend not in ("auto", "torch"):
        for_gpu.append(f"attention_backend={config.attention_backend}")
    has_gpu = torch.cuda.is_available()
    is_gpu = has_gpu and not for_cpu if config.device == "auto" else config.device == "cuda"
    if is_gpu and not has_gpu:
        raise BadRunnerConfig(
            f"device=cuda, but this torch ({torch.__version__}) finds no GPU: is it a build for CUDA, and "
            "does nvidia-smi list a card? device=cpu runs without"
        )
    if misplaced := for_cpu if is_gpu else for_gpu:
        here, there = ("GPU", "CPUs") if is_gpu else ("CPU", "GPUs")
        raise BadRunnerConfig(f"{', '.join(misplaced)}: only for {there}, and this runs on a {here}")
    return torch.device("cuda" if is_gpu else "cpu")


def _set_to(config: RunnerConfig, **values: tuple[object, ...]) -> list[str]:
    """The settings that have one of the given values, as `name=value`."""
    return [f"{name}={getattr(config, name)}" for name in values if getattr(config, name) in values[name]]
