"""`penstock bench gateway`: what the gateway costs, in CPU time and in latency.

In front of an engine with no model (`paced_engine`) runs one gateway process with everything on:
key, schema, exact count, quotas, metrics, log line. Its CPU time is read from the kernel between two
marks, and divided by the events forwarded, or by the requests answered. Engine and load are processes of
their own. A figure whose load was not delivered, because the machine has no room for it, is NaN, and
misses its target.

In the same run a plain aiohttp relay (in a source checkout) and nginx (where it is installed) forward
the same events: absolute times are those of a quiet machine only, the ratios hold on any. The added
time to the first byte is that of the gateway less that of the engine alone.

With `--url` a gateway that runs already is measured from outside: latency and rates, no CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from shared.bench.client import Connection, Endpoint, Exchange
from shared.bench.figures import Figure, at_most, figure, quantile
from shared.bench.gateway_streams import events, events_of, many, overload, stalled
from shared.bench.streams import BenchFailed
from shared.bench.subjects import Subject, gateway, paced_engine

__all__ = ["BenchFailed", "add_arguments", "run"]

CPU_US_PER_UNARY_TARGET = at_most(400)
ADDED_TTFB_MS_TARGET = at_most(1)
TTFB_REQUESTS = 150
UNARY_REQUESTS = 1600
UNARY_CONNECTIONS = 8
UNARY_TOKENS = 16
OUTSIDE_TOKENS = 200
"""Of a stream at a gateway that runs elsewhere, before an engine whose context is not ours to choose."""
ROWS = ("events", "unary", "ttfb", "overload", "many", "stalled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="base URL of a running gateway (http://host:port/v1); default: start our own"
    )
    parser.add_argument("--model", help="with --url, the model's name there")
    parser.add_argument("--key", help="API key for --url")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[128, 256], help="concurrent streams, a run each"
    )
    parser.add_argument(
        "--interval-ms", type=float, nargs="+", default=[20.0, 10.0], help="time between events"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each streaming run")


async def run(options: argparse.Namespace) -> list[Figure]:
    return await (_own(options) if options.url is None else _from_outside(options))


async def _own(options: argparse.Namespace) -> list[Figure]:
    rows, seconds = set(options.rows), options.seconds
    figures: list[Figure] = []
    if "events" in rows:
        for interval_ms in options.interval_ms:
            figures += await events(interval_ms, options.streams, seconds)
    if rows & {"unary", "ttfb"}:
        async with paced_engine(options.interval_ms[0]) as engine, gateway(engine) as subject:
            figures += await _unary(subject) if "unary" in rows else []
            figures += await _ttfb(subject, engine.subject) if "ttfb" in rows else []
    if "overload" in rows:
        figures += await overload(seconds)
    if "many" in rows:
        figures += await many(seconds)
    if "stalled" in rows:
        figures += await stalled(options.interval_ms[0], seconds)
    return figures


async def _from_outside(options: argparse.Namespace) -> list[Figure]:
    if options.model is None:
        raise BenchFailed("--url needs --model: the name that the server knows its model by")
    subject = Subject(Endpoint(options.url, options.key), options.model)
    figures: list[Figure] = []
    for streams in options.streams if "events" in options.rows else []:
        figures += await events_of(subject, streams, OUTSIDE_TOKENS)
    figures += await _unary(subject) if "unary" in options.rows else []
    figures += await _ttfb(subject, None) if "ttfb" in options.rows else []
    return figures


async def _unary(subject: Subject) -> list[Figure]:
    request = subject.chat(UNARY_TOKENS, stream=False)

    async def closed_loop() -> None:
        connection = await subject.endpoint.connect()
        try:
            for _ in range(UNARY_REQUESTS // UNARY_CONNECTIONS):
                _checked(await connection.exchange(request))
        finally:
            connection.close()

    await closed_loop()  # warm-up, not counted
    before_s, start = subject.cpu_s(), time.perf_counter()
    await asyncio.gather(*(closed_loop() for _ in range(UNARY_CONNECTIONS)))
    used_s, elapsed_s = subject.cpu_s() - before_s, time.perf_counter() - start
    figures = [figure("unary: rate", UNARY_REQUESTS / elapsed_s, "requests/s")]
    if subject.pid is not None:
        cost = 1e6 * used_s / UNARY_REQUESTS
        figures.insert(0, figure("unary: gateway CPU", cost, "us/request", CPU_US_PER_UNARY_TARGET))
    return figures


async def _ttfb(subject: Subject, engine: Subject | None) -> list[Figure]:
    """Alternates gateway and engine, so that both meet the same noise. Unary answers: no pacing."""
    subjects = [subject] if engine is None else [subject, engine]
    connections = [await one.endpoint.connect() for one in subjects]
    times_ms: list[list[float]] = [[] for _ in subjects]
    try:
        for _ in range(TTFB_REQUESTS):
            for one, connection, into in zip(subjects, connections, times_ms, strict=True):
                into.append(await _first_byte_ms(one, connection))
    finally:
        for connection in connections:
            connection.close()
    medians = [quantile(times, 0.5) for times in times_ms]
    figures = [figure("time to first byte p50", medians[0], "ms")]
    if engine is not None:
        added_ms = medians[0] - medians[1]
        figures.append(figure("added time to first byte p50", added_ms, "ms", ADDED_TTFB_MS_TARGET))
    return figures


async def _first_byte_ms(subject: Subject, connection: Connection) -> float:
    exchange = _checked(await connection.exchange(subject.chat(1, stream=False)))
    return 1e3 * (exchange.ended_at - exchange.sent_at)


def _checked(exchange: Exchange) -> Exchange:
    if exchange.error is not None:
        raise BenchFailed(exchange.error)
    return exchange
