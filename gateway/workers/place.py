"""The place of one worker: filled again when its worker dies, or is killed because it hangs.

            ┌──────────────────────────┐
            v                          │
        STARTING ──> SERVING ──> PAUSED ──> ENDED
            └───────────────────────^          ^
        any ───────────────────────────────────┘  when the supervisor stops

Rules:

1. A worker that has begun to serve and does not answer `MISSED_MAX` heartbeats in a row is killed. So is one
   that does not serve `START_S` after its start. Heartbeats are counted, not timed, so that a machine that
   slept kills nobody.
2. A worker that ends without being told to is a death, whatever its exit status is. One that cannot even
   start, before any worker has served, ends the supervisor: the others could not start either.
3. A new worker drains from the start what operators have drained, and once more when it has begun to serve,
   since they may have changed it in the meantime. For the same reason it reads keys and tenants again then,
   and all its files where SIGHUP came: a process that has no handler for that yet would end.
4. What it had counted is kept (`gateway.workers.metrics`). It is asked for its metrics every `COUNT_S`, so a
   death loses the counts of that time at most.
5. A worker that died is started after a pause, which doubles with each death of the same place in a row. One
   place that cannot be filled costs nobody anything but its part of the capacity, so it is tried for ever.
   Where about half of all places die as fast as they are filled, the fault is common to all, and whatever
   runs the supervisor should know: then it gives up (a crash loop).
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Final, Protocol

from gateway.workers.channel import ANSWER_S, WorkerClient, WorkerSilent, WorkerStatus
from gateway.workers.metrics import Snapshot
from gateway.workers.process import Worker
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.exit_codes import ExitCode
from shared.process.metrics import Counter
from shared.process.waits import first_of

BEAT_S: Final = 1.0
"""The time between two heartbeats, in seconds."""
MISSED_MAX: Final = 2
HANG_S: Final = MISSED_MAX * (BEAT_S + ANSWER_S)
"""The longest that a worker may hang before it is killed, in seconds."""
START_S: Final = 120.0
"""The time in which a worker must begin to serve, in seconds."""
COUNT_S: Final = 5.0
PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 30.0
WINDOW_S: Final = 60.0
"""The time over which deaths are counted, and after which a worker that has lived counts as sound."""
DEATHS_MIN: Final = 8
"""The fewest deaths within `WINDOW_S` that are a crash loop: one place alone dies seven times at most."""
DEATHS_PER_WORKER: Final = 4

DEATHS: Final = Counter(
    "penstock_gateway_worker_deaths", "Workers that ended without being told to.", ("reason",)
)

log = logs.get(__name__)


class Restarts:
    """The deaths of all workers so far (rule 5)."""

    def __init__(self, workers: int) -> None:
        self._deaths_max = max(DEATHS_MIN, DEATHS_PER_WORKER * workers)
        self._died_s: deque[float] = deque()
        self._pause_s = [PAUSE_S_MIN] * workers

    def died(self, index: int, lived_s: float, now_s: float) -> float | None:
        """Note a death, and return the pause until the next start, in seconds. None is a crash loop."""
        self._died_s.append(now_s)
        while self._died_s[0] <= now_s - WINDOW_S:
            self._died_s.popleft()
        if len(self._died_s) >= self._deaths_max:
            return None
        pause_s = PAUSE_S_MIN if lived_s >= WINDOW_S else self._pause_s[index]
        self._pause_s[index] = min(PAUSE_S_MAX, 2 * pause_s)
        return pause_s


class PlacePhase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    ENDED = "ended"


_MOVES: Final = {
    PlacePhase.STARTING: {PlacePhase.SERVING, PlacePhase.PAUSED, PlacePhase.ENDED},
    PlacePhase.SERVING: {PlacePhase.PAUSED, PlacePhase.ENDED},
    PlacePhase.PAUSED: {PlacePhase.STARTING, PlacePhase.ENDED},
    PlacePhase.ENDED: set[PlacePhase](),
}

Launch = Callable[[int, Sequence[str]], Awaitable[Worker]]
"""Starts the worker of a place. The last are the replicas that operators have drained. Raises OSError."""


FATAL: Final = (ExitCode.FAILED, ExitCode.UNUSABLE_CONFIG)
"""How a worker ends that cannot start at all."""


class PlaceOwner(Protocol):
    """The supervisor as a place sees it."""

    @property
    def has_served(self) -> bool:
        """True once a worker has served, at any place."""

    def retire(self, last: Snapshot) -> None:
        """Keep the last metrics of a worker that has died."""

    def drained(self) -> Sequence[str]:
        """The replicas that operators have drained, as far as workers know that serve."""


class GaveUp(Exception):
    """There is no use in going on. The message is for the operator."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


