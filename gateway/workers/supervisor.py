"""The supervisor of several workers. It serves no requests of clients, so that it outlives what ends a
worker.

Rules:

1. All workers listen on one port (SO_REUSEPORT): the kernel gives each new connection to one of them. The
   supervisor holds the port for as long as it lives and does not listen on it, so that a port 0 is the same
   for all, and another gateway cannot slip in beside them unnoticed.
2. A worker that dies takes its own connections with it, and nothing of the others; its place is filled again
   (`gateway.workers.place`).
3. A configuration that no worker can start with ends the supervisor with the worker's own exit status, as
   long as none has served yet.
4. SIGTERM and SIGINT drain all workers, and a second one hurries them; SIGHUP is passed
   on to those that serve, and to others once they do.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Sequence
from typing import Final

from gateway.workers import metrics
from gateway.workers.metrics import MetricFamily, Sample, Snapshot
from gateway.workers.place import Launch, Place, PlacePhase, Restarts
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.exit_codes import ExitCode
from shared.process.lifecycle import Lifecycle, Phase
from shared.process.listening import bound_socket
from shared.process.probes import Health
from shared.process.waits import first_of

PLACES: Final = "penstock_gateway_workers"
PLACES_HELP: Final = "Places of workers, by their phase."
ENDING_S: Final = 15.0
"""The time that workers have to end beside their drain, in seconds; then they are killed."""
OWN: Final = (
    *("process", "python", "penstock_loop", "penstock_gateway_worker"),
    *("penstock_accepts_failed", "penstock_handshakes_failed", "penstock_gateway_connections_cut"),
)
"""The beginnings of the names of metrics that the supervisor has itself: the last ones are by its admin
listener."""

log = logs.get(__name__)


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that holds a port for the workers, which share it (rule 1). Raises OSError where somebody else
    has it."""
    sock = bound_socket(host, port)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: bound with it, it would share
    return sock


class Supervisor:
    """The places of all workers, from their start to their end."""

    def __init__(self, workers: int, launch: Launch, drain_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        """`drain_s` is the time in which a worker drains."""
        self.lifecycle: Final = Lifecycle()
        self.health: Final = Health(self.lifecycle, self._problems)
        self.gone: Snapshot = []
        """The counters of workers that have died."""
        restarts = Restarts(workers)
        self.places: Final[Sequence[Place]] = [
            Place(index, launch, restarts, self, clock) for index in range(workers)
        ]
        self._drain_s: Final = drain_s
        self._clock: Final = clock
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self, stop: asyncio.Event) -> None:
        """Start the workers, and wait until all have served, or `stop` is set. Raises GaveUp."""
        self._keeping = [asyncio.create_task(place.keep()) for place in self.places]
        await self._until(stop, first_of(*(place.has_served.wait() for place in self.places)))
        if any(place.has_served.is_set() for place in self.places):
            self.lifecycle.to(Phase.READY)
        await self._until(stop, asyncio.gather(*(place.has_served.wait() for place in self.places)))

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the workers until `stop` is set. Raises GaveUp."""
        await self._until(stop)

    async def drain(self, hurry: asyncio.Event) -> ExitCode:
        """Drain the workers, and wait for their end. Kills those that outlast the drain's time."""
        if self.lifecycle.phase in (Phase.STARTING, Phase.READY):
            self.lifecycle.to(Phase.DRAINING)
        log.info("workers.draining", workers=len(self.places))
        served = [place for place in self.places if place.phase is PlacePhase.SERVING]
        self._stop_all()
        if not await self._ended(self._drain_s + ENDING_S, hurry):
            if hurry.is_set():
                self._stop_all()
            if not await self._ended(ENDING_S, asyncio.Event()):
                log.error("workers.drain_killed")
                await self.kill()
        is_clean = all(place.code == ExitCode.CLEAN for place in served)
        log.info("workers.drained", clean=is_clean)
        return ExitCode.CLEAN if is_clean else ExitCode.DRAIN_CUT

    @property
    def has_served(self) -> bool:
        """True once a worker has served."""
        return self.lifecycle.is_started

    async def kill(self) -> None:
        """End all workers at once."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    def hang_up(self) -> None:
        """Have all workers read their files again."""
        for place in self.places:
            place.hang_up()

    def metrics(self) -> Snapshot:
        """The metrics of all workers as they were asked last, and of the supervisor."""
        alive = {str(place.index): place.metrics for place in self.places}
        own = [family for family in metrics.snapshot() if family.name.startswith(OWN)]
        return [*metrics.merged({**alive, "supervisor": own}, self.gone), self._phases()]

    def _phases(self) -> MetricFamily:
        phases = [place.phase for place in self.places]
        samples = [Sample(PLACES, {"phase": phase.value}, phases.count(phase)) for phase in PlacePhase]
        return MetricFamily(PLACES, PLACES_HELP, "gauge", samples)

    def _problems(self) -> list[str]:
        """For `/readyz`: none as long as one worker is ready."""
        if any(place.is_ready for place in self.places):
            return []
        return [problem for place in self.places for problem in place.problems]

    def retire(self, last: Snapshot) -> None:
        """Keep what a worker that has died had counted."""
        self.gone = metrics.retired(self.gone, last)

    def drained(self) -> Sequence[str]:
        """The replicas that operators have drained, as the workers know that serve, or the last that did."""
        knowing = [place for place in self.places if place.client is not None] or self.places
        return sorted({replica for place in knowing for replica in place.drained})

    def _stop_all(self) -> None:
        for place in self.places:
            place.stop()

    async def _until(self, stop: asyncio.Event, *done: Awaitable[object]) -> None:
        """Wait for `stop`, or for `done`. Raises GaveUp."""
        ends = asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
        await first_of(stop.wait(), ends, *done)
        for task in self._keeping:
            if task.done():
                task.result()

    async def _ended(self, within_s: float, hurry: asyncio.Event) -> bool:
        """Wait for the end of all workers, for so long and until `hurry`. Returns whether they have ended."""
        await first_of(asyncio.wait(self._keeping), hurry.wait(), within_s=within_s)
        return all(task.done() for task in self._keeping)
