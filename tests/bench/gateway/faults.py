"""`python -m tests.bench faults`: what callers notice when one of three engines fails, beside Envoy.

Both proxies are before the same paced engines, and get the same load at the same time: requests at a steady
rate, each a stream of some seconds, so that about 200 are open. The engine is killed (SIGKILL), stopped
(SIGSTOP) or cut off after a while, or it treats requests badly throughout: headers and then silence, resets
after three events, 500s. Then all three are restarted in turn, under load.

*Lost*: ended before its first event. *Silent*: no event within `SILENT_S`. *Cut*: ended later, without its
last event. *Recovered*: the time from the fault from which on the 99th percentile of the time to the first
event is what it was before. Without a fault it tells how long this machine takes by itself: where it has
less CPU time than the load needs, nothing recovers within seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from gateway.config.edge import AdminConfig
from gateway.config.whole import GatewayConfig
from gateway.directory.development import development_config, development_key
from tests.bench.client import ApiServer, TimedRequest
from tests.bench.figures import Figure, Target, at_least, at_most, figure, quantile, unmeasured
from tests.bench.gateway.cable import Cable
from tests.bench.gateway.envoy import INSTALL, Envoy, envoy
from tests.bench.gateway.faulty_engine import PATH, Treatment
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.subjects import gateway_of
from tests.bench.services import START_DEADLINE_S, demo_model, free_port, get, service
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

REPLICAS: Final = 3
INTERVAL_MS: Final = 100.0
EVENTS: Final = 50
"""Events of each stream, which so takes five seconds."""
RATE: Final = 39
"""Requests per second: with streams of five seconds, about 200 are open."""
FAULT_AT_S: Final = 3.0
SILENT_S: Final = 8.0
STEP_S: Final = 0.5
RECOVERED_FACTOR: Final = 2.0
RECOVERED_S_MIN: Final = 5 * INTERVAL_MS / 1000
"""Time that a stream may take to its first event in any case: it waits for the engine's next tick."""


