"""The supervisor of `penstock up`, over fake services in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from shared.cli import restarts, running, supervisor, up
from shared.cli.running import DataDir, Running
from shared.cli.supervisor import ServiceSpec
from tests.bench.services import free_port
from tests.waiting import PATIENCE_S

CHILD = Path(__file__).with_name("cli_child.py")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(running.KEY_VARIABLE, raising=False)
    return tmp_path


class Screen(io.StringIO):
    """Standard output, and a way to wait for what appears on it."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def write(self, text: str) -> int:
        self._changed.set()
        return super().write(text)

    async def shows(self, text: str) -> None:
        while text not in self.getvalue():
            self._changed.clear()
            await self._changed.wait()


@dataclass
class Stage:
    """Two fake services under `supervise`, in the test's own process."""

    directory: Path
    habits: dict[str, tuple[str, ...]]
    start_deadline_s: float = PATIENCE_S
    grace_s: float = PATIENCE_S
    engines: int = 1
    screen: Screen = field(default_factory=Screen)
    plan: up.StartPlan = field(init=False)
    task: asyncio.Task[int] = field(init=False)

    def __post_init__(self) -> None:
        specs = []
        engines = ["engine"] if self.engines == 1 else [f"engine-{i}" for i in range(self.engines)]
        for name in (*engines, "gateway"):
            port = free_port()
            argv = (sys.executable, str(CHILD), name, str(port), str(self.diary), *self.habits.get(name, ()))
            log, url = self.directory / f"{name}.log", f"http://127.0.0.1:{port}"
            restarts = self.engines > 1 and name != "gateway"
            specs.append(ServiceSpec(name, argv, log, url, self.start_deadline_s, restarts=restarts))
        ours = Running(url=f"{specs[-1].url}/v1", key="k", model="m", pid=os.getpid())
        self.plan = up.StartPlan(tuple(specs), ours, DataDir(self.directory, is_kept=True), self.grace_s)
        self.task = asyncio.create_task(up.supervise(self.plan, self.screen))

    @property
    def diary(self) -> Path:
        return self.directory / "diary"

    def events(self) -> list[str]:
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return [" ".join(line.split()[:2]) for line in lines]

    def pid(self, name: str) -> int:
        lines = (line.split() for line in self.diary.read_text().splitlines())
        return next(int(words[2]) for words in lines if words[:2] == [name, "started"])

    async def shows(self, text: str) -> None:
        """Wait until the screen shows it, or fail with all that it shows once nothing more comes."""
        showing = asyncio.ensure_future(self.screen.shows(text))
        await asyncio.wait({showing, self.task}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        showing.cancel()
        assert text in self.screen.getvalue(), self.screen.getvalue()

    async def ends(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


Staging = Callable[..., Stage]


@pytest.fixture
async def staging(tmp_path: Path) -> AsyncIterator[Staging]:
    stages: list[Stage] = []

    def start(
        start_deadline_s: float = PATIENCE_S,
        grace_s: float = PATIENCE_S,
        engines: int = 1,
        **habits: tuple[str, ...],
    ) -> Stage:
        stages.append(Stage(tmp_path, habits, start_deadline_s, grace_s, engines))
        return stages[-1]

    yield start
    for stage in stages:
        stage.task.cancel()
        await asyncio.gather(stage.task, return_exceptions=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_an_engine_of_several_that_ends_is_started_again(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Ctrl-C ends all of them, the new one too."""
    monkeypatch.setattr(restarts, "RESTART_S_MIN", 0.01)
    stage = staging(engines=2)
    await stage.shows("Ctrl-C here stops all services.")
    assert "Engines    2" in stage.screen.getvalue()
    first = stage.pid("engine-1")
    os.kill(first, signal.SIGKILL)
    await stage.shows("the engine-1 was killed by signal 9")
    await stage.shows("The engine-1 is ready again.")
    started = [line for line in stage.diary.read_text().splitlines() if line.startswith("engine-1 started")]
    pids = [int(line.split()[2]) for line in started]
    assert (len(pids), pids[0]) == (2, first)
    os.kill(os.getpid(), signal.SIGINT)
    assert await stage.ends() == 0
    assert not is_alive(pids[1])
    assert stage.events()[-3:] == ["gateway stopped", "engine-1 stopped", "engine-0 stopped"]


async def test_an_engine_that_ends_again_and_again_ends_all(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "RESTART_S_MIN", 0.01)
    monkeypatch.setattr(restarts, "ROW_MAX", 2)
    stage = staging(engines=2)
    await stage.shows("Ready after")
    spec = stage.plan.services[0]
    object.__setattr__(spec, "argv", (*spec.argv, "dies"))
    os.kill(stage.pid("engine-0"), signal.SIGKILL)
    assert await stage.ends() == 1
    shown = stage.screen.getvalue()
    assert shown.count("is started again in") == 2
    assert "the engine-0 exited with status 3" in shown
    assert stage.events()[-2:] == ["gateway stopped", "engine-1 stopped"]


async def test_the_gateways_end_is_the_end_of_all_engines(staging: Staging) -> None:
    stage = staging(engines=2)
    await stage.shows("Ready after")
    os.kill(stage.pid("gateway"), signal.SIGKILL)
    assert await stage.ends() == 1
    assert "the gateway was killed by signal 9" in stage.screen.getvalue()
    assert stage.events()[-2:] == ["engine-1 stopped", "engine-0 stopped"]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_up_starts_in_order_and_stops_in_the_opposite(staging: Staging, number: signal.Signals) -> None:
    stage = staging()
    await stage.shows("Ctrl-C here stops both")
    assert stage.events() == ["engine started", "gateway started"]
    assert running.read_running() == stage.plan.running
    os.kill(os.getpid(), number)
    assert await stage.ends() == 0
    assert stage.events()[2:] == ["gateway stopped", "engine stopped"]
    assert running.read_running() is None
    shown = stage.screen.getvalue()
    assert f"logs are in {stage.directory}" in shown
    assert "engine   warming up ... " in shown
    assert "Ready after " in shown


async def test_a_second_signal_kills(staging: Staging) -> None:
    stage = staging(gateway=("stubborn",))
    await stage.shows("Ready after")
    os.kill(os.getpid(), signal.SIGINT)
    await stage.shows("Ctrl-C again stops at once")
    os.kill(os.getpid(), signal.SIGINT)
    assert await stage.ends() == 0
    assert "engine stopped" not in stage.events()
    assert not is_alive(stage.pid("gateway"))
    assert not is_alive(stage.pid("engine"))


async def test_a_child_that_will_not_stop_is_killed_in_time(staging: Staging) -> None:
    stage = staging(grace_s=0.1, gateway=("stubborn",), engine=("stubborn",))
    await stage.shows("Ready after")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stage.ends() == 0
    assert not is_alive(stage.pid("gateway"))
    assert not is_alive(stage.pid("engine"))


async def test_a_child_that_does_not_start_is_named_with_its_reason(staging: Staging) -> None:
    stage = staging(gateway=("dies",))
    assert await stage.ends() == 1
    shown = stage.screen.getvalue()
    assert "penstock up: the gateway exited with status 3\n" in shown
    assert "\n    error no.way reason=cannot\n    Traceback: plain text\n" in shown
    assert stage.events() == ["engine started", "gateway started", "engine stopped"]


async def test_a_child_that_never_gets_ready_times_out(staging: Staging) -> None:
    stage = staging(start_deadline_s=1.0, engine=("never-ready",))
    assert await stage.ends() == 1
    assert "the engine does not answer that it is well" in stage.screen.getvalue()
    is_begun = stage.diary.exists()  # on a busy machine it may not have come to that
    assert not is_begun or "engine stopped" in stage.events() or not is_alive(stage.pid("engine"))


async def test_a_child_that_dies_takes_the_other_with_it(staging: Staging) -> None:
    stage = staging()
    await stage.shows("Ready after")
    async with httpx.AsyncClient() as client:
        with contextlib.suppress(httpx.RemoteProtocolError):
            await client.get(f"{stage.plan.services[0].url}/die")
    assert await stage.ends() == 1
    assert "the engine exited with status 7\n" in stage.screen.getvalue()
    assert "error it.hurts reason=asked to" in stage.screen.getvalue()
    assert stage.events()[2:] == ["gateway stopped"]
    assert running.read_running() is None


async def test_a_child_that_is_killed_is_reported_with_its_signal(staging: Staging) -> None:
    stage = staging()
    await stage.shows("Ready after")
    os.kill(stage.pid("engine"), signal.SIGKILL)
    assert await stage.ends() == 1
    assert "the engine was killed by signal 9" in stage.screen.getvalue()


async def test_a_child_that_can_serve_no_more_counts_as_dead(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LIVE_POLL_S", 0.01)
    stage = staging(engine=("sick",))
    assert await stage.ends() == 1
    assert "the engine does not answer that it is well" in stage.screen.getvalue()
    assert stage.events()[2:] == ["gateway stopped", "engine stopped"]


async def test_a_signal_while_starting_stops_what_has_started(staging: Staging) -> None:
    stage = staging(engine=("never-ready",))
    await stage.shows("warming up")
    os.kill(os.getpid(), signal.SIGINT)
    assert await stage.ends() == 0
    assert stage.events() == ["engine started", "engine stopped"]


PARENT = """
import asyncio, sys
from pathlib import Path
from shared.cli.supervisor import RunningService, ServiceSpec
async def main():
    spec = ServiceSpec("child", tuple(sys.argv[2:]), Path(sys.argv[1]), f"http://127.0.0.1:{sys.argv[5]}", 60)
    service = await RunningService.start(spec)
    await service.ready(lambda line: None)
    print(service.pid, flush=True)
    await service.failed()
asyncio.run(main())
"""


async def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    child = [sys.executable, str(CHILD), "child", str(free_port()), str(tmp_path / "diary")]
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path / "log"), *child, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pidfd = os.pidfd_open(int(await parent.stdout.readline()))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
    assert "child stopped" in (tmp_path / "diary").read_text()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            '{"ts":"t","level":"info","service":"s","logger":"l","event":"e","n":1,"s":"x y"}',
            "info e n=1 s=x y",
        ),
        ('{"event":"e","exception":[{"exc_type":"E","exc_value":"v","frames":[]}]}', "e exception=E: v"),
        ("plain", "plain"),
        ("[1]", "[1]"),
        ("x" * 1000, "x" * supervisor.LINE_LEN_MAX),
    ],
)
def test_log_lines_are_readable(line: str, shown: str) -> None:
    assert supervisor.readable(line) == shown


def test_the_tail_of_a_long_log_is_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines = supervisor.log_tail(log).splitlines()
    assert len(lines) == supervisor.TAIL_LINES
    assert lines[-1] == "    line 99999"


async def test_a_log_of_the_last_time_is_gone_on_with(tmp_path: Path, staging: Staging) -> None:
    """Its lines are none of this start."""
    log = tmp_path / "engine.log"
    log.write_text('{"event":"core.progress","stage":"of the last time"}\n')
    stage = staging()
    await stage.shows("Ready after")
    os.kill(os.getpid(), signal.SIGINT)
    assert await stage.ends() == 0
    assert log.read_text().startswith('{"event":"core.progress","stage":"of the last time"}\n{')
    assert "of the last time" not in stage.screen.getvalue()


def test_a_log_that_has_grown_is_moved_aside_once(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.touch()
    with log.open("ab", buffering=0) as writer:
        for number in range(3):
            writer.write(b"%d" % number * 10)
            supervisor.keep_short(log, len_max=11)
            writer.write(b".")
            supervisor.keep_short(log, len_max=11)
    assert log.read_bytes() == b""
    assert (tmp_path / "engine.old.log").read_bytes() == b"2" * 10 + b"."
    assert len(list(tmp_path.iterdir())) == 2
