"""A gateway, an engine, and a tenant who must not notice what the others do to them.

One pair of processes serves the folder, or a worker's part of it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.process.setting_values import to_toml
from tests import effort
from tests.bench.gateway.attack import Attack, Ends, Law, Who
from tests.bench.gateway.attackers import RequestOutcome, send
from tests.bench.gateway.attacks import against
from tests.bench.gateway.neighbourhood import (
    CORE_MEMORY_MAX,
    ENGINE_MEMORY_MAX,
    ENGINE_OPTIONS,
    GATEWAY_MEMORY_MAX,
    forget_peak,
    gateway_config,
    peak_bytes,
    rest_bytes,
)
from tests.bench.gateway.victim import Victim
from tests.services import (
    MODEL_DIR,
    Line,
    Service,
    admin_url,
    engine,
    engine_at_rest,
    engine_url,
    gateway_at_rest,
    gateway_url,
    gauges,
    service,
    until,
)

WARM_ROUNDS = 3
FEW = 4


def attacks(law: Law) -> Sequence[Attack]:
    """The kinds of attack against a law. Of many, every third in every run, and all by command."""
    found = against(law)
    return found if len(found) <= FEW else found[:: effort.drawn(3, whole=1)]


@dataclass
class Process:
    """One of the services' processes, and what it may hold."""

    name: str
    pid: int
    memory_max: int
    """Bytes above its memory at rest."""
    rest: int = 0

    @property
    def taken(self) -> int:
        """The most that it has held above its memory at rest, since its peak was forgotten."""
        return peak_bytes(self.pid) - self.rest


class House:
    """The processes, the victim, and the attacks that were made."""

    def __init__(self, gateway: Service, engine: Service) -> None:
        self.gateway, self.engine = gateway, engine
        self.url, self.admin_url, self.engine_url = (
            gateway_url(gateway),
            admin_url(gateway),
            engine_url(engine),
        )
        self.victim = Victim(self.url)
        self.processes = [
            Process("gateway", gateway.process.pid, GATEWAY_MEMORY_MAX),
            Process("engine", engine.process.pid, ENGINE_MEMORY_MAX),
            Process("core", engine.line("core.started")["pid"], CORE_MEMORY_MAX),
        ]
        self._attacks = 0

    async def warm_up(self) -> None:
        await self.victim.alone(WARM_ROUNDS)
        for process in self.processes:
            process.rest = rest_bytes(process.pid)

    async def attacked(self, attack: Attack) -> list[RequestOutcome]:
        """Run an attack beside the victim, to its end and to both services' rest. Every request of the victim
        gets what it gets alone, every answer to the attack is one that it may have, and each process keeps
        to its memory."""
        self._attacks += 1
        for process in self.processes:
            forget_peak(process.pid)
        cue = asyncio.Event()
        attacking = send(attack, self.url, cue, tag=f"a{self._attacks}")
        _, outcomes = await self.victim.beside(attacking, cue)
        is_unknown = attack.who == (Who.STRANGER,)  # whom a reset may reach before the answer does
        for outcome in outcomes:
            assert outcome.status is None or outcome.status in attack.statuses, outcome
            assert outcome.status is not None or attack.ends is not Ends.ANSWERED or is_unknown, outcome
        await asyncio.to_thread(until, self.is_at_rest)
        for process in self.processes:
            assert process.taken <= process.memory_max, f"{process.name} took {process.taken:,} bytes"
        return outcomes

    def is_at_rest(self) -> bool:
        """Nothing is held for anybody."""
        held = gauges(self.admin_url)["held_bytes"], gauges(self.engine_url)["held_bytes"]
        return not any(held) and gateway_at_rest(self.admin_url) and engine_at_rest(self.engine_url)

    def gateway_lines(self, outcomes: Sequence[RequestOutcome]) -> dict[str, Line]:
        """The completed line that the gateway wrote for each of these requests, by its id."""
        return self._lines(self.gateway, {outcome.request_id for outcome in outcomes})

    def engine_lines(self, request_ids: Collection[str]) -> dict[str, Line]:
        """The same of the engine, for requests that have reached it."""
        return self._lines(self.engine, set(request_ids))

    def _lines(self, service: Service, ids: set[str]) -> dict[str, Line]:
        found: dict[str, Line] = {}

        def are_there() -> bool:
            found.update(
                (line["request_id"], line) for line in service.completed if line["request_id"] in ids
            )
            return found.keys() == ids

        until(are_there)
        return found

    def has_reached_engine(self, outcomes: Sequence[RequestOutcome]) -> bool:
        """Whether the engine has completed any of these requests."""
        ids = {outcome.request_id for outcome in outcomes}
        return any(line["request_id"] in ids for line in self.engine.completed)


@contextmanager
def engines(count: int, *options: str, model: Path = MODEL_DIR) -> Iterator[list[Service]]:
    """Engines of a model, the built-in one if no other is named, ready."""
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="n"))
            started.append(
                stack.enter_context(engine(Path(directory), *ENGINE_OPTIONS, *options, model=str(model)))
            )
        for one in started:
            engine_url(one)
        yield started


@contextmanager
def gateway(
    engines: Sequence[Service],
    *,
    others: Sequence[str] = (),
    workers: int = 1,
    rogue_url: str | None = None,
    **environment: str,
) -> Iterator[Service]:
    """A gateway before these engines, before what is at the URLs of `others`, and before rogues."""
    urls = [*others, *map(engine_url, engines)]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "gateway.toml"
        file.write_text(to_toml(gateway_config(urls, workers=workers, rogue_url=rogue_url)))
        with service(["gateway", "--config", str(file)], **environment) as started:
            yield started


@pytest.fixture(scope="package")
def pair() -> Iterator[House]:
    with engines(1) as [served], gateway([served]) as front:
        house = House(front, served)
        asyncio.run(house.warm_up())
        yield house


@pytest.fixture
async def house(pair: House) -> AsyncIterator[House]:
    """Both services, at rest."""
    await asyncio.to_thread(until, pair.is_at_rest)
    yield pair
    assert pair.gateway.process.poll() is None
    assert pair.engine.process.poll() is None
