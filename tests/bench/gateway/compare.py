"""`python -m tests.bench gateway`: what the gateway costs, in CPU time and in latency.

In front of an engine with no model (`paced_engine`) runs one gateway process with everything on:
key, schema, exact count, quotas, metrics, log line. Its CPU time is read from the kernel between two
marks, and divided by the events forwarded, or by the requests answered. Engine and load are processes of
their own. A figure whose load was not delivered, because the machine has no room for it, is NaN, and
misses its target.

In the same run a plain aiohttp relay (in a source checkout) and nginx (where it is installed) forward
the same events and the same unary requests: absolute times mean something on a quiet machine only, the ratios
on any. The targets are for a machine on which nginx takes 10 to 11 us per event; where nginx takes more, our
figures may be divided by as much. The added time to the first byte is that of the gateway less that of the
engine alone.

The row `features` measures quotas in Redis, tokens (JWT) in place of keys, and TLS, each as a gateway of its
own beside one that has none of them.

The row `recording` measures the records of requests and the export of spans, each beside a gateway without.

With `--before DIR` another version's source is measured against this one instead, in turns.

With `--url` a gateway that runs already is measured from outside: latency and rates, no CPU time.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tests.bench.client import ApiServer, LoadConnection
from tests.bench.figures import Figure, at_most, figure, quantile
from tests.bench.gateway.features import features
from tests.bench.gateway.recording import recording
from tests.bench.gateway.streams import (
    PEERS,
    Load,
    events,
    events_of,
    many,
    measured,
    overload,
    proxies,
    stalled,
)
from tests.bench.gateway.subjects import ServerUnderTest, gateway, paced_engine
from tests.bench.gateway.unary import Unary, checked
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

CPU_US_PER_UNARY_TARGET = at_most(400)
ADDED_TTFB_MS_TARGET = at_most(1)
TTFB_REQUESTS = 150
UNARY_ROUNDS = 8
OUTSIDE_TOKENS = 200
"""The tokens of a stream at a gateway that runs elsewhere, before an engine of unknown context length."""
PAIRS = 60
BEFORE_TARGET = at_most(1.05)
"""The target of the upper bound of a median of pairs."""
ROWS = ("events", "unary", "ttfb", "overload", "many", "stalled", "features", "recording")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="base URL of a running gateway (http://host:port/v1); default: start our own"
    )
    parser.add_argument("--model", help="with --url, the model's name there")
    parser.add_argument("--key", help="API key for --url")
    parser.add_argument(
        "--before", type=os.path.abspath, metavar="DIR", help="a checkout of another version, to compare with"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="with --before: so many pairs")
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
    if options.before is not None:
        load = Load(options.streams[0], options.interval_ms[0])
        return await _against_before(options.before, load, options.seconds, options.pairs)
    return await (_own(options) if options.url is None else _from_outside(options))


async def _own(options: argparse.Namespace) -> list[Figure]:
    rows, seconds = set(options.rows), options.seconds
    figures: list[Figure] = []
    if "events" in rows:
        for interval_ms in options.interval_ms:
            figures += await events(interval_ms, options.streams, seconds)
    if rows & {"unary", "ttfb"}:
        async with paced_engine(options.interval_ms[0]) as engine, proxies(engine) as (ours, *peers):
            figures += await _unary(ours, *peers) if "unary" in rows else []
            figures += await _ttfb(ours, engine.subject) if "ttfb" in rows else []
    if "overload" in rows:
        figures += await overload(seconds)
    if "many" in rows:
        figures += await many(seconds)
    if "stalled" in rows:
        figures += await stalled(options.interval_ms[0], seconds)
    if "features" in rows:
        figures += await features(Load(options.streams[0], options.interval_ms[0]), seconds)
    if "recording" in rows:
        figures += await recording(Load(options.streams[0], options.interval_ms[0]), seconds)
    return figures


async def _from_outside(options: argparse.Namespace) -> list[Figure]:
    if options.model is None:
        raise BenchFailed("--url needs --model: the name that the server knows its model by")
    subject = ServerUnderTest(ApiServer(options.url, options.key), options.model)
    figures: list[Figure] = []
    for streams in options.streams if "events" in options.rows else []:
        figures += await events_of(subject, streams, OUTSIDE_TOKENS)
    figures += await _unary(subject) if "unary" in options.rows else []
    figures += await _ttfb(subject, None) if "ttfb" in options.rows else []
    return figures


async def _against_before(checkout: str, load: Load, seconds: float, pairs: int) -> list[Figure]:
    """CPU time of this version over that of another, each before an engine of its own version: the median of
    pairs. The two of a pair are measured one right after the other, in alternating order."""
    directory = Path(checkout)
    async with (
        paced_engine(load.interval_ms) as our_engine,
        paced_engine(load.interval_ms, directory) as their_engine,
        gateway(our_engine) as ours,
        gateway(their_engine, directory) as theirs,
    ):
        unary = [Unary(ours), Unary(theirs)]
        for subject in unary:
            await subject.round(counted=False)
        requests, per_event = [], []
        for pair in range(pairs):
            turn = (0, 1) if pair % 2 else (1, 0)
            cost_us = {i: await unary[i].round() for i in turn}
            requests.append(cost_us[0] / cost_us[1])
            windows = {i: await measured((ours, theirs)[i], load.streams, seconds) for i in turn}
            per_event.append(windows[0].cpu_us_per_event / windows[1].cpu_us_per_event)
    return [*_of_pairs("unary", requests), *_of_pairs("event", per_event)]


def _of_pairs(name: str, ratios: Sequence[float]) -> list[Figure]:
    """The median of pairs, and the upper bound of its confidence interval of 95 %."""
    return [
        figure(f"{name}: gateway CPU / before", quantile(ratios, 0.5), "x"),
        figure(f"{name}: upper bound of 95 %", median_most(ratios), "x", BEFORE_TARGET),
        figure(f"{name}: least of the pairs", min(ratios), "x"),
    ]


def median_most(values: Sequence[float]) -> float:
    """The upper end of the median's confidence interval of 95 %, two-sided, by order statistics: so many of n
    values lie below the median as heads in n throws. The largest where there are too few."""
    n, chance = len(values), 0.0
    for rank in range(n, 0, -1):
        chance += math.comb(n, rank) / 2**n
        if chance > 0.025:
            return sorted(values)[min(rank, n - 1)]
    raise AssertionError("no values")


async def _unary(subject: ServerUnderTest, *peers: ServerUnderTest | None) -> list[Figure]:
    """The figures of unary requests. `peers` come in the order of `PEERS`; None for one that is not
    installed."""
    ours = Unary(subject)
    theirs = {name: Unary(peer) for name, peer in zip(PEERS, peers, strict=False) if peer is not None}
    loads = [ours, *theirs.values()]
    for load in loads:
        await load.round(counted=False)
    for _ in range(UNARY_ROUNDS):
        for load in loads:
            await load.round()
    rate = figure("unary: rate", ours.requests / ours.elapsed_s, "requests/s")
    if subject.pid is None:
        return [rate]
    figures = [figure("unary: gateway CPU", ours.cost_us, "us/request", CPU_US_PER_UNARY_TARGET), rate]
    for name, peer_load in theirs.items():
        figures.append(figure(f"unary: {name} CPU", peer_load.cost_us, "us/request"))
        figures.append(figure(f"unary: gateway / {name}", ours.cost_us / peer_load.cost_us, "x"))
    return figures


async def _ttfb(subject: ServerUnderTest, engine: ServerUnderTest | None) -> list[Figure]:
    """Figures of the time to the first byte. Gateway and engine alternate, so that both meet the same noise;
    answers are unary, so that the engine's pace plays no part."""
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


async def _first_byte_ms(subject: ServerUnderTest, connection: LoadConnection) -> float:
    exchange = checked(await connection.exchange(subject.chat(1, stream=False)))
    return 1e3 * (exchange.ended_at - exchange.sent_at)
