"""The heart of the core process: continuous batching, in two forms that bring the same tokens. Each step has
a batch of its own, so a sequence joins it as soon as it is admitted and leaves it with its last token.

    plain         inbox -> plan N -> launch N -> collect N -> commit N -> emit N
    overlapped    inbox -> plan N+1 -> launch N+1 -> collect N -> commit N -> emit N

Plain, the device idles while the host plans and commits, and the host while the device computes. Overlapped,
a step is planned before the one before it is back, so both work all the time:

    host      | plan 2, commit 1 | plan 3, commit 2 | plan 4, commit 3 |
    device    | 1                | 2                | 3                |

The sequences that a step admits, and those that ended between two steps, are reported before it is launched;
all else after it.

The host knows the tokens of a step only after it has planned the next one: why that is safe stands in the
rules H, that a plan goes by lengths (`engine.core.step.flight`), and I, that no running sequence is
preempted meanwhile (`engine.core.step.allocator`). Overlap gains nothing with a runner that
computes while it is launched, as on a CPU.

One thread, one step after another, and nothing else decides. The loop waits in two places only: for the
device; and for input when it has no work, until the next stall deadline if there is one, or while the API
process has not read what was sent. The latter ends when that process dies. Threads that fill masks ring where
it waits for input (`engine.core.grammars.masks`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from engine.contract.messages import (
    AbortSequences,
    AddRequest,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    FinishReason,
    LiftDeadlines,
    PauseSequences,
    Pending,
    Ping,
    Plan,
    Pong,
    ResumeSequences,
    Runner,
    StopCore,
)
from engine.core.grammars.masks import Grammars
from engine.core.pages.tiers import PageDisk
from engine.core.queue.newcomers import AddSequence, Intake, sequences_of
from engine.core.queue.policy import RESPONSE_RATIO, Discipline
from engine.core.scheduler import Scheduler
from engine.core.scheduler_config import SchedulerConfig
from shared.process.clock import SYSTEM_CLOCK, Clock

LAST_WORDS_LEN_MAX: Final = 500
"""Characters of the line that reports a failure."""


class Disconnected(Exception):
    """The API process is gone, and with it all clients."""


class Inbox(Protocol):
    """Messages from the API process."""

    def receive(self, wait_s: float) -> list[CoreInput]:
        """All messages that have arrived, in the order they were sent, up to a limit.

        When none has, waits up to `wait_s` seconds for one, or for a thread of this process to ring: 0 is not
        at all, infinity until one comes. Waits for longer than that while the other side is too far behind
        with what it was sent.
        """
        ...


class Outbox(Protocol):
    """Messages to the API process."""

    def send(self, message: CoreOutput) -> None:
        """Hand over one message. Waits for nothing, and drops nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the runner has taken on."""

    plan: Plan
    pending: Pending


class CoreLoop:
    """Takes in messages, makes steps and reports them, until it is stopped."""

    def __init__(
        self,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        config: SchedulerConfig,
        clock: Clock = SYSTEM_CLOCK,
        discipline: Discipline = RESPONSE_RATIO,
        *,
        overlap: bool = False,
        disk: PageDisk | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._scheduler = Scheduler(config, runner.info, discipline, disk=disk, grammars=grammars)
        self._intake = Intake()
        self._overlap = overlap
        self._flying: Launched | None = None
        self._busy_s = 0.0
        """The host's own time since the last commit of an overlapped step."""

    def run(self) -> None:
        """Serve until `StopCore` or `Disconnected`. Another failure is sent as `CoreFailed`, then raised."""
        try:
            self._outbox.send(CoreReady(self._runner.info, self._overlap))
            step = self._overlapped_step if self._overlap else self._plain_step
            while self._take_in():
                step()
        except Disconnected:
            return
        except Exception as error:
            self._outbox.send(CoreFailed(last_words(error)))
            raise

    def _plain_step(self) -> None:
        launched = self._launch_next()
        if launched is not None:
            self._land(launched)
        self._emit()

    def _overlapped_step(self) -> None:
        began_at = self._clock.monotonic()
        following = self._launch_next()
        self._busy_s += self._clock.monotonic() - began_at
        if self._flying is not None:
            landed_at = self._land(self._flying)
            self._scheduler.note_host(self._busy_s + self._clock.monotonic() - landed_at)
            self._busy_s = 0.0
        self._flying = following
        self._emit()

    def _launch_next(self) -> Launched | None:
        if self._scheduler.masks.sequences:
            self._scheduler.await_masks()
        plan = self._scheduler.plan(self._clock.monotonic())
        if plan is None:
            return None
        if plan.seated or self._scheduler.has_ends:
            # A sequence that begins is charged for its prompt even if its client leaves during this step. Who
            # aborted one waits to hear what was under way.
            self._emit()
        return Launched(plan, self._runner.launch(plan))

    def _land(self, launched: Launched) -> float:
        """Returns the time of its commit."""
        result = launched.pending.collect()
        now = self._clock.monotonic()
        self._scheduler.commit(launched.plan, result, now)
        return now

    def _emit(self) -> None:
        output = self._scheduler.report()
        if output is not None:
            self._outbox.send(output)

    def _take_in(self) -> bool:
        """Process what arrived, but of newcomers a few. Returns False when the core is to stop."""
        idle_s = 0.0 if self._intake.waiting else self._scheduler.idle_s(self._clock.monotonic())
        messages = self._inbox.receive(idle_s)
        now = self._clock.monotonic()
        for message in messages:
            match message:
                case AddRequest():
                    for newcomer in sequences_of(message):
                        self._intake.put(newcomer, now)
                case AbortSequences(handles):
                    for handle in self._intake.drop(handles):
                        self._scheduler.refuse(handle, FinishReason.ABORTED)
                    self._scheduler.abort(handles, now)
                case PauseSequences(handles):
                    self._add(self._intake.take_named(handles, now), now)
                    self._scheduler.pause(handles, now)
                case ResumeSequences(handles):
                    self._scheduler.resume(handles, now)
                case LiftDeadlines(handles):
                    self._intake.lift_deadlines(handles)
                    self._scheduler.lift_deadlines(handles)
                case Ping(number):
                    self._outbox.send(Pong(number))
                case StopCore():
                    return False
        if messages or self._intake.waiting:
            self._add(self._intake.take(now), now)
            self._scheduler.newest = self._intake.newest
        return True

    def _add(self, newcomers: Iterable[AddSequence], now: float) -> None:
        for newcomer in newcomers:
            self._scheduler.add(newcomer, now)


def last_words(error: BaseException) -> str:
    """The failure and its place in the code, for the operator, in one line. It quotes no input: neither the
    core nor the runner puts tokens into error messages."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}{where}: {reason}"[:LAST_WORDS_LEN_MAX]