class Machine:
    """An engine, in a process that can be killed, stopped, restarted, and told how to fail."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        argv = [sys.executable, "-m", "tests.bench.gateway.faulty_engine", "--port", str(self.port)]
        argv += ["--interval-ms", str(INTERVAL_MS), "--tokenizer", demo_model()]
        self.process = await self._stack.enter_async_context(service(argv, f"{self.url}/readyz"))

    async def restart(self) -> None:
        """Let it finish what runs, and start another in its place."""
        self.process.terminate()
        async with asyncio.timeout(START_DEADLINE_S):
            await self.process.wait()
        await self.start()

    async def treat(self, treatment: Treatment) -> None:
        await get(f"{self.url}{PATH}{treatment}")

    def send(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def stop(self) -> None:
        self.send(signal.SIGCONT)
        await self._stack.aclose()


@dataclass(slots=True)
class Peer:
    """A proxy, and the requests that it was sent."""

    name: str
    server: ApiServer
    retries: Callable[[], Awaitable[float]]
    ejections: Callable[[], Awaitable[float]]
    requests: list[TimedRequest] = field(default_factory=list)

    def send(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._send(len(self.requests)))

    async def _send(self, number: int) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{number}: what does a penstock feed?"}],
            "max_tokens": EVENTS,
            "stream": True,
        }
        asked = TimedRequest(time.perf_counter())
        self.requests.append(asked)
        try:
            connection = await self.server.connect()
        except OSError as error:
            asked.error = str(error)
            return
        asked = connection.begin(self.server.request("/chat/completions", msgspec.json.encode(body)))
        self.requests[number] = asked
        await connection.finished(SILENT_S + 2 * EVENTS * INTERVAL_MS / 1000)
        connection.close()


@dataclass(frozen=True, slots=True)
class Seen:
    """The experience of one proxy's callers."""

    lost: int
    silent: int
    cut: int
    recovered_s: float
    requests: int
    retries: float
    ejections: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and what is asked of us: at most so many lost, silent, and retried."""

    name: str
    strike: Callable[[Sequence[Machine], Cable], Awaitable[None]]
    is_throughout: bool = False
    lost: int | None = 0
    silent: int | None = 0
    retries: int | None = None
    ejects: bool = True
    seconds: float = 12.0


async def _kill(machines: Sequence[Machine], _: Cable) -> None:
    machines[0].send(signal.SIGKILL)


async def _stop(machines: Sequence[Machine], _: Cable) -> None:
    machines[0].send(signal.SIGSTOP)


async def _cut(_: Sequence[Machine], cable: Cable) -> None:
    cable.cut()


async def _restart(machines: Sequence[Machine], _: Cable) -> None:
    for machine in machines:
        await machine.restart()


def _treats(treatment: Treatment) -> Callable[[Sequence[Machine], Cable], Awaitable[None]]:
    async def strike(machines: Sequence[Machine], _: Cable) -> None:
        await machines[0].treat(treatment)

    return strike


FAULTS: Final = (
    Fault("no fault", _treats("none"), is_throughout=True, ejects=False),
    Fault("killed", _kill, retries=26),
    Fault("stopped", _stop, silent=5),
    Fault("cut off", _cut, silent=5),
    Fault("headers, then silence", _treats("silence"), is_throughout=True, silent=5),
    Fault("reset after 3 events", _treats("resets"), is_throughout=True),
    Fault("500s", _treats("errors"), is_throughout=True),
    Fault("rolling restart", _restart, ejects=False, seconds=24.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAULT", help=str(names))


async def run(options: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    for fault in FAULTS:
        if fault.name in options.only:
            figures += await _measure(fault)
    return figures


async def _measure(fault: Fault) -> list[Figure]:
    """One fault, at engines and proxies of its own."""
    async with _peers(fault) as (machines, cable, peers):
        struck_s = await _load(fault, machines, cable, peers)
        seen = [await _seen(peer, struck_s) for peer in peers]
    ours, theirs = seen[0], seen[1] if len(seen) > 1 else None
    return list(_figures(fault, ours, theirs))


@contextlib.asynccontextmanager
async def _peers(fault: Fault) -> AsyncIterator[tuple[list[Machine], Cable, list[Peer]]]:
    async with contextlib.AsyncExitStack() as stack:
        machines = [Machine() for _ in range(REPLICAS)]
        for machine in machines:
            stack.push_async_callback(machine.stop)
        await asyncio.gather(*(machine.start() for machine in machines))
        cable = await stack.enter_async_context(Cable(machines[0].port))
        urls = [machine.url for machine in machines]
        if fault.strike is _cut:
            urls[0] = f"http://127.0.0.1:{cable.port}"
        peers = [await stack.enter_async_context(_ours(urls))]
        theirs = await stack.enter_async_context(envoy(urls))
        if theirs is not None:
            peers.append(_theirs(theirs))
        yield machines, cable, peers


@contextlib.asynccontextmanager
async def _ours(urls: Sequence[str]) -> AsyncIterator[Peer]:
    port, admin_port, key = free_port(), free_port(), development_key()
    config: GatewayConfig = development_config(port=port, key=key, model=MODEL, engine_url=urls[0])
    model = replace(config.models[0], replicas=tuple(urls))
    config = replace(config, models=(model,), admin=AdminConfig(port=admin_port))
    server = ApiServer(f"http://127.0.0.1:{port}/v1", key)

    def count(name: str, without: str) -> Callable[[], Awaitable[float]]:
        async def counted() -> float:
            lines = (await get(f"http://127.0.0.1:{admin_port}/metrics")).decode().splitlines()
            found = [line for line in lines if line.startswith(f"{name}_total") and without not in line]
            return sum(float(line.rpartition(" ")[2]) for line in found)

        return counted

    async with gateway_of(config, server, f"http://127.0.0.1:{port}/readyz"):
        retries = count("penstock_gateway_retries", 'kind="refused"')
        yield Peer("Penstock", server, retries, count("penstock_gateway_ejections", "_ended"))


def _theirs(one: Envoy) -> Peer:
    async def retries() -> float:
        return await one.count("upstream_rq_retry")

    async def ejections() -> float:
        return await one.count("outlier_detection.ejections_enforced_total")

    return Peer("Envoy", ApiServer(f"{one.url}/v1"), retries, ejections)


async def _load(fault: Fault, machines: Sequence[Machine], cable: Cable, peers: Sequence[Peer]) -> float:
    """Send the load, and strike. Returns when, on `time.perf_counter`."""
    begun_s = time.perf_counter()
    struck_s = begun_s if fault.is_throughout else begun_s + FAULT_AT_S
    striking: asyncio.Task[None] | None = None
    tasks: list[asyncio.Task[None]] = []
    for number in range(int(fault.seconds * RATE)):
        now_s = time.perf_counter()
        await asyncio.sleep(max(0.0, begun_s + number / RATE - now_s))
        if striking is None and time.perf_counter() >= struck_s:
            striking = asyncio.ensure_future(fault.strike(machines, cable))
            if fault.is_throughout:
                await striking
        tasks += [peer.send() for peer in peers]
    await asyncio.gather(*tasks)
    assert striking is not None
    await striking
    return struck_s


async def _seen(peer: Peer, struck_s: float) -> Seen:
    waits_s = [_wait_s(one) for one in peer.requests]
    lost = [one for one in peer.requests if not one.event_times and one.error != "deadline"]
    return Seen(
        lost=len(lost),
        silent=sum(wait_s >= SILENT_S for wait_s in waits_s) - len(lost),
        cut=sum(bool(one.event_times) and not one.saw_done for one in peer.requests),
        recovered_s=recovered_s([(one.sent_at - struck_s, _wait_s(one)) for one in peer.requests]),
        requests=len(peer.requests),
        retries=await peer.retries(),
        ejections=await peer.ejections(),
    )


def _wait_s(one: TimedRequest) -> float:
    """The time to the first event; that of a silent one where there was none."""
    return one.event_times[0] - one.sent_at if one.event_times else SILENT_S


def recovered_s(waits: Sequence[tuple[float, float]]) -> float:
    """The time after the fault from which on the 99th percentile of the waits is what it was before.

    `waits`: when each request was sent, from the fault on, and how long it waited for its first event, in
    seconds. One without an event has waited for `SILENT_S`."""
    before = [wait_s for sent_s, wait_s in waits if sent_s < 0]
    most_s = RECOVERED_S_MIN
    if before:
        most_s = max(most_s, RECOVERED_FACTOR * quantile(before, 0.99))
    last_s = max(sent_s for sent_s, _ in waits)
    at_s = 0.0
    while at_s < last_s and quantile([wait_s for sent_s, wait_s in waits if sent_s >= at_s], 0.99) > most_s:
        at_s += STEP_S
    return at_s


def _figures(fault: Fault, ours: Seen, theirs: Seen | None) -> Iterator[Figure]:
    cut = 0 if fault.name == "rolling restart" else None
    rows: Sequence[tuple[str, str, Callable[[Seen], float], Target | None]] = (
        ("lost before the first event", "requests", lambda seen: seen.lost, _most(fault.lost)),
        ("silent", "requests", lambda seen: seen.silent, _most(fault.silent)),
        ("cut later", "requests", lambda seen: seen.cut, _most(cut)),
        ("retries", "retries", lambda seen: seen.retries, _most(fault.retries)),
        ("ejections", "times", lambda seen: seen.ejections, at_least(1) if fault.ejects else None),
        ("recovered after", "s", lambda seen: seen.recovered_s, at_most(5) if fault.ejects else None),
    )
    yield figure(f"{fault.name}: sent", ours.requests, "requests")
    for what, unit, value, target in rows:
        yield figure(f"{fault.name}: {what}", value(ours), unit, target)
        if theirs is None:
            yield unmeasured(f"{fault.name}: {what}, Envoy ({INSTALL})", unit)
        else:
            yield figure(f"{fault.name}: {what}, Envoy", value(theirs), unit)


def _most(bound: int | None) -> Target | None:
    return None if bound is None else at_most(bound)
