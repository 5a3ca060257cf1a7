"""The real core's loop over a list of requests, in this process: no socket, no API."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.contract.messages import (
    CoreInput,
    CoreOutput,
    CoreStats,
    FinishReason,
    Plan,
    Runner,
    ServiceClass,
    StepOutput,
    StopCore,
)
from engine.core.drafts.drafter import Drafts
from engine.core.loop import CoreLoop
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler_config import SchedulerConfig
from engine.core.sequence import Sequence as Sequence_
from engine.runtime.device.device_runner import DeviceRunner
from tests.bench.engine.core_window import alone, draft_by


@dataclass
class Served:
    """Implements the loop's `Inbox` and `Outbox`: all requests at once, `later` when they have ended, and the
    end when all have theirs."""

    requests: Sequence[AddSequence]
    later: Sequence[AddSequence] = ()
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    began_s: float = 0.0
    took_s: float = 0.0
    stats: CoreStats | None = None

    def receive(self, wait_s: float) -> list[CoreInput]:
        if not self.began_s:
            self.began_s = time.perf_counter()
            return list(map(alone, self.requests))
        if len(self.reasons) < len(self.requests):
            return []
        if not self.later:
            return [StopCore()]
        coming, self.later = self.later, ()
        self.requests = [*self.requests, *coming]
        return list(map(alone, coming))

    def send(self, message: CoreOutput) -> None:
        if not isinstance(message, StepOutput):
            return
        self.steps, self.stats = message.step, message.stats
        for row, handle in enumerate(message.handles):
            self.tokens[handle].append(message.tokens[row])
            if message.logprobs and (entry := message.logprobs[row]) is not None:
                self.logprobs[handle].append(entry.logprob)
        for finished in message.finished:
            self.reasons[finished.handle] = finished.reason
            self.drafted += finished.drafted
            self.accepted += finished.accepted
        self.took_s = time.perf_counter() - self.began_s


@dataclass
class Joined(Served):
    """One more request, `late`, comes when the first of the others has so many tokens."""

    late: AddSequence = field(kw_only=True)
    after: int = field(kw_only=True)
    sent_s: float = 0.0
    """When it came; 0 before."""
    first_s: float = 0.0
    """When it had its first token; 0 before."""
    steps_s: list[float] = field(default_factory=list)
    """When the first of the others had each token."""

    def receive(self, wait_s: float) -> list[CoreInput]:
        if not self.began_s:
            return super().receive(wait_s)
        if not self.sent_s and len(self.steps_s) >= self.after:
            self.sent_s = time.perf_counter()
            return [alone(self.late)]
        awaited = len(self.requests) + (self.sent_s > 0.0)  # it never comes where the others end too early
        return [StopCore()] if len(self.reasons) >= awaited else []

    def send(self, message: CoreOutput) -> None:
        super().send(message)
        if isinstance(message, StepOutput):
            now_s = time.perf_counter()
            if self.requests[0].handle in message.handles:
                self.steps_s.append(now_s)
            if self.late.handle in message.handles and not self.first_s:
                self.first_s = now_s


def serve(
    runner: Runner,
    requests: Sequence[AddSequence],
    later: Sequence[AddSequence] = (),
    *,
    overlap: bool = True,
    step_tokens_max: int = 2048,
    prefix_cache: bool = True,
    drafter_of: Callable[[Sequence_], Drafts] | None = None,
) -> Served:
    """`drafter_of`: None: the engine's own."""
    most = max(1, len(requests), len(later))
    config = SchedulerConfig(step_tokens_max=step_tokens_max, queue_len_max=most, prefix_cache=prefix_cache)
    served = Served(requests, later)
    loop = CoreLoop(runner, served, served, config, overlap=overlap)
    if drafter_of is not None:
        draft_by(loop._scheduler, drafter_of)
    loop.run()
    return served


def join(runner: Runner, joined: Joined, gap_target_s: float, *, step_tokens_max: int) -> None:
    """Serve streams and the one that joins them, with a target for the streams' gaps."""
    config = SchedulerConfig(
        step_tokens_max=step_tokens_max,
        queue_len_max=len(joined.requests) + 1,
        gap_targets_s=(gap_target_s,) * len(ServiceClass),
    )
    CoreLoop(runner, joined, joined, config).run()


def vacate(runner: DeviceRunner) -> None:
    """A loop that ended has its last sequences still seated; another may follow now."""
    seated = [slot for slot, seat in enumerate(runner.slots._seats) if seat is not None]
    runner.run(Plan(0, seated, [], [], [], [], [], []))
