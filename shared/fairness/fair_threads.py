"""Threads for work that takes milliseconds, shared fairly between tenants.

A job is a generator: each `next` does one slice of it, some milliseconds long, and what it returns is the
result. Between slices another job may go on. The tenant that has used the least time goes next, by start-time
fair queueing (Goyal, Vin and Cheng, 1996): a tenant that comes back starts no lower than the busy ones stand,
so idling earns no credit.

Rules

1. A job whose caller was cancelled does not begin another slice; its generator is closed.
2. Jobs that wait are bounded, in all and by tenant (`shared.fairness.fair_share`). One more is Overloaded, at
   once.
3. Within a tenant, jobs take turns slice by slice, so a short one does not wait for a long one's end.
4. Work of Python's own lets no other thread run, neither another worker nor the loop. Jobs of such work
   *hold the interpreter*: their slices go one at a time, and after each the next of them waits for as long as
   it took. So the loop has half of the time, in which it takes many turns, and not one between two slices.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

from shared.fairness.fair_share import FairShare
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import Overloaded

T = TypeVar("T")

JOBS_MAX: Final = 1024

Slices = Generator[None, None, T]
"""A job: a generator with one slice for each `next`, which returns the result."""


class _Job(Generic[T]):
    __slots__ = ("done", "holds", "slices", "tenant")

    def __init__(self, tenant: str, slices: Slices[T], done: asyncio.Future[T], holds: bool) -> None:
        self.tenant: Final = tenant
        self.slices: Final = slices
        self.done: Final = done
        self.holds: Final = holds
        """True if its slices hold the interpreter."""


class _Tenant:
    """A tenant that has had jobs since the threads were last idle."""

    __slots__ = ("jobs", "started_s", "used_s")

    def __init__(self) -> None:
        self.jobs: deque[_Job[Any]] = deque()
        self.used_s = 0.0
        """The tenant's virtual time in seconds, without the slices that run."""
        self.started_s: list[float] = []
        """The start of each of the tenant's slices that run, in seconds on the clock."""

    def level_s(self, now_s: float) -> float:
        return self.used_s + sum(now_s - started_s for started_s in self.started_s)

    def take(self, *, may_hold: bool) -> _Job[Any] | None:
        """Take the job that goes next, of those that do not hold the interpreter unless `may_hold`."""
        job = next((job for job in self.jobs if may_hold or not job.holds), None)
        if job is not None:
            self.jobs.remove(job)
        return job


class FairThreads:
    """A pool of threads that tenants share. It may be made before the loop runs; jobs come from one loop."""

    def __init__(self, workers: int, *, jobs_max: int = JOBS_MAX, clock: Clock = SYSTEM_CLOCK) -> None:
        assert workers >= 1
        self._workers: Final = workers
        self._pool: Final = ThreadPoolExecutor(workers, thread_name_prefix="fair")
        self._share: Final = FairShare(jobs_max)
        self._clock: Final = clock
        self._tenants: dict[str, _Tenant] = {}
        self._running = 0
        self._level_s = 0.0
        """The virtual time of the tenant whose slice was started last, in seconds."""
        self._is_held = False
        """True while a slice runs that holds the interpreter."""
        self._rest: asyncio.TimerHandle | None = None
        """The end of the loop's time after such a slice. None while there is none to wait for."""

    @property
    def jobs(self) -> int:
        """The number of jobs that wait or run."""
        return self._share.held

    async def call(self, tenant: str, work: Callable[[], T]) -> T:
        """Do `work` in one slice. Raises Overloaded, and what `work` raises."""
        return await self.run(tenant, in_one_slice(work))

    async def run(self, tenant: str, slices: Slices[T], *, holds: bool = False) -> T:
        """Run a job to its end. `holds` is true if its slices hold the interpreter. Raises Overloaded when
        too many wait, and what the job raises."""
        if not self._share.acquire(tenant, 1):
            slices.close()
            raise Overloaded("Too many texts are waiting to be read.", retry_after_s=1.0)
        job = _Job(tenant, slices, asyncio.get_running_loop().create_future(), holds)
        self._enqueue(job)
        self._dispatch()
        result: T = await job.done
        return result

    def close(self) -> None:
        """Close the pool without waiting for the slices that run, whose callers are gone."""
        if self._rest is not None:
            self._rest.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _enqueue(self, job: _Job[Any]) -> None:
        tenant = self._tenants.setdefault(job.tenant, _Tenant())
        if not tenant.jobs and not tenant.started_s:
            tenant.used_s = max(tenant.used_s, self._level_s)
        tenant.jobs.append(job)

    def _dispatch(self) -> None:
        now_s = self._clock.monotonic()
        while self._running < self._workers:
            may_hold = not self._is_held and self._rest is None
            ready = [
                one for one in self._tenants.values() if any(may_hold or not job.holds for job in one.jobs)
            ]
            if not ready:
                return
            tenant = min(ready, key=lambda one: one.level_s(now_s))
            job = tenant.take(may_hold=may_hold)
            assert job is not None
            if job.done.cancelled():
                job.slices.close()
                self._leave(job)
                continue
            self._level_s = max(self._level_s, tenant.level_s(now_s))
            self._start(job, tenant, now_s)

    def _start(self, job: _Job[Any], tenant: _Tenant, now_s: float) -> None:
        loop = job.done.get_loop()
        self._running += 1
        self._is_held |= job.holds
        tenant.started_s.append(now_s)

        def slice_done(result: Any, error: BaseException | None, ended: bool) -> None:
            took_s = self._clock.monotonic() - now_s
            self._running -= 1
            tenant.started_s.remove(now_s)
            tenant.used_s += took_s
            if job.holds:
                self._is_held, self._rest = False, loop.call_later(took_s, self._end_rest)
            if ended:
                self._finish(job, result, error)
            else:
                tenant.jobs.append(job)
            self._dispatch()

        def work() -> None:
            outcome = _advance(job.slices)
            loop.call_soon_threadsafe(slice_done, *outcome)

        self._pool.submit(work)

    def _end_rest(self) -> None:
        self._rest = None
        self._dispatch()

    def _finish(self, job: _Job[Any], result: Any, error: BaseException | None) -> None:
        self._leave(job)
        if job.done.done():
            return
        if error is None:
            job.done.set_result(result)
        else:
            job.done.set_exception(error)

    def _leave(self, job: _Job[Any]) -> None:
        self._share.release(job.tenant, 1)
        if not self._share.held:  # all tenants are idle, so past use no longer counts
            self._tenants.clear()
            self._level_s = 0.0


def at_once(slices: Slices[T]) -> T:
    """The result of a job, whose slices are run here one after another. Raises what the job raises."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def _advance(slices: Slices[T]) -> tuple[T | None, BaseException | None, bool]:
    """Run one slice, on a thread. Returns its result, its error, and whether the job has ended."""
    try:
        next(slices)
    except StopIteration as end:
        return end.value, None, True
    except BaseException as error:  # the caller raises it
        return None, error, True
    return None, None, False


def in_one_slice(work: Callable[[], T]) -> Slices[T]:
    """A job that does `work` at once."""
    return work()
    yield  # makes this function a generator
