"""Gateway, engine and agents in one network namespace that has nothing but loopback.

Everything that an agent asks for goes through a recorder to the gateway, and from there to the engine whose
model plays the script (`tests.agents.served`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.agents import served
from tests.agents.catalogue import Agent, Place, cache_folder
from tests.agents.recorder import Recorder, recording
from tests.agents.task import Order, Task
from tests.services import Service, engine_url, gateway, gateway_url, service
from tests.suites import cache as suites

RUN_S: Final = 180.0
"""The time in which an agent must have done an order, in seconds."""
PRINTED_LEN_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One process of an agent, from its start to its end."""

    printed: str
    status: int | None
    """None for one that had to be ended, or was killed."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Stage:
    engine: Service
    gateway: Service
    recorder: Recorder
    model: Path

    def place(self, agent: Agent, folder: Path) -> Place:
        """A home and a folder to work in for an agent, which has been told where the model is."""
        place = Place(folder / "home", folder / "work", f"http://127.0.0.1:{self.recorder.port}")
        place.home.mkdir(parents=True)
        place.folder.mkdir()
        subprocess.run(["git", "init", "-q", str(place.folder)], check=True)
        agent.settle(place)
        if (options := agent.first(place)) is not None:
            run(agent, place, options)
        return place


@contextmanager
def staged(folder: Path, family: str) -> Iterator[Stage]:
    model = folder / "model"
    served.make_model(model, family, suites.cache_folder())
    options = ["--model", str(model), "--port", "0", "--max-model-len", str(served.CONTEXT_LEN)]
    with (
        tempfile.TemporaryDirectory(prefix="ag") as sockets,
        service([served.MODULE, "serve", *options], TMPDIR=sockets) as engine,
        gateway(folder, engine_url(engine)) as front,
        recording(int(gateway_url(front).rpartition(":")[2])) as recorder,
    ):
        yield Stage(engine, front, recorder, model)


def started(agent: Agent, place: Place, options: list[str], printed: Path) -> subprocess.Popen[bytes]:
    """A process of an agent with an environment of its own."""
    own = {"PATH": os.environ["PATH"], "HOME": str(place.home), "TERM": "dumb", **agent.environment(place)}
    with printed.open("wb") as out:
        return subprocess.Popen(
            agent.command(cache_folder(), options),
            cwd=place.folder,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def run(agent: Agent, place: Place, options: list[str]) -> Run:
    """Run an agent to its end, or for RUN_S."""
    printed, begin_s = place.home / "printed.txt", time.monotonic()
    process = started(agent, place, options, printed)
    try:
        status: int | None = process.wait(RUN_S)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end(process)
    text = printed.read_bytes()[:PRINTED_LEN_MAX].decode(errors="replace")
    return Run(text, status, time.monotonic() - begin_s)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def session(agent: Agent, place: Place, task: Task) -> list[tuple[Order, Run, bool]]:
    """Give an agent all orders of a task, one after another, each with whether it was done."""
    done = []
    for number, order in enumerate(task.orders):
        options = (agent.again if number else agent.order)(place, order)
        made = run(agent, place, options)
        done.append((order, made, task.is_done(order, made.printed)))
    return done