class Place:
    """One of the supervisor's places."""

    def __init__(
        self,
        index: int,
        launch: Launch,
        restarts: Restarts,
        owner: PlaceOwner,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.index: Final = index
        self.phase = PlacePhase.STARTING
        self.status: WorkerStatus | None = None
        """Its worker's last report. None as long as it does not serve."""
        self.metrics: Snapshot = []
        """Its worker's counters when it was asked last."""
        self.drained: Sequence[str] = ()
        """The replicas that operators had drained when its worker, or the one before, was asked last."""
        self.has_served = asyncio.Event()
        """Set once a worker of this place has served."""
        self.code: int | None = None
        """How its last worker ended. None while the first lives."""
        self._launch: Final = launch
        self._restarts: Final = restarts
        self._owner: Final = owner
        self._clock: Final = clock
        self._worker: Worker | None = None
        self._handed: Sequence[str] = ()
        """The drained replicas that its worker was told of."""
        self._hangs = False
        self._is_to_hang_up = False
        """True if its worker is to read its files again once it serves."""
        self._stopping = asyncio.Event()

    @property
    def client(self) -> WorkerClient | None:
        """The channel to its worker; None as long as it does not serve."""
        return self._worker.client if self._worker is not None and self.status is not None else None

    async def refresh(self) -> bool:
        """Let its worker read keys and tenants again, also one that has begun to serve without having been
        heard of. Returns False where there is none. Raises WorkerSilent."""
        if self._worker is None:
            return False
        await self._worker.client.refresh()
        return True

    @property
    def is_ready(self) -> bool:
        """True if its worker serves, and welcomes new requests."""
        return self.phase is PlacePhase.SERVING and self.status is not None and self.status.ready

    @property
    def problems(self) -> list[str]:
        """The reason why it is not ready, for operators."""
        if self.phase is not PlacePhase.SERVING or self.status is None:
            return [f"worker {self.index}: {self.phase.value}"]
        told = self.status.problems or ([] if self.status.ready else [self.status.phase])
        return [f"worker {self.index}: {problem}" for problem in told]

    def signal(self, number: int) -> None:
        """Send a signal to its worker, if there is one."""
        if self._worker is not None:
            self._worker.signal(number)

    def hang_up(self) -> None:
        """Have its worker read its files again, at once, or when it has begun to serve (rule 3)."""
        if self.status is None:
            self._is_to_hang_up = True
        else:
            self.signal(signal.SIGHUP)

    def stop(self) -> None:
        """Let its worker drain, and start no other. Once more: let it end its requests now."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    async def keep(self) -> None:
        """Keep a worker until `stop` was called and it has ended. Raises GaveUp."""
        try:
            while not self._stopping.is_set():
                if self.phase is PlacePhase.PAUSED:
                    self._to(PlacePhase.STARTING)
                began_s = self._clock.monotonic()
                reason = await self._one()
                if not self._stopping.is_set():
                    self._to(PlacePhase.PAUSED)
                    again_s = self._death(reason, self._clock.monotonic() - began_s)
                    await first_of(self._clock.sleep(again_s), self._stopping.wait())
        finally:
            self._to(PlacePhase.ENDED)

    async def look(self) -> None:
        """Ask its worker which replicas operators have drained. Raises WorkerSilent."""
        if (client := self.client) is not None:
            self.drained = (await client.status()).drained

    async def count(self) -> bool:
        """Ask its worker for its metrics, if there is one. Returns True. Raises WorkerSilent."""
        if (client := self.client) is not None:
            counted = await client.metrics()
            if client is self.client:  # else they were taken over at its death already
                self.metrics = counted
        return True

    # -- one worker -------------------------------------------------------------------------------

    async def _one(self) -> str:
        """Run one worker to its end. Returns the reason for its end, in one word."""
        try:
            self._handed = self._owner.drained()
            worker = await self._launch(self.index, self._handed)
        except OSError as error:
            log.error("worker.start_failed", worker=self.index, reason=str(error))
            self.code = int(ExitCode.FAILED)
            return "start"
        self._worker, self._is_to_hang_up = worker, False
        log.info("worker.started", worker=self.index, pid=worker.pid)
        if self._stopping.is_set():
            worker.signal(signal.SIGTERM)
        beating = asyncio.create_task(self._beat(worker), name=f"worker {self.index}")
        try:
            self.code = await worker.wait()
        except asyncio.CancelledError:
            worker.signal(signal.SIGKILL)
            await worker.wait()
            raise
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            self._worker = self.status = None
            self._owner.retire(self.metrics)
            self.metrics = []
            await worker.aclose()
        hangs, self._hangs = self._hangs, False
        return "hung" if hangs else "exited" if self.code >= 0 else "killed"

    async def _beat(self, worker: Worker) -> None:
        """Ask for heartbeats, and kill a worker that misses too many, or does not begin to serve (rule 1)."""
        begun_s = counted_s = self._clock.monotonic()
        missed = 0
        while missed < MISSED_MAX:
            try:
                status = await worker.client.status()
                if self.status is None:
                    await self._hand_over(worker)
                self.status, self.drained, missed = status, status.drained, 0
                if self.phase is PlacePhase.STARTING:
                    self._to(PlacePhase.SERVING)
                    self.has_served.set()
                    log.info("worker.serving", worker=self.index, pid=worker.pid)
                if self._clock.monotonic() - counted_s >= COUNT_S:
                    counted_s = self._clock.monotonic()
                    await self.count()
            except WorkerSilent as error:
                is_late = self._clock.monotonic() - begun_s >= START_S
                missed += self.phase is not PlacePhase.STARTING or is_late
                log.debug("worker.silent", worker=self.index, reason=str(error))
            await self._clock.sleep(BEAT_S)
        log.error("worker.hung", worker=self.index, pid=worker.pid)
        self._hangs = True
        worker.signal(signal.SIGKILL)

    async def _hand_over(self, worker: Worker) -> None:
        """Tell a new worker what operators have drained, and have it read what changed (rule 3). Raises
        WorkerSilent."""
        while self._handed != (drained := self._owner.drained()):
            await worker.client.drain(drained)
            self._handed = drained
        await worker.client.refresh()
        if self._is_to_hang_up:
            worker.signal(signal.SIGHUP)

    def _death(self, reason: str, lived_s: float) -> float:
        """Count and log a death. Returns the pause until the next start, in seconds. Raises GaveUp."""
        DEATHS.inc(reason)
        again_s = self._restarts.died(self.index, lived_s, self._clock.monotonic())
        told = {"worker": self.index, "reason": reason, "status": self.code}
        log.error("worker.died", **told, lived_s=round(lived_s, 3), again_s=again_s)
        if self.code in FATAL and not self._owner.has_served:
            raise GaveUp("a worker could not start: the log says why", ExitCode(self.code))
        if again_s is None:
            raise GaveUp("workers die again and again: the log has their ends", ExitCode.CRASH_LOOP)
        return again_s

    def _to(self, phase: PlacePhase) -> None:
        assert phase in _MOVES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
