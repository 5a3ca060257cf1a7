"""Threads that serve tenants in turns.

A tenant has one job under way at a time, however many wait; the others wait for its next turn. So one tenant
leaves a thread to the others, whatever its jobs take: a lane has two. A tenant whose job took longer than
`SLOW_S` of the processor then rests for `REST` times as long where the lane says so, so that what cannot be
interrupted takes a bounded share of the processor from the steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from shared.process.clock import SYSTEM_CLOCK, Clock

THREADS: Final = 2
SLOW_S: Final = 0.002
"""The processor's time from which on a job is slow. Of 11,000 schemas in use, one mask in a thousand takes
longer than 1.3 ms."""
REST: Final = 3.0

Job = Callable[[], None]
"""A job raises nothing."""


class Lane:
    """The jobs of tenants, and the threads that do them, which start with the first."""

    def __init__(self, name: str, *, rests: bool, clock: Clock = SYSTEM_CLOCK) -> None:
        self._name: Final = name
        self._rests: Final = rests
        self._clock: Final = clock
        self._changed: Final = threading.Condition()
        self._turns: dict[str, deque[Job]] = {}
        """Jobs by tenant; the tenant whose turn it is comes first."""
        self._busy: set[str] = set()
        self._resting: dict[str, float] = {}
        """The clock until which tenants rest."""
        self._has_threads = False

    def put(self, tenant: str, job: Job) -> None:
        with self._changed:
            self._turns.setdefault(tenant, deque()).append(job)
            if not self._has_threads:
                self._start()
            self._changed.notify()

    def _start(self) -> None:
        self._has_threads = True
        for _ in range(THREADS):
            threading.Thread(target=self._serve, name=f"penstock-{self._name}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.serve_next()

    def serve_next(self) -> None:
        """Do the next job. Waits for one."""
        tenant, job = self._next()
        began_s = time.thread_time()
        try:
            job()
        finally:
            self._end(tenant, time.thread_time() - began_s)

    def _next(self) -> tuple[str, Job]:
        with self._changed:
            while True:
                now = self._clock.monotonic()
                self._resting = {tenant: until for tenant, until in self._resting.items() if until > now}
                for tenant, jobs in self._turns.items():
                    if tenant in self._busy or tenant in self._resting:
                        continue
                    job = jobs.popleft()
                    del self._turns[tenant]
                    if jobs:
                        self._turns[tenant] = jobs
                    self._busy.add(tenant)
                    return tenant, job
                until = min(
                    (self._resting[tenant] for tenant in self._turns if tenant in self._resting), default=None
                )
                self._changed.wait(None if until is None else until - now)

    def _end(self, tenant: str, seconds: float) -> None:
        with self._changed:
            self._busy.discard(tenant)
            if self._rests and seconds > SLOW_S:
                self._resting[tenant] = self._clock.monotonic() + REST * seconds
            if tenant in self._turns:
                self._changed.notify()
