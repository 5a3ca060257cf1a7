"""The row `recording` of `python -m tests.bench engine`: the part of a step that its record takes.

The scheduler makes steps for a runner that computes nothing, and their outputs go through MessagePack to the
ring that requests look their waits up in, as in an engine. One round has the scheduler's own book of steps,
the next one a book that writes nothing. What a step of the first takes longer, in CPU time, is the record's
cost, and it is set against the step time of the engine that is measured, with as many streams.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Final

import msgspec

from engine.api.told.steps import StepRing
from engine.contract.messages import CoreOutput, RunnerInfo, RunResult, SamplingParams, StepOutput
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from engine.core.step.flight import InFlight
from engine.core.step.results import StepBook
from tests.bench.engine.load import Load, Sample, Server, measure
from tests.bench.figures import Figure, at_most, figure, quantile

STREAMS: Final = (1, 32)
PAIRS: Final = 15
STEPS: Final = 400
"""Steps of a round."""
LOAD_TOKENS: Final = 64
TARGET: Final = at_most(1)
_INFO: Final = RunnerInfo(4096, 64, 64, 4096, 1000, "bfloat16", 0.0, 0.0)
_decode: Final = msgspec.msgpack.Decoder(CoreOutput).decode


class NoBook(StepBook):
    """A book that writes nothing."""

    def wake(self, now: float) -> None:
        pass

    def commit(self, flight: InFlight, step_s: float, expected_s: float, now: float) -> None:
        pass


async def recording(server: Server, rng: random.Random) -> list[Figure]:
    """The cost of a record beside the step time of an engine, with few streams and with many."""
    figures: list[Figure] = []
    for streams in STREAMS:
        sample = Sample()
        await measure(server, Load(streams, 1, 32, LOAD_TOKENS), rng, sample)
        step_us = 1e3 * quantile(sample.gaps_ms, 0.5)
        with_us, without_us = host_us(streams)
        record_us = statistics.median(a - b for a, b in zip(with_us, without_us, strict=True))
        name = f"recording, {streams} stream" + ("s" if streams > 1 else "")
        figures += [
            figure(f"{name}: host work of a step without a record", statistics.median(without_us), "us"),
            figure(f"{name}: that of its record", record_us, "us"),
            figure(f"{name}: part of a step of the engine", 100 * record_us / step_us, "%", TARGET),
        ]
    return figures


def host_us(streams: int) -> tuple[list[float], list[float]]:
    """The CPU time of the host's work for one step, with a record and without, in each pair of rounds."""
    taken_us: dict[type[StepBook], list[float]] = {StepBook: [], NoBook: []}
    for pair in range(PAIRS):
        for book in (StepBook, NoBook) if pair % 2 else (NoBook, StepBook):
            taken_us[book].append(_round_us(book, streams))
    return taken_us[StepBook], taken_us[NoBook]


def _round_us(book: type[StepBook], streams: int) -> float:
    scheduler = Scheduler(SchedulerConfig(step_tokens_max=4096, queue_len_max=256), _INFO)
    scheduler._book = book(scheduler._allocator)
    sampling = SamplingParams(seed=1, max_tokens=STEPS + 100)
    ring, now = StepRing(), 100.0
    for handle in range(1, streams + 1):
        scheduler.add(AddSequence(handle, f"req-{handle}", [handle] * 8, sampling), now)
    _steps(scheduler, ring, now, 20)
    start_s = time.thread_time()
    _steps(scheduler, ring, now + 1.0, STEPS)
    return 1e6 * (time.thread_time() - start_s) / STEPS


def _steps(scheduler: Scheduler, ring: StepRing, now: float, count: int) -> None:
    for _ in range(count):
        plan = scheduler.plan(now)
        assert plan is not None
        now += 0.01
        scheduler.commit(plan, RunResult([5] * plan.sampled, [], []), now)
        output = scheduler.report()
        told = _decode(msgspec.msgpack.encode(output))
        assert isinstance(told, StepOutput)
        if told.record is not None:
            ring.push(told.record)
