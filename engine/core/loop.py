"""The heart of the core process: inbox -> plan -> run -> commit -> emit.

One thread, one step after another, and nothing else decides. The loop waits in two places only: for
input when it has no work, until the next deadline if there is one; and for room when the API
process has not read what was sent. Both end when that process dies.
"""

from __future__ import annotations

import traceback
from typing import Final, Protocol

from engine.core.config import SchedulerConfig
from engine.core.messages import (
    AbortSequences,
    AddSequence,
    CoreFailed,
    CoreInput,
    CoreOutput,
    CoreReady,
    PauseSequences,
    ResumeSequences,
    Runner,
    StopCore,
)
from engine.core.policy import RESPONSE_RATIO, Discipline
from engine.core.scheduler import Scheduler
from shared.clock import SYSTEM_CLOCK, Clock

LAST_WORDS_LEN_MAX: Final = 500


class Disconnected(Exception):
    """The API process is gone: there is nobody to work for, and nobody to tell."""


class Inbox(Protocol):
    def receive(self, wait_s: float) -> list[CoreInput]:
        """All messages that lie here, in the order they were sent, up to a limit. When none does, it
        waits so long for one: 0 is not at all, infinity until one comes."""
        ...


class Outbox(Protocol):
    def send(self, message: CoreOutput) -> None:
        """Hand over one message. Waits while the other side is too far behind; never drops."""
        ...


class CoreLoop:
    def __init__(
        self,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        config: SchedulerConfig,
        clock: Clock = SYSTEM_CLOCK,
        discipline: Discipline = RESPONSE_RATIO,
    ) -> None:
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._scheduler = Scheduler(config, runner.info, discipline)

    def run(self) -> None:
        """Serve until `StopCore` or `Disconnected`. Another failure is sent as `CoreFailed`, then raised."""
        try:
            self._outbox.send(_ready(self._runner))
            while self._take_in():
                self._step()
        except Disconnected:
            return
        except Exception as error:
            self._outbox.send(CoreFailed(last_words(error)))
            raise

    def _step(self) -> None:
        plan = self._scheduler.plan(self._clock.monotonic())
        if plan is not None:
            result = self._runner.run(plan)
            self._scheduler.commit(plan, result, self._clock.monotonic())
        output = self._scheduler.report()
        if output is not None:
            self._outbox.send(output)

    def _take_in(self) -> bool:
        """Everything that arrived. False when it is time to go."""
        messages = self._inbox.receive(self._scheduler.idle_s(self._clock.monotonic()))
        now = self._clock.monotonic()
        for message in messages:
            match message:
                case AddSequence():
                    self._scheduler.add(message, now)
                case AbortSequences():
                    self._scheduler.abort(message.handles, now)
                case PauseSequences():
                    self._scheduler.pause(message.handles, now)
                case ResumeSequences():
                    self._scheduler.resume(message.handles, now)
                case StopCore():
                    return False
        return True


def _ready(runner: Runner) -> CoreReady:
    info = runner.info
    return CoreReady(
        pages=info.pages,
        page_size=info.page_size,
        slots=info.slots,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        load_s=info.load_s,
        warmup_s=info.warmup_s,
    )


def last_words(error: BaseException) -> str:
    """What failed and where, for the operator, in one line. Names code, and quotes no input: neither
    this floor nor the runner puts tokens into error messages."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    reason = " ".join(str(error).split())
    return f"{type(error).__name__}{where}: {reason}"[:LAST_WORDS_LEN_MAX]
