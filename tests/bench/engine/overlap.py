"""`python -m tests.bench scheduler --overlap`: how long a device idles while the host plans, with overlapped
steps and without.

The core's own loop, scheduler and messages drive a device that computes nothing, and only takes time: each
step takes `DEVICE_STEP_S`, one after another, in the order of the launches. A device works from the launch of
a step, or from the end of the one before if that comes later, so it idles whenever no step is launched when
one ends:

    plain         host    | plan 1 |       wait       | commit 1, plan 2 |       wait       |
                  device           [      step 1      ]......idle........[      step 2      ]

    overlapped    host    | plan 2 |  wait  | commit 1, plan 3 |  wait  | commit 2, plan 4 |
                  device  [      step 1     ][      step 2     ][      step 3     ]

The device is a calendar and no thread: a thread would have to wait for Python's lock, which no real device
does. The measurement is of the host: all its work for a step, up to the bytes that go to the API process.
Both loops take turns in one run.

Where streams draft (`engine.core.step.drafting`, rule 4) there is a third loop, the overlapped one without
drafts. A token that the device draws is what the streams said before, by a share of `RIGHT`, or a new one: so
many drafts are right. The overlapped loop has to be about as good as the better of the others: as the plain
one where drafts gain much, which waits for the newest tokens before each plan, and as the one without drafts
where they gain less than the host's time.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from engine.contract.messages import (
    AddRequest,
    CoreInput,
    CoreOutput,
    Plan,
    RunnerInfo,
    RunResult,
    SamplingParams,
    StepOutput,
    StopCore,
    TimedStep,
)
from engine.core.loop import CoreLoop
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler_config import SchedulerConfig
from tests.bench.engine.core_window import alone
from tests.bench.figures import Figure, at_least, at_most, figure

DEVICE_STEP_S: Final = 5e-3
"""The time of a step, in seconds: about that of a decode step of an 8B model on an H200."""
SEQUENCES: Final = (32, 256)
PROMPT_LEN: Final = 64
OUTPUT_LEN: Final = 200
ROUNDS: Final = (False, True, True, False)
"""True if steps overlap, by round."""
PAGE_SIZE: Final = 64
IDLE_SHARE_MAX: Final = 0.02
DRAFT_S: Final = 30e-6
"""What a token more adds to a step, in seconds: of an 8B model on an H200, by its 16 GFLOP."""
DRAFTS_MAX: Final = 15
DRAFTING: Final = (1, 8, 32)
"""Sequences that draft."""
RIGHT: Final = (0.95, 0.8, 0.6)
LOOPS: Final = {
    "plain": (False, DRAFTS_MAX),
    "overlapped": (True, DRAFTS_MAX),
    "overlapped without drafts": (True, 0),
}
"""Whether steps overlap, and the drafts of a row."""
DRAFTING_ROUNDS: Final = (*LOOPS, *reversed(LOOPS))
TIMED: Final = (([64], [1]), ([512], [1]), ([64] * 8, [1] * 8), ([64], [16]), ([512], [16]), ([0], [64]))
"""The positions and lengths of steps that a runner would have timed while warming up."""
NEAR: Final = 0.95


@dataclass(slots=True)
class Device:
    """A runner that computes nothing: it takes `DEVICE_STEP_S` for a step, and `DRAFT_S` for each draft."""

    info: RunnerInfo
    tokens: Iterator[int] = field(default_factory=lambda: itertools.repeat(0))
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    busy_until: float = 0.0
    steps: int = 0
    idle_s: float = 0.0
    """Time without a step to execute, from the first launch on, in seconds."""

    def launch(self, plan: Plan) -> Step:
        now = self.now()
        if self.steps:
            self.idle_s += max(0.0, now - self.busy_until)
        self.steps += 1
        drafts_s = DRAFT_S * sum(map(len, plan.drafts))
        self.busy_until = max(now, self.busy_until) + DEVICE_STEP_S + drafts_s
        return Step(self, self.busy_until, RunResult([*itertools.islice(self.tokens, plan.sampled)], [], []))

    @property
    def idle_share(self) -> float:
        """The idle share of the time from the first launch to the end of the last step."""
        return self.idle_s / (self.idle_s + self.steps * DEVICE_STEP_S)


@dataclass(frozen=True, slots=True)
class Step:
    """A launched plan, done at a time of the calendar."""

    device: Device
    done_at: float
    result: RunResult

    def collect(self) -> RunResult:
        self.device.sleep(max(0.0, self.done_at - self.device.now()))
        return self.result


@dataclass(slots=True)
class Clients:
    """The inbox and outbox of the core: all requests come at once, and the core is stopped when all are
    answered."""

    left: int
    _encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    _has_asked: bool = False

    def receive(self, wait_s: float) -> list[CoreInput]:
        if not self._has_asked:
            self._has_asked = True
            return [_request(handle) for handle in range(self.left)]
        return [] if self.left else [StopCore()]

    def send(self, message: CoreOutput) -> None:
        self._encoder.encode(message)
        if isinstance(message, StepOutput):
            self.left -= len(message.finished)


def _request(handle: int) -> AddRequest:
    sampling = SamplingParams(seed=handle, max_tokens=OUTPUT_LEN)
    return alone(AddSequence(handle, f"req_{handle}", [handle] * PROMPT_LEN, sampling))


def info(sequences: int) -> RunnerInfo:
    """The properties of a device with `sequences` slots, and twice the pages that so many sequences need."""
    pages = sequences * -(-(PROMPT_LEN + OUTPUT_LEN) // PAGE_SIZE)
    return RunnerInfo(
        2 * pages, PAGE_SIZE, sequences, PROMPT_LEN + OUTPUT_LEN, sequences, "none", 0.0, 0.0, is_async=True
    )


def serve(device: Device, sequences: int, *, overlap: bool) -> None:
    """Serve `sequences` requests that come at once to their ends."""
    clients = Clients(sequences)
    config = SchedulerConfig(step_tokens_max=max(2048, sequences), queue_len_max=sequences)
    CoreLoop(device, clients, clients, config, overlap=overlap).run()


def repeating(share: float) -> Iterator[int]:
    """Noughts, by this share, and new tokens."""
    rng = random.Random(0)
    return (0 if rng.random() < share else new for new in itertools.count(1))


def drafted_rate(sequences: int, share: float, *, overlap: bool, drafts_max: int) -> float:
    """The tokens per second of sequences that draft."""
    timed = [
        TimedStep(positions, lengths, DEVICE_STEP_S + DRAFT_S * (sum(lengths) - len(lengths)))
        for positions, lengths in TIMED
    ]
    known = msgspec.structs.replace(info(sequences), drafts_max=drafts_max, timed_steps=tuple(timed))
    device = Device(known, repeating(share))
    began_at = device.now()
    serve(device, sequences, overlap=overlap)
    return sequences * OUTPUT_LEN / (device.now() - began_at)


def run_drafts() -> list[Figure]:
    """The figures of streams that draft, by the share of drafts that is right; takes about half a minute."""
    found = []
    for sequences, share in itertools.product(DRAFTING, RIGHT):
        rates: dict[str, list[float]] = {loop: [] for loop in LOOPS}
        for loop in DRAFTING_ROUNDS:
            overlap, drafts_max = LOOPS[loop]
            rates[loop].append(drafted_rate(sequences, share, overlap=overlap, drafts_max=drafts_max))
        of = {loop: statistics.mean(own) for loop, own in rates.items()}
        name = f"overlap, {sequences} that draft, {share:.0%} right"
        found += [figure(f"{name}: {loop}", rate, "tokens/s") for loop, rate in of.items()]
        better = max(rate for loop, rate in of.items() if loop != "overlapped")
        near = of["overlapped"] / better
        found.append(figure(f"{name}: overlapped / the better of the others", near, "x", at_least(NEAR)))
    return found


def run() -> list[Figure]:
    """Measure, and return the figures; takes about three quarters of a minute."""
    found = run_drafts()
    for sequences in SEQUENCES:
        shares: dict[bool, list[float]] = {False: [], True: []}
        for overlap in ROUNDS:
            device = Device(info(sequences))
            serve(device, sequences, overlap=overlap)
            shares[overlap].append(device.idle_share)
        plain, overlapped = (statistics.mean(shares[overlap]) for overlap in (False, True))
        name = f"overlap, {sequences} sequences: the device idles"
        found += [
            figure(f"{name}, plain", plain * 100, "%"),
            figure(f"{name}, overlapped", overlapped * 100, "%", at_most(IDLE_SHARE_MAX * 100)),
            figure(f"{name}, overlapped / plain", overlapped / plain, "x"),
            figure(
                f"overlap, {sequences} sequences: tokens/s / plain's", (1 - overlapped) / (1 - plain), "x"
            ),
        ]
    return found
