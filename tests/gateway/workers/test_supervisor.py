"""The supervisor of workers that are no processes: deaths, hangs, crash loops, and the drain."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from gateway.config.whole import load
from gateway.listen.listener import ListenFailed
from gateway.service import supervise
from gateway.workers import place as places
from gateway.workers import supervisor as supervisors
from gateway.workers.channel import WorkerClient, WorkerSilent, WorkerStart, WorkerStatus
from gateway.workers.metrics import MetricFamily, Sample, Snapshot
from gateway.workers.place import DEATHS_MIN, MISSED_MAX, START_S, GaveUp, PlacePhase
from gateway.workers.process import ChildWorker, Worker
from gateway.workers.supervisor import Supervisor
from shared.process.exit_codes import ExitCode
from shared.process.lifecycle import Phase
from tests.fakes import VirtualClock
from tests.gateway.conftest import PATIENCE_S, settings, until
from tests.gateway.workers.test_process import toml


class StubClient:
    """The channel to a worker that answers, or does not."""

    def __init__(self) -> None:
        self.is_silent = False
        self.problems: list[str] = []
        self.requests = 0
        self.beats = 0
        self.drained: list[str] = []
        self.refreshed_at_beat = 0
        self.on_drain: Callable[[], None] = lambda: None

    async def drain(self, replicas: Sequence[str]) -> None:
        self.on_drain()
        self.drained = list(replicas)

    async def refresh(self) -> None:
        self.refreshed_at_beat = self.refreshed_at_beat or self.beats

    async def status(self) -> WorkerStatus:
        self.beats += 1
        if self.is_silent:
            raise WorkerSilent("it hangs")
        return WorkerStatus("ready", not self.problems, self.problems, 0, self.drained)

    async def metrics(self) -> Snapshot:
        if self.is_silent:
            raise WorkerSilent("it hangs")
        return [
            MetricFamily("requests", "Requests.", "counter", [Sample("requests_total", {}, self.requests)])
        ]


class StubWorker:
    """A worker that ends when it is told to, with a status of the test's choice."""

    def __init__(self, index: int, pid: int) -> None:
        self.index = index
        self.pid = pid
        self.stub = StubClient()
        self.signals: list[int] = []
        self.stop_status: int | None = 0
        """How it ends after SIGTERM; None if it does not."""
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def client(self) -> WorkerClient:
        return cast(WorkerClient, self.stub)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def die(self, status: int) -> None:
        if not self._end.done():
            self._end.set_result(status)

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.die(-number)
        elif number == signal.SIGTERM and self.stop_status is not None:
            self.die(self.stop_status)

    async def aclose(self) -> None:
        pass


