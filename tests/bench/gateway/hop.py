"""The cost of the hop alone: a bare relay over our HTTP/2 against the same relay over aiohttp's HTTP/1.1.

A process serves paced event streams, by HTTP/2 and HTTP/1.1 on one port; another relays them to this process.
The relay's CPU time, as the kernel counts it, is divided by the events that arrive here. The relay has none
of a gateway's features, so that what is compared is the transport. Only the ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Final

import msgspec

from tests.bench.client import ApiServer, TimedRequest
from tests.bench.cpu import cpu_s
from tests.bench.figures import Figure, at_most, figure
from tests.bench.gateway.bare import HTTP1, UPSTREAMS, Wants
from tests.bench.services import free_port, service
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

RATIO_TARGET: Final = at_most(0.7)
_BARE: Final = (sys.executable, "-m", "tests.bench.gateway.bare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.5, help="length of each run")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[128, 256], help="concurrent streams, a run each"
    )
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between two events of a stream")


async def run(options: argparse.Namespace) -> list[Figure]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [*_BARE, "engine", "--port", str(port), "--interval-ms", str(options.interval_ms)]
    figures: list[Figure] = []
    async with service(argv, url):
        for loop in ("asyncio", "uvloop"):
            costs = {upstream: await _costs(loop, upstream, url, options) for upstream in UPSTREAMS}
            for streams in options.streams:
                name = f"{loop}, {streams} streams at {options.interval_ms:g} ms"
                figures += _figures(name, {upstream: costs[upstream][streams] for upstream in UPSTREAMS})
    return figures


def _figures(name: str, costs: dict[str, float]) -> list[Figure]:
    """The figures of one number of streams. `costs` is the CPU time in us per event, by the relay's
    protocol."""
    figures = []
    for upstream, cost in costs.items():
        figures.append(figure(f"{name}: {upstream}", cost, "us/event"))
        if upstream != HTTP1:
            ratio = cost / costs[HTTP1]
            figures.append(figure(f"{name}: {upstream} / HTTP/1.1", ratio, "x", RATIO_TARGET))
    return figures


async def _costs(loop: str, upstream: str, engine_url: str, options: argparse.Namespace) -> dict[int, float]:
    """CPU time in us per event, by the number of streams."""
    port = free_port()
    argv = [*_BARE, "relay", "--port", str(port), "--loop", loop, "--upstream", upstream, "--url", engine_url]
    url = f"http://127.0.0.1:{port}"
    costs: dict[int, float] = {}
    async with service(argv, url) as process:
        for streams in options.streams:
            await _load(url, streams, 2)  # to make the connections and warm up the code
            before_s = cpu_s(process.pid)
            events = await _load(url, streams, int(options.seconds * 1e3 / options.interval_ms))
            costs[streams] = 1e6 * (cpu_s(process.pid) - before_s) / events
    return costs


async def _load(url: str, streams: int, events: int) -> int:
    """The number of events that arrived over `streams` streams of `events` each."""
    endpoint = ApiServer(url)
    request = endpoint.request("/", msgspec.json.encode(Wants(events)))

    async def one() -> TimedRequest:
        connection = await endpoint.connect()
        try:
            return await connection.exchange(request)
        finally:
            connection.close()

    done = await asyncio.gather(*(one() for _ in range(streams)))
    if errors := {exchange.error for exchange in done} - {None}:
        raise BenchFailed(f"streams failed: {errors}")
    return sum(len(exchange.event_times) for exchange in done)
