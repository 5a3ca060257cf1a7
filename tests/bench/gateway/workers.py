"""A gateway of several workers beside one of a single process: throughput, and CPU time per event and per
request.

All gateways run side by side before the same two paced engines and are measured in turns. Streams offer more
than one process can forward; unary requests come in a closed loop. The load and the engines run on the same
machine, so that on two cores the throughput says how well workers share what is left; only the ratios of one
run mean anything. CPU time is that of all processes of a gateway, its supervisor included. Each worker has
a connection of its own to each engine, so that fewer events come with a read than in one process. Quotas are
off: several workers count them in Redis, which `python -m tests.bench quota` measures.

A gateway's row goes to standard error as each round of it ends. No round is begun after `--limit-s`; what was
left out is said.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.config.edge import AdminConfig
from gateway.directory.development import development_config, development_key
from tests.bench.client import ApiServer
from tests.bench.cpu import cpu_s, descendants
from tests.bench.figures import Figure, at_most, figure, unmeasured
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.streams import measured
from tests.bench.gateway.subjects import Engine, ServerUnderTest, gateway_of, paced_engine
from tests.bench.gateway.unary import Unary
from tests.bench.services import free_port, get
from tests.bench.streams import BenchFailed, Measurement

__all__ = ["BenchFailed", "add_arguments", "run"]

ENGINES: Final = 2
EVENT_TARGET: Final = at_most(1.1)
"""CPU time per event, by that of one process."""
START_S: Final = 60.0
POLL_S: Final = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="each is measured beside one")
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams")
    parser.add_argument("--interval-ms", type=float, default=3.0, help="time between two events of a stream")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each gateway, in turns")
    parser.add_argument("--limit-s", type=float, default=120.0, help="no measurement is begun later")


@dataclass(frozen=True, slots=True)
class Group(ServerUnderTest):
    """A gateway of several processes."""

    def cpu_s(self) -> float:
        assert self.pid is not None
        return sum(map(cpu_s, descendants(self.pid)))


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one gateway, a value for each round."""

    streams: list[Measurement]
    unary_us: list[float]
    unary: Unary

    @property
    def event_us(self) -> float:
        return statistics.median(window.cpu_us_per_event for window in self.streams)

    @property
    def events_per_s(self) -> float:
        return statistics.median(window.rate for window in self.streams)

    @property
    def requests_per_s(self) -> float:
        return self.unary.requests / self.unary.elapsed_s

    @property
    def request_us(self) -> float:
        return statistics.median(self.unary_us)


async def run(options: argparse.Namespace) -> list[Figure]:
    until_s = time.perf_counter() + options.limit_s
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(paced_engine(options.interval_ms)) for _ in range(ENGINES)]
        counts = [1, *(count for count in options.workers if count != 1)]
        groups = {count: await stack.enter_async_context(_group(engines, count)) for count in counts}
        rows = {count: Row([], [], Unary(group)) for count, group in groups.items()}
        for row in rows.values():
            await row.unary.round(counted=False)  # to warm up
        left_out = list[str]()
        for number in range(1, options.rounds + 1):
            for count, row in rows.items():
                if time.perf_counter() >= until_s:
                    left_out.append(f"{_name(count)}, round {number}")
                    continue
                row.streams.append(await measured(groups[count], options.streams, options.seconds))
                row.unary_us.append(await row.unary.round())
                _say(count, row)
    if left_out:
        sys.stderr.write(f"left out, as --limit-s {options.limit_s:g} was over: {'; '.join(left_out)}\n")
    return [one for count, row in rows.items() for one in _figures(count, row, rows[1])]


def _name(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def _say(workers: int, row: Row) -> None:
    """Tell of the last measurement."""
    last = row.streams[-1]
    costs = f"{last.cpu_us_per_event:.1f} us/event, {row.unary_us[-1]:.0f} us/request"
    sys.stderr.write(f"{_name(workers)}, round {len(row.streams)}: {last.rate:.0f} events/s, {costs}\n")


@contextlib.asynccontextmanager
async def _group(engines: Sequence[Engine], workers: int) -> AsyncIterator[Group]:
    """A gateway of so many workers, all of which serve."""
    port, admin_port, key = free_port(), free_port(), development_key()
    config = development_config(port=port, key=key, model=MODEL, engine_url=engines[0].url)
    [model] = config.models
    config = dataclasses.replace(
        config,
        workers=workers,
        admin=AdminConfig(port=admin_port),
        models=(dataclasses.replace(model, replicas=tuple(engine.url for engine in engines)),),
    )
    admin = f"http://127.0.0.1:{admin_port}"
    server = ApiServer(f"http://127.0.0.1:{port}/v1", key)
    async with gateway_of(config, server, f"{admin}/readyz") as subject:
        if workers > 1:
            await _all_serve(admin, workers)
        yield Group(subject.endpoint, subject.model, subject.pid)


async def _all_serve(admin: str, workers: int) -> None:
    wanted = f'penstock_gateway_workers{{phase="serving"}} {workers:.1f}'.encode()
    try:
        async with asyncio.timeout(START_S):
            while wanted not in await get(f"{admin}/metrics"):  # noqa: ASYNC110 -- another process tells
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise BenchFailed(f"not all of {workers} workers serve") from None


def _figures(workers: int, row: Row, one: Row) -> list[Figure]:
    name = _name(workers)
    if not row.streams:
        return [unmeasured(f"{name} / 1: CPU per event", "x", EVENT_TARGET)]
    figures = [
        figure(f"{name}: forwarded", row.events_per_s, "events/s"),
        figure(f"{name}: CPU per event", row.event_us, "us/event"),
        figure(f"{name}: unary", row.requests_per_s, "requests/s"),
        figure(f"{name}: CPU per request", row.request_us, "us/request"),
    ]
    if row is not one:
        figures += [
            figure(f"{name} / 1: forwarded", row.events_per_s / one.events_per_s, "x"),
            figure(f"{name} / 1: CPU per event", row.event_us / one.event_us, "x", EVENT_TARGET),
            figure(f"{name} / 1: unary", row.requests_per_s / one.requests_per_s, "x"),
            figure(f"{name} / 1: CPU per request", row.request_us / one.request_us, "x"),
        ]
    return figures
