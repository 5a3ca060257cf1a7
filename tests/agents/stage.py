"""Gateway, engine and agents in one network namespace that has nothing but loopback.

Everything that an agent asks for goes through a recorder of its own to the gateway, and from there to the
engine whose model plays the script (`tests.agents.served`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.identity.keys import hash_key
from tests.agents import served
from tests.agents.catalogue import Agent, Place, cache_folder
from tests.agents.model import make_model, opening_len
from tests.agents.recorder import Recorder, recording
from tests.agents.task import Order, Task
from tests.services import Service, engine_url, gateway, gateway_url, service
from tests.suites import cache as suites

RUN_S: Final = 300.0
"""The time in which an agent must have done an order, in seconds: machines that agents run on are busy."""
PAGE_SIZE: Final = 64
"""The engine's, where nothing else is set."""
PRINTED_LEN_MAX: Final = 1 << 20
SAID_LEN_MAX: Final = 4000
"""Characters of each log that are told when a scene fails."""
CHATS_KEY: Final = "chats-key"
CHATS: Final = f"""
[[tenants]]
id = "chats"
[[keys]]
id = "k2"
hash = "{hash_key(CHATS_KEY)}"
tenant = "chats"
"""
"""Another tenant than the agents'."""


@dataclass(frozen=True, slots=True)
class Stage:
    engine: Service
    gateway: Service
    template: str
    opening_len: int
    """The tokens that begin an answer in a prompt."""

    @property
    def url(self) -> str:
        return gateway_url(self.gateway)


@dataclass(frozen=True, slots=True)
class Run:
    """One process of an agent, from its start to its end."""

    began_s: float
    """By the wall clock, as the recorder's times are."""
    seconds: float
    status: int | None
    """None for one that had to be ended."""
    printed: str


@dataclass(frozen=True, slots=True)
class Guest:
    """An agent on the stage, with a home and a task."""

    agent: Agent
    place: Place
    recorder: Recorder
    task: Task

    def started(self, options: list[str]) -> subprocess.Popen[bytes]:
        """A process of it, with an environment of its own."""
        own = {"PATH": os.environ["PATH"], "HOME": str(self.place.home), "TERM": "dumb"}
        with self._printed.open("wb") as out:
            return subprocess.Popen(
                self.agent.command(cache_folder(), options),
                cwd=self.place.folder,
                env={**own, **self.agent.environment(self.place)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def run(self, options: list[str]) -> Run:
        """Run it to its end, or for RUN_S."""
        began_s = time.time()
        process = self.started(options)
        try:
            status: int | None = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
        printed = self._printed.read_bytes()[:PRINTED_LEN_MAX].decode(errors="replace")
        return Run(began_s, time.time() - began_s, status, printed)

    def session(self) -> list[tuple[Run, bool]]:
        """Give it all orders of its task, one after another. Each run with whether the order was done."""
        done = []
        for number, order in enumerate(self.task.orders):
            made = self.run(self.options(order, again=number > 0))
            done.append((made, self.task.is_done(order, made.printed)))
        return done

    def options(self, order: Order, *, again: bool = False) -> list[str]:
        return (self.agent.again if again else self.agent.order)(self.place, order.text)

    @property
    def _printed(self) -> Path:
        return self.place.home / "printed.txt"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def staged(folder: Path, template: str, pages: int = served.PAGES) -> Iterator[Stage]:
    """`pages`: of the engine's cache."""
    model = folder / "model"
    make_model(model, template, pages, suites.cache_folder())
    longest = min(served.CONTEXT_LEN, pages * PAGE_SIZE)
    options = ["--model", str(model), "--port", "0", "--max-model-len", str(longest)]
    with (
        tempfile.TemporaryDirectory(prefix="ag") as sockets,
        service([served.MODULE, "serve", *options], TMPDIR=sockets) as engine,
        _told(engine),
        gateway(folder, engine_url(engine), CHATS) as front,
        _told(front),
    ):
        gateway_url(front)
        yield Stage(engine, front, template, opening_len(model))


@contextmanager
def _told(log: Service) -> Iterator[None]:
    """Tell the end of a log where something fails, a start too."""
    try:
        yield
    except BaseException:
        sys.stderr.write(log.text[-SAID_LEN_MAX:])
        raise


@contextmanager
def guest(stage: Stage, agent: Agent, folder: Path, pause_s: int = 0) -> Iterator[Guest]:
    """An agent that has been told where the model is. `folder`: for it alone; `pause_s`: how long its command
    waits."""
    with recording(int(stage.url.rpartition(":")[2])) as recorder:
        place = Place(folder / "home", folder / "work", f"http://127.0.0.1:{recorder.port}")
        place.home.mkdir(parents=True)
        place.folder.mkdir()
        subprocess.run(["git", "init", "-q", str(place.folder)], check=True)
        agent.settle(place)
        task = Task(place.folder, pause_s)
        task.prepare()
        made = Guest(agent, place, recorder, task)
        if (options := agent.first(place)) is not None:
            made.run(options)
        yield made
