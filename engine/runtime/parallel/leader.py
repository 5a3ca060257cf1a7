"""Rank 0: its own runner, and the others told before it runs anything itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.core.messages import Pending, Plan, RunnerInfo, RunResult
from engine.runtime.config import RunnerConfig
from engine.runtime.errors import BadRunnerConfig
from engine.runtime.kv_cache import host_page_count, page_count
from engine.runtime.load import Progress, dtype_name, warm_up
from engine.runtime.model_runner import ModelRunner
from engine.runtime.models.config import ModelConfig, read_model_config
from engine.runtime.parallel.loading import LoadedShard, connect, load_shard
from engine.runtime.parallel.ranks import OnLost, Ranks
from engine.runtime.parallel.shard import Shard
from engine.runtime.parallel.wire import Build, Execute, Here, Landed, Loaded, digest_of
from shared.clock import SYSTEM_CLOCK, Clock


@dataclass(frozen=True, slots=True)
class Flight:
    """Implements the `Pending` protocol: what every rank computes, as rank 0 found it."""

    step: int
    pending: Pending
    ranks: Ranks

    def collect(self) -> RunResult:
        with self.ranks.step(self.step):
            result = self.pending.collect()
            self.ranks.send(Landed(self.step, digest_of(result.tokens)))
        return result


@dataclass(slots=True)
class LeadingRunner:
    """Implements the `Runner` protocol. Raises RankLost, wherever it waits for another rank."""

    info: RunnerInfo
    own: ModelRunner
    ranks: Ranks

    def run(self, plan: Plan) -> RunResult:
        """Launch and collect."""
        return self.launch(plan).collect()

    def launch(self, plan: Plan) -> Flight:
        with self.ranks.step(plan.step):
            self.ranks.send(Execute(plan))
            return Flight(plan.step, self.own.launch(plan), self.ranks)

    def close(self) -> None:
        """Ends the other ranks."""
        self.ranks.close()


@torch.inference_mode()
def lead(
    config: RunnerConfig, progress: Progress, on_lost: OnLost, clock: Clock = SYSTEM_CLOCK
) -> LeadingRunner:
    """As `load.load_runner`, with `config.tensor_parallel` ranks, of which this process is the first.

    `on_lost` is called in another thread when a rank is lost, whatever this one is waiting for then.
    """
    started_s = time.monotonic()
    model = read_model_config(Path(config.model_dir))
    _refuse(config, model)
    ranks = Ranks(config, on_lost, clock)
    try:
        progress(f"starting {config.tensor_parallel} ranks")
        ranks.answers(Here)
        with ranks.step(0):
            group = connect(config, 0, ranks.store_file)
        progress(f"loading {model.architecture} in {config.tensor_parallel} shards")
        shard = load_shard(config, group)
        progress(f"computing with {shard.network.name}")
        available_bytes = min(
            shard.available_bytes, *(other.available_bytes for other in ranks.answers(Loaded))
        )
        loaded_s = time.monotonic()
        info = _sizes(shard, available_bytes // config.tensor_parallel, loaded_s - started_s)
        progress(f"allocating {info.pages} KV pages of {config.page_size} tokens on each rank")
        ranks.send(Build(info))
        runner = LeadingRunner(info, shard.build(info), ranks)
        progress("warming up")
        warm_up(runner)
        page_copy_s, warmup_s = runner.own.host.measure(), time.monotonic() - loaded_s
        runner.info = msgspec.structs.replace(info, warmup_s=warmup_s, page_copy_s=page_copy_s)
    except BaseException:
        ranks.close()
        raise
    ranks.serve()
    return runner


def _refuse(config: RunnerConfig, model: ModelConfig) -> None:
    """What cannot be split, before any process is started. Raises BadRunnerConfig."""
    Shard(0, config.tensor_parallel).of(model)
    if config.kernels == "native" or config.weights == "int8":
        what = "weights=int8" if config.weights == "int8" else "kernels=native"
        raise BadRunnerConfig(
            f"{what} needs the native kernels, which take no shards: tensor_parallel must be 1"
        )


def _sizes(shard: LoadedShard, available_bytes: int, load_s: float) -> RunnerInfo:
    """For every rank alike. `available_bytes`: to each."""
    config, geometry = shard.config, shard.geometry
    return RunnerInfo(
        pages=page_count(config, shard.model, geometry, shard.max_model_len, available_bytes),
        page_size=config.page_size,
        slots=config.max_num_seqs,
        max_model_len=shard.max_model_len,
        vocab_size=shard.model.vocab_size,
        dtype=dtype_name(shard.dtype),
        load_s=load_s,
        warmup_s=0.0,
        page_bytes=geometry.page_bytes * config.tensor_parallel,
        host_pages=host_page_count(config, geometry, shard.max_model_len, available_bytes),
    )
