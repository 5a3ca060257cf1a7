"""Rank 0: its own runner, and the messages to the other ranks, sent before it runs anything itself.

Importing this imports no torch: the ranks that it starts begin first.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.contract.messages import Pending, Plan, RunnerInfo, RunResult
from engine.runtime.collective.shard import Shard
from engine.runtime.models.decoder_config import read_model_config
from engine.runtime.parallel.ranks import OnLost, Ranks
from engine.runtime.parallel.rendezvous import Rendezvous
from engine.runtime.parallel.wire import Build, Execute, Here, Landed, Loaded, digest_of
from engine.runtime.setup.model_errors import BadRunnerConfig
from engine.runtime.setup.runner_config import RunnerConfig
from shared.process.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from engine.runtime.collective.group import Meeting
    from engine.runtime.start.starting import LoadedShard, Progress, ShardRunner


@dataclass(frozen=True, slots=True)
class LeadingPending:
    """Implements the `Pending` protocol: a plan that every rank computes, with rank 0's results."""

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
    """Implements the `Runner` protocol. Raises RankLost wherever it waits for another rank."""

    info: RunnerInfo
    own: ShardRunner
    ranks: Ranks

    def run(self, plan: Plan) -> RunResult:
        """Launch and collect."""
        return self.launch(plan).collect()

    def launch(self, plan: Plan) -> LeadingPending:
        with self.ranks.step(plan.step):
            self.ranks.send(Execute(plan))
            return LeadingPending(plan.step, self.own.launch(plan), self.ranks)

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """Implements `engine.runtime.start.starting.Others`."""

    ranks: Ranks
    neighbours: int

    def together(self) -> AbstractContextManager[None]:
        return self.ranks.step(0)

    def fewest_pages(self, own: int) -> int:
        return min(own, *(other.pages for other in self.ranks.answers(Loaded)))

    def build(self, info: RunnerInfo) -> None:
        self.ranks.send(Build(info))


def lead(
    config: RunnerConfig,
    progress: Progress,
    on_lost: OnLost,
    clock: Clock = SYSTEM_CLOCK,
    place: Rendezvous | None = None,
) -> LeadingRunner:
    """A warm runner of `tensor_parallel_size` ranks, of which this process is the first. Raises ModelError.

    `on_lost` is called in another thread when a rank is lost, even while this thread waits. `place`: where
    ranks that somebody else starts find this one; None: this process starts them.
    """
    _refuse(config)
    meeting = None
    if place is None:
        progress(f"starting {config.tensor_parallel_size} ranks")
        ranks = Ranks(config, on_lost, clock)
    else:
        from engine.runtime.parallel.nodes import gather

        gathered = gather(place, Path(config.model), progress)
        meeting, ranks = gathered.meeting, Ranks(config, on_lost, clock, gathered.wires)
    try:
        runner = _load(config, ranks, progress, meeting)
    except BaseException:
        ranks.close()
        raise
    ranks.serve()
    return runner


def _refuse(config: RunnerConfig) -> None:
    """Raise BadRunnerConfig for settings and models that cannot be split, before any process is started."""
    size = config.tensor_parallel_size
    if sys.platform != "linux":
        raise BadRunnerConfig(f"--tensor-parallel-size {size} needs Linux")
    Shard(0, size).of(read_model_config(Path(config.model)))


def _load(config: RunnerConfig, ranks: Ranks, progress: Progress, meeting: Meeting | None) -> LeadingRunner:
    """Start as the other ranks do: all import torch, and then load, at the same time."""
    from engine.runtime import load as loading
    from engine.runtime.parallel.joining import connect
    from engine.runtime.start.starting import start

    ranks.answers(Here)

    def load() -> LoadedShard[ShardRunner]:
        group = connect(config, 0, ranks.store_file, meeting)
        return loading.load_shard(config, group.device, progress, group)

    def lead(own: ShardRunner) -> LeadingRunner:
        return LeadingRunner(own.info, own, ranks)

    neighbours = config.tensor_parallel_size if meeting is None else meeting.neighbours
    return start(config, load, lead, OtherRanks(ranks, neighbours), progress)
