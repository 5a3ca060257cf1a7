from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.fairness.fair_threads import JOBS_MAX, FairThreads, Slices
from shared.wire.errors import Overloaded
from tests.fakes import VirtualClock
from tests.waiting import PATIENCE_S


class Bench:
    """Jobs whose slices take virtual time, and a note of whose slice was done when."""

    def __init__(self, workers: int = 1, jobs_max: int = 64) -> None:
        self.clock = VirtualClock()
        self.threads = FairThreads(workers, jobs_max=jobs_max, clock=self.clock)
        self.done: list[str] = []
        self.closed: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def job(self, name: str, slices: int, slice_s: float = 1.0) -> Slices[str]:
        try:
            for _ in range(slices):
                self.gate.wait(PATIENCE_S)
                self.clock.advance(slice_s)
                self.done.append(name)
                yield
            return name
        finally:
            self.closed.append(name)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.gate.set()
    bench.threads.close()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_job_runs_to_its_end_and_brings_its_result(bench: Bench) -> None:
    assert await bench.threads.run("a", bench.job("a", 3)) == "a"
    assert bench.done == ["a"] * 3
    assert await bench.threads.call("a", threading.get_ident) != threading.get_ident()
    assert bench.threads.jobs == 0


async def test_an_error_is_the_callers(bench: Bench) -> None:
    def broken() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        await bench.threads.call("a", broken)
    assert await bench.threads.run("a", bench.job("b", 1)) == "b"


async def test_a_newcomer_has_every_other_slice_beside_a_flood(bench: Bench) -> None:
    bench.gate.clear()
    flood = [asyncio.create_task(bench.threads.run("flood", bench.job("flood", 10))) for _ in range(8)]
    await turns()
    victim = asyncio.create_task(bench.threads.run("victim", bench.job("victim", 10)))
    await turns()
    bench.gate.set()
    await victim
    before = bench.done[: len(bench.done) - bench.done[::-1].index("victim")]
    assert before.count("flood") <= before.count("victim") + 2
    await asyncio.gather(*flood)


async def test_long_slices_count_for_as_much_as_many_short_ones(bench: Bench) -> None:
    bench.gate.clear()
    jobs = [
        asyncio.create_task(bench.threads.run("long", bench.job("long", 5, slice_s=10.0))),
        asyncio.create_task(bench.threads.run("short", bench.job("short", 30, slice_s=1.0))),
    ]
    await turns()
    bench.gate.set()
    await asyncio.gather(*jobs)
    assert bench.done[:22].count("short") >= 18


async def test_idling_earns_no_credit(bench: Bench) -> None:
    await bench.threads.run("idler", bench.job("idler", 1))
    bench.gate.clear()
    busy = asyncio.create_task(bench.threads.run("busy", bench.job("busy", 60)))
    await turns()
    bench.gate.set()
    while bench.done.count("busy") < 20:  # noqa: ASYNC110 -- another thread's work
        await asyncio.sleep(0)
    bench.gate.clear()
    await turns()
    done = len(bench.done)
    idler = asyncio.create_task(bench.threads.run("idler", bench.job("idler", 20)))
    await turns()
    bench.gate.set()
    await asyncio.gather(busy, idler)
    assert bench.done[done : done + 20].count("busy") >= 8


async def test_jobs_of_one_tenant_take_turns(bench: Bench) -> None:
    bench.gate.clear()
    jobs = [
        asyncio.create_task(bench.threads.run("a", bench.job("long", 10))),
        asyncio.create_task(bench.threads.run("a", bench.job("short", 2))),
    ]
    await turns()
    bench.gate.set()
    await asyncio.gather(*jobs)
    assert "short" not in bench.done[6:]


async def test_a_cancelled_caller_stops_its_job_and_closes_it(bench: Bench) -> None:
    bench.gate.clear()
    running = asyncio.create_task(bench.threads.run("a", bench.job("running", 1000)))
    waiting = asyncio.create_task(bench.threads.run("a", bench.job("waiting", 1000)))
    await turns()
    running.cancel()
    waiting.cancel()
    await asyncio.wait([running, waiting])
    bench.gate.set()
    assert await bench.threads.run("b", bench.job("other", 2)) == "other"
    async with asyncio.timeout(PATIENCE_S):
        while bench.threads.jobs:  # noqa: ASYNC110 -- another thread's work
            await asyncio.sleep(0)
    assert bench.done.count("running") <= 1
    assert bench.done.count("waiting") == 0
    assert "running" in bench.closed


async def test_jobs_that_wait_are_bounded_and_a_tenant_leaves_room_to_others() -> None:
    bench = Bench(jobs_max=8)
    bench.gate.clear()
    flood = [asyncio.create_task(bench.threads.run("flood", bench.job("flood", 1))) for _ in range(20)]
    await turns()
    refused = [task for task in flood if task.done()]
    assert len(refused) == 14
    assert all(isinstance(task.exception(), Overloaded) for task in refused)
    victim = asyncio.create_task(bench.threads.run("victim", bench.job("victim", 1)))
    await turns()
    bench.gate.set()
    assert await victim == "victim"
    await asyncio.gather(*flood, return_exceptions=True)
    assert bench.threads.jobs == 0
    bench.threads.close()


async def test_workers_work_side_by_side() -> None:
    threads = FairThreads(2)
    barrier = threading.Barrier(2, timeout=PATIENCE_S)

    def meet() -> Iterator[None]:
        barrier.wait()
        yield

    await asyncio.gather(threads.run("a", meet()), threads.run("b", meet()))  # type: ignore[arg-type]
    threads.close()


async def test_slices_that_hold_the_interpreter_go_one_at_a_time_and_keep_no_worker_from_others() -> None:
    threads = FairThreads(2)
    running, most = set[str](), 0
    beside = threading.Barrier(2, timeout=PATIENCE_S)

    def held(name: str) -> Slices[None]:
        nonlocal most
        for _ in range(3):
            running.add(name)
            most = max(most, len(running))
            beside.wait()
            running.remove(name)
            yield

    def free() -> Slices[None]:
        for _ in range(6):
            beside.wait()
            yield

    holding = [threads.run(name, held(name), holds=True) for name in "ab"]
    await asyncio.gather(*holding, threads.run("c", free()))
    assert most == 1
    threads.close()


async def test_a_slice_that_held_the_interpreter_leaves_it_to_the_loop_for_as_long(bench: Bench) -> None:
    """No turn of the loop comes near that time."""
    held = asyncio.create_task(bench.threads.run("a", bench.job("held", 2, slice_s=1e6), holds=True))
    while not bench.done:  # noqa: ASYNC110 -- another thread's work
        await asyncio.sleep(0)
    await bench.threads.run("b", bench.job("other", 5))
    await bench.threads.run("a", bench.job("its own", 5))
    assert bench.done.count("held") == 1
    held.cancel()


async def test_no_more_jobs_wait_than_is_stated_whoever_asks() -> None:
    bench = Bench(jobs_max=JOBS_MAX)
    bench.threads = FairThreads(1, clock=bench.clock)
    bench.gate.clear()
    jobs = [
        asyncio.ensure_future(bench.threads.run(f"tenant {number}", bench.job("", 1)))
        for number in range(JOBS_MAX + 1)
    ]
    await asyncio.sleep(0)
    assert bench.threads.jobs == JOBS_MAX
    bench.gate.set()
    bench.threads.close()
    for job in jobs:
        job.cancel()
    ended = await asyncio.gather(*jobs, return_exceptions=True)
    assert sum(isinstance(end, Overloaded) for end in ended) == 1
