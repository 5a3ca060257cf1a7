"""The lifecycle of a service, by which it answers probes.

        STARTING ──> READY ──> DRAINING ──> STOPPED
            │          │           │
            └──────────┴───────────┴──────> FAILED

`/startupz` asks whether starting is over, `/readyz` whether new work is welcome, `/livez` whether
a restart would help. A service that drains is alive and not ready.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from enum import Enum
from typing import Final


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


MOVES: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.STARTING: frozenset({Phase.READY, Phase.DRAINING, Phase.FAILED}),
    Phase.READY: frozenset({Phase.DRAINING, Phase.FAILED}),
    Phase.DRAINING: frozenset({Phase.STOPPED, Phase.FAILED}),
    Phase.STOPPED: frozenset(),
    Phase.FAILED: frozenset(),
}


class IllegalPhase(AssertionError):
    """A move that is not in the table: a bug."""


class Lifecycle:
    def __init__(self) -> None:
        self.phase = Phase.STARTING
        """The phase. `to` alone sets it."""
        self._reason = ""

    @property
    def reason(self) -> str:
        """The reason for the last move, for the operator."""
        return self._reason

    @property
    def is_started(self) -> bool:
        return self.phase is not Phase.STARTING

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.READY

    @property
    def is_live(self) -> bool:
        return self.phase is not Phase.FAILED

    def to(self, phase: Phase, reason: str = "") -> None:
        """Move. Raises IllegalPhase when the table has no such move."""
        if phase not in MOVES[self.phase]:
            raise IllegalPhase(f"{self.phase.name} -> {phase.name}")
        self.phase = phase
        self._reason = reason


def on_stop_signals(callback: Callable[[str], None]) -> None:
    """Call `callback(name)` in the running loop on every SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, callback, number.name)


_PR_SET_PDEATHSIG: Final = 1
ORPHANED: Final = signal.SIGUSR1
"""The signal for a child that drains when its parent ends. The kernel may send it once for each thread of the
parent, where a second SIGTERM would end the drain."""


def die_with_parent(parent_pid: int, number: int = signal.SIGTERM) -> None:
    """Have the kernel send a signal to this process when its parent ends. Call it first thing in a child.

    SIGKILL also ends a process that is stopped. The parent here is the thread that started the child.
    `parent_pid` is the parent's own idea of its pid: if the parent has ended already, this process exits.
    Linux only; elsewhere it does nothing, and an orphan lives on until it is stopped.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the parent process is gone")
