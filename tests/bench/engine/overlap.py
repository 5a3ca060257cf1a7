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
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
)
from engine.core.loop import CoreLoop
from engine.core.queue.newcomers import AddSequence
from engine.core.scheduler_config import SchedulerConfig
from tests.bench.engine.core_window import alone
from tests.bench.figures import Figure, at_most, figure

DEVICE_STEP_S: Final = 5e-3
"""The time of a step, in seconds: about that of a decode step of an 8B model on an H200."""
SEQUENCES: Final = (32, 256)
PROMPT_LEN: Final = 64
OUTPUT_LEN: Final = 200
ROUNDS: Final = (False, True, True, False)
"""True if steps overlap, by round."""
PAGE_SIZE: Final = 64
IDLE_SHARE_MAX: Final = 0.02


@dataclass(slots=True)
class Device:
    """A runner that computes nothing and takes `DEVICE_STEP_S` for each step."""

    info: RunnerInfo
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
        self.busy_until = max(now, self.busy_until) + DEVICE_STEP_S
        return Step(self, self.busy_until, RunResult([0] * plan.sampled, [], []))

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


def run() -> list[Figure]:
    """Measure, and return the figures; takes about fifteen seconds."""
    found = []
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