class House:
    """A supervisor and all workers that it has started."""

    def __init__(self, workers: int) -> None:
        self.clock = VirtualClock()
        self.started: list[StubWorker] = []
        self.is_born_silent = False
        self.fails = False
        self.supervisor = Supervisor(workers, self.launch, 0.01, self.clock)
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()

    async def launch(self, index: int, drained: Sequence[str]) -> Worker:
        if self.fails:
            raise OSError("no more processes")
        worker = StubWorker(index, len(self.started))
        worker.stub.is_silent = self.is_born_silent
        worker.stub.drained = list(drained)
        self.started.append(worker)
        return worker

    async def pass_until(self, condition: Callable[[], bool], step_s: float = 0.5) -> None:
        """Let time pass until it holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)
                self.clock.advance(step_s)

    @property
    def phases(self) -> list[PlacePhase]:
        return [place.phase for place in self.supervisor.places]


@asynccontextmanager
async def serving(workers: int = 2) -> AsyncIterator[House]:
    house = House(workers)
    try:
        await house.supervisor.start(house.stop)
        yield house
    finally:
        await house.supervisor.kill()


async def test_a_dead_worker_is_replaced_and_the_others_are_left_alone() -> None:
    async with serving() as house:
        assert house.supervisor.lifecycle.is_ready
        victim, other = house.started
        victim.stub.requests = 3
        await house.pass_until(lambda: bool(house.supervisor.places[0].metrics))
        victim.die(-signal.SIGSEGV)
        await until(lambda: house.phases[0] is PlacePhase.PAUSED)
        assert house.supervisor.health.problems() == [], "the other is ready"
        await house.pass_until(lambda: len(house.started) == 3 and house.phases[0] is PlacePhase.SERVING)
        assert house.started[2].index == 0
        assert other.signals == []
        [counted] = [family for family in house.supervisor.metrics() if family.name == "requests"]
        assert counted.samples[0].value == 3


async def test_a_replaced_worker_knows_what_operators_have_drained() -> None:
    async with serving() as house:
        for worker in house.started:
            worker.stub.drained = ["a:1"]
        beats = [worker.stub.beats for worker in house.started]
        await house.pass_until(
            lambda: all(one.stub.beats > before for one, before in zip(house.started, beats, strict=True))
        )
        for worker in house.started[:2]:
            worker.die(-9)
        await house.pass_until(lambda: len(house.started) == 4)
        assert [worker.stub.drained for worker in house.started[2:]] == [["a:1"], ["a:1"]]


async def test_what_is_drained_while_a_worker_starts_is_handed_over_before_it_counts() -> None:
    async with serving() as house:
        place, other = house.supervisor.places
        house.is_born_silent = True
        house.started[0].die(-9)
        await house.pass_until(lambda: len(house.started) == 3)
        other.drained = ["a:1"]
        new = house.started[2].stub

        def changed() -> None:
            assert place.client is None
            if new.drained:  # an operator is quick
                other.drained = ["b:2"]

        new.on_drain = changed
        house.started[1].stub.drained = ["b:2"]
        new.is_silent = False
        await house.pass_until(lambda: place.is_ready)
        assert new.drained == ["b:2"]


async def test_a_worker_that_hangs_is_killed_and_one_missed_heartbeat_kills_nobody() -> None:
    async with serving() as house:
        victim, other = house.started
        other.stub.is_silent = True
        beats = other.stub.beats
        await house.pass_until(lambda: other.stub.beats == beats + MISSED_MAX - 1)
        other.stub.is_silent = False
        await house.pass_until(lambda: other.stub.beats > beats + MISSED_MAX + 1)
        assert other.signals == []
        victim.stub.is_silent = True
        await house.pass_until(lambda: signal.SIGKILL in victim.signals)
        await house.pass_until(lambda: len(house.started) == 3)
        assert other.signals == []


async def test_one_that_never_begins_to_serve_is_killed_in_the_end() -> None:
    house = House(1)
    house.is_born_silent = True
    starting = asyncio.create_task(house.supervisor.start(house.stop))
    await until(lambda: bool(house.started))
    began_s = house.clock.monotonic()
    await house.pass_until(lambda: signal.SIGKILL in house.started[0].signals, step_s=5.0)
    assert house.clock.monotonic() - began_s >= START_S
    house.stop.set()
    await starting
    assert house.supervisor.lifecycle.phase is Phase.STARTING
    assert await house.supervisor.drain(house.hurry) is ExitCode.CLEAN, "none had served"


async def test_a_crash_loop_ends_the_supervisor() -> None:
    async with serving() as house:
        running = asyncio.create_task(house.supervisor.run(house.stop))

        def kill_all() -> bool:
            for worker in house.started:
                worker.die(1)
            return running.done()

        await house.pass_until(kill_all)
        with pytest.raises(GaveUp) as given:
            await running
        assert given.value.code is ExitCode.CRASH_LOOP
        assert len(house.started) <= DEATHS_MIN + 1


@pytest.mark.parametrize("code", [ExitCode.FAILED, ExitCode.UNUSABLE_CONFIG])
async def test_a_start_that_cannot_succeed_is_not_tried_again(code: ExitCode) -> None:
    house = House(2)
    house.is_born_silent = True
    starting = asyncio.create_task(house.supervisor.start(house.stop))
    await until(lambda: len(house.started) == 2)
    house.started[1].die(code)
    with pytest.raises(GaveUp) as given:
        await starting
    assert given.value.code is code
    await house.supervisor.drain(house.hurry)
    assert len(house.started) == 2


async def test_a_worker_reads_keys_again_before_it_counts_as_one_that_serves() -> None:
    """It began with what the supervisor had read, and operators may have changed that since."""
    async with serving() as house:
        assert [worker.stub.refreshed_at_beat for worker in house.started] == [1, 1]


async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    async with serving() as house:
        house.fails = True
        house.started[0].die(-9)
        await house.pass_until(lambda: house.supervisor.places[0].code == ExitCode.FAILED)
        house.fails = False
        await house.pass_until(lambda: len(house.started) == 3 and house.phases[0] is PlacePhase.SERVING)


@pytest.mark.parametrize(
    ("status", "code"),
    [(0, ExitCode.CLEAN), (ExitCode.DRAIN_CUT, ExitCode.DRAIN_CUT), (-9, ExitCode.DRAIN_CUT)],
)
async def test_the_drain_is_clean_if_every_worker_s_was(status: int, code: ExitCode) -> None:
    async with serving() as house:
        house.started[1].stop_status = status
        house.stop.set()
        await house.supervisor.run(house.stop)
        assert await house.supervisor.drain(house.hurry) is code
        assert house.supervisor.lifecycle.phase is Phase.DRAINING
        assert set(house.phases) == {PlacePhase.ENDED}
        assert len(house.started) == 2, "none is replaced"


async def test_a_second_signal_reaches_the_workers() -> None:
    async with serving() as house:
        for worker in house.started:
            worker.stop_status = None
        drain = asyncio.create_task(house.supervisor.drain(house.hurry))
        await until(lambda: all(worker.signals == [signal.SIGTERM] for worker in house.started))
        for worker in house.started:
            worker.stop_status = int(ExitCode.DRAIN_CUT)
        house.hurry.set()
        assert await drain is ExitCode.DRAIN_CUT
        assert all(worker.signals == [signal.SIGTERM] * 2 for worker in house.started)


async def test_workers_that_outlast_the_drain_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "ENDING_S", 0.01)
    async with serving() as house:
        for worker in house.started:
            worker.stop_status = None
        assert await house.supervisor.drain(house.hurry) is ExitCode.DRAIN_CUT
        assert all(worker.signals[-1] == signal.SIGKILL for worker in house.started)


async def test_a_paused_place_does_not_hold_up_the_end() -> None:
    async with serving() as house:
        house.started[0].die(1)
        await until(lambda: house.phases[0] is PlacePhase.PAUSED)
        assert await house.supervisor.drain(house.hurry) is ExitCode.CLEAN
        assert len(house.started) == 2


async def test_one_ready_worker_is_enough_and_problems_name_their_worker() -> None:
    async with serving() as house:
        house.started[0].stub.problems = ["quota store"]
        await house.pass_until(lambda: not house.supervisor.places[0].is_ready)
        assert house.supervisor.health.problems() == []
        house.started[1].die(1)
        await until(lambda: house.phases[1] is PlacePhase.PAUSED)
        assert house.supervisor.health.problems() == ["worker 0: quota store", "worker 1: paused"]
        house.supervisor.hang_up()
        assert house.started[0].signals == [signal.SIGHUP]


async def test_a_worker_that_starts_reads_its_files_again_once_it_can() -> None:
    """A SIGHUP would end it before."""
    async with serving() as house:
        house.is_born_silent = True
        house.started[0].die(1)
        await house.pass_until(lambda: len(house.started) == 3)
        house.supervisor.hang_up()
        await house.pass_until(lambda: house.started[2].stub.beats > 1)
        assert house.started[1].signals == [signal.SIGHUP]
        assert house.started[2].signals == []
        house.started[2].stub.is_silent = False
        await house.pass_until(lambda: house.phases[0] is PlacePhase.SERVING)
        assert house.started[2].signals == [signal.SIGHUP]


async def test_the_exit_status_is_that_of_a_worker_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def start(start: WorkerStart, file: Path) -> Worker:
        worker = StubWorker(start.index, start.port)
        worker.stub.is_silent = True
        worker.die(int(ExitCode.UNUSABLE_CONFIG))
        return worker

    monkeypatch.setattr(ChildWorker, "start", staticmethod(start))
    config = load(settings("http://127.0.0.1:1", admin={"port": 0}), {}, {"workers": "2"})
    assert await supervise(config, tmp_path / "gateway.toml") is ExitCode.UNUSABLE_CONFIG


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, log: io.StringIO) -> list[WorkerStart]:
    """What each worker was started with. The first dies once the file has been read and refused."""
    starts: list[WorkerStart] = []

    async def start(start: WorkerStart, _: Path) -> Worker:
        starts.append(start)
        worker = StubWorker(start.index, len(starts))
        if len(starts) == 1:
            dying = asyncio.create_task(until(lambda: '"config.rejected"' in log.getvalue()))
            dying.add_done_callback(lambda _: worker.die(-signal.SIGKILL))
        return worker

    monkeypatch.setattr(ChildWorker, "start", staticmethod(start))
    return starts


@pytest.mark.parametrize("is_revoked_before", [True, False])
async def test_a_replacement_starts_with_the_newest_configuration_that_was_accepted(
    tmp_path: Path, started: list[WorkerStart], log: io.StringIO, is_revoked_before: bool
) -> None:
    """Not with the one of the supervisor's start, in which a key may work that was revoked since then."""
    file, text = tmp_path / "gateway.toml", toml("http://127.0.0.1:1", "[admin]\nport = 0\n")
    file.write_text(text)
    supervising = asyncio.create_task(supervise(load(file, {}, {"workers": "2"}), file))
    try:
        await until(lambda: log.getvalue().count('"worker.serving"') == 2)
        if is_revoked_before:
            file.write_text(text.replace('id = "k1"', 'id = "k1"\ndisabled = true'))
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: '"config.reloaded"' in log.getvalue())
        file.write_text(f"{text}\n[[keys]]\nid = 'without a hash'")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(started) == 3)
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
    [key] = load(tomllib.loads(started[2].config), {}).keys
    assert key.disabled is is_revoked_before


async def test_a_port_that_is_taken_ends_the_supervisor_before_any_worker_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load(settings("http://127.0.0.1:1", listen={"port": port}), {}, {"workers": "2"})
        with pytest.raises(ListenFailed, match=str(port)):
            await supervise(config, tmp_path / "gateway.toml")


def test_a_hang_is_noticed_within_a_bounded_time() -> None:
    assert places.HANG_S <= 15
