"""Times steps of a few shapes on a runner that is warm: the learned cost of a step begins with them.

    chunks     one behind the other: what a token takes, and what the context before it adds to that
    a tail     a few tokens behind all of these: what reading the context takes
    decodes    one behind them, one behind a short context, and several of these
    guesses    decodes with guesses of the model's MTP layer, if it has one, and without

The shapes are chosen to tell the coefficients of `engine.core.estimate.cost` apart. The chunks go on until
CONTEXT_LEN tokens or TIMING_S seconds; the tail and the decodes follow wherever they stopped. On a large
model and a slow machine that is the first chunk, a shorter one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from engine.contract.messages import (
    Plan,
    RunnerInfo,
    RunResult,
    SamplingParams,
    SlotAssignment,
    TimedStep,
    Want,
)

CHUNK_LEN: Final = 256
SHORT_LEN: Final = 64
TAIL_LEN: Final = 16
CONTEXT_LEN: Final = 2048
DECODES: Final = 8
ROUNDS: Final = 3
"""Times that a decode is timed; the shortest counts."""
TIMING_S: Final = 1.0
"""The time after which no further chunk is begun, in seconds."""
SAMPLING: Final = SamplingParams(seed=0, max_tokens=8)


class Timed(Protocol):
    """A whole runner, which runs a step at a time."""

    info: RunnerInfo

    def run(self, plan: Plan) -> RunResult: ...


def time_steps(runner: Timed, step_tokens_max: int) -> tuple[TimedStep, ...]:
    """The times of a few steps. Every slot is left again, and what the pages hold means nothing. Empty where
    the context is too short to tell anything."""
    info = runner.info
    context_len = min(CONTEXT_LEN, info.max_model_len, info.pages * info.page_size) - TAIL_LEN - ROUNDS - 1
    if context_len < 2 * TAIL_LEN:
        return ()
    return _Timing(runner, context_len, step_tokens_max).run()


def time_guesses(runner: Timed) -> float:
    """The time of a guess of the model's MTP layer, as a part of a decode's; 0.0 without such a layer, and
    where the context is too short to tell."""
    info = runner.info
    steps = 2 * ROUNDS
    known_len = min(SHORT_LEN, info.max_model_len, info.pages * info.page_size) - steps - info.guesses_max
    if not info.guesses_max or known_len < 1:
        return 0.0
    return _Timing(runner, 0, 1).guess_share(known_len, steps)


@dataclass(slots=True)
class _Timing:
    runner: Timed
    context_len: int
    step_tokens_max: int
    steps: list[TimedStep] = field(default_factory=list)
    _plans: int = 0

    def run(self) -> tuple[TimedStep, ...]:
        end = self._chunks()
        self._decodes([end])
        short_len = min(SHORT_LEN, end)
        self._decodes([short_len])
        self._decodes([short_len] * min(DECODES, self.runner.info.slots, self.step_tokens_max))
        return tuple(self.steps)

    def _chunks(self) -> int:
        """Time chunks, then the tail behind them. Returns the length of the context without the tail."""
        began_s, end = time.monotonic(), 0
        self._seat([self.context_len + TAIL_LEN + 1])
        lengths = [min(SHORT_LEN, self.step_tokens_max), min(CHUNK_LEN, self.step_tokens_max)]
        while (length := min(lengths[bool(end)], self.context_len - end)) > 1:
            if end and time.monotonic() - began_s > TIMING_S:
                break
            self._time([end], [length], Want.NOTHING)
            end += length
        self._time([end], [min(TAIL_LEN, self.step_tokens_max)], Want.NOTHING)
        self._leave(1)
        return end

    def _decodes(self, positions: list[int]) -> None:
        """Time a decode of a sequence behind each of these positions."""
        self._seat([position + 1 for position in positions])
        timed = []
        for step in range(ROUNDS):
            self._time([position + step for position in positions], [1] * len(positions), Want.SAMPLE)
            timed.append(self.steps.pop())
        self._leave(len(positions))
        self.steps.append(min(timed, key=lambda step: step.seconds))

    def guess_share(self, known_len: int, steps: int) -> float:
        """The part of a decode's time that a guess adds, measured behind so many tokens, with guesses and
        without in turn."""
        most = self.runner.info.guesses_max
        self._seat([known_len], steps + most)
        timed: dict[int, list[float]] = {0: [], most: []}
        for step in range(steps):
            number = most * (step % 2)
            self._time([known_len - 1 + step], [1], Want.SAMPLE, [number] if number else [])
            timed[number].append(self.steps.pop().seconds)
        self._leave(1)
        plain_s, guessing_s = map(min, timed.values())
        return max(0.0, guessing_s / plain_s - 1.0) / most

    def _seat(self, known_lens: list[int], beyond: int = ROUNDS) -> None:
        """Seat a sequence of so many known tokens in each of the first slots. They share pages."""
        info = self.runner.info
        seated, grown = [], []
        for slot, known_len in enumerate(known_lens):
            seated.append(SlotAssignment.of(slot, [0] * known_len, known_len, SAMPLING))
            grown.append((slot, list(range(-(-(known_len + beyond) // info.page_size)))))
        self._plans += 1
        self.runner.run(Plan(self._plans, [], seated, grown, [], [], [], []))

    def _leave(self, slots: int) -> None:
        self._plans += 1
        self.runner.run(Plan(self._plans, list(range(slots)), [], [], [], [], [], []))

    def _time(
        self, positions: list[int], lengths: list[int], want: Want, guesses: Sequence[int] = ()
    ) -> None:
        self._plans += 1
        rows = len(positions)
        wants, asked = [want] * rows, list(guesses)
        plan = Plan(self._plans, [], [], [], list(range(rows)), positions, lengths, wants, guesses=asked)
        began_s = time.perf_counter()
        self.runner.run(plan)
        self.steps.append(TimedStep(positions, lengths, time.perf_counter() - began_s))
