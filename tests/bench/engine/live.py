"""`python -m tests.bench scheduler --live`: short prompts beside long ones on a real engine, twice.

Two engines serve the demo model on this machine, one first come first served and one with the default
discipline, with the same settings otherwise. They take turns, so that only one works at a time, and get the
same traffic: 85 % short prompts beside 15 % long ones, twenty times as long, arriving at random at nine
tenths of the rate that the first engine has just reached with many requests at once. Waits count from the
moment when a request was due. The whole takes about 80 seconds; only the ratios mean anything on another
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tests.bench.client import ApiServer, TimedRequest
from tests.bench.engine.virtual import Request
from tests.bench.engine.workloads import Kind, Workload, always
from tests.bench.figures import Figure, at_most, figure, quantile
from tests.bench.services import demo_model, free_port, service
from tests.bench.streams import BenchFailed

LIVE: Final = Workload(
    "live",
    (Kind(0.85, always(50), always(16)), Kind(0.15, always(1000), always(32))),
    short_len_max=50,
    long_len_min=1000,
    has_exact_shares=True,
)
LOAD: Final = 0.9
CALIBRATION_REQUESTS: Final = 240
ROUND_S: Final = 7.5
_ABBA: Final = ("fifo", "response-ratio", "response-ratio", "fifo")
ROUNDS: Final = (*_ABBA, *reversed(_ABBA[:2]), *reversed(_ABBA[2:]))
"""The disciplines of the rounds, in pairs that see the same traffic. Other load on the machine falls on both
disciplines alike."""
GAP_TARGET_MS: Final = 50
MODEL: Final = "bench"
TOKEN_ID_MIN, TOKEN_ID_MAX = 300, 2000
"""Plain tokens of the demo model."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request, with the times that its client saw, in seconds."""

    request: Request
    first_token_s: float
    """Time from the moment when the request was due to its first token."""
    ended_at_s: float
    """Time from the beginning of the round to the end of the answer."""
    gaps_s: list[float]
    """Times between two events of the answer."""


async def run(seed: int) -> list[Figure]:
    """Measure, and return the figures. Raises BenchFailed when any request fails."""
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(_engine(name)) for name in ("fifo", "response-ratio")
        }
        for engine in engines.values():
            await serve(
                engine, LIVE.traffic(seed, 20, 1e6), seed
            )  # warms up the learned cost and everything lazy
        everything = LIVE.traffic(seed, CALIBRATION_REQUESTS, 1e6)
        capacity = len(everything) / _makespan_s(await serve(engines["fifo"], everything, seed))
        per_s = LOAD * capacity
        by_name: dict[str, list[list[Served]]] = {name: [] for name in engines}
        for turn, name in enumerate(ROUNDS):
            arrivals_seed = seed + 1 + turn // 2
            arrivals = LIVE.traffic(arrivals_seed, round(per_s * ROUND_S), per_s)
            by_name[name].append(await serve(engines[name], arrivals, arrivals_seed))
    return figures(capacity, by_name["fifo"], by_name["response-ratio"])


def figures(
    capacity: float, fifo: Sequence[Sequence[Served]], ours: Sequence[Sequence[Served]]
) -> list[Figure]:
    """The figures from the rounds of either engine; ratios are the default discipline's over FIFO's."""
    found = [figure("live: capacity", capacity, "requests/s")]
    short, long = LIVE.is_short, LIVE.is_long
    for title, chosen, q, target in (
        ("short TTFT p99", short, 0.99, at_most(0.2)),
        ("short TTFT p50", short, 0.5, None),
        ("long TTFT p99", long, 0.99, at_most(1.4)),
    ):
        waits_s = [
            quantile([o.first_token_s for o in _all(rounds) if chosen(o.request)], q)
            for rounds in (fifo, ours)
        ]
        found += _pair(f"live: {title}", waits_s[0] * 1e3, waits_s[1] * 1e3, "ms")
        found.append(figure(f"live: {title} / FIFO's", waits_s[1] / waits_s[0], "x", target))
    makespans = [sum(map(_makespan_s, rounds)) for rounds in (fifo, ours)]
    gaps_s = [quantile([gap for o in _all(rounds) for gap in o.gaps_s], 0.99) for rounds in (fifo, ours)]
    found.append(figure("live: makespan / FIFO's", makespans[1] / makespans[0], "x", at_most(1.05)))
    found += _pair("live: gap p99", gaps_s[0] * 1e3, gaps_s[1] * 1e3, "ms")
    return [*found, figure("live: gap p99 / FIFO's", gaps_s[1] / gaps_s[0], "x")]


def _pair(title: str, fifo: float, ours: float, unit: str) -> list[Figure]:
    return [figure(f"{title}, FIFO", fifo, unit), figure(f"{title}, penstock", ours, unit)]


def _all(rounds: Iterable[Iterable[Served]]) -> list[Served]:
    return list(itertools.chain.from_iterable(rounds))


def _makespan_s(served: Sequence[Served]) -> float:
    return max(one.ended_at_s for one in served)


async def serve(endpoint: ApiServer, requests: Sequence[Request], seed: int) -> list[Served]:
    """Send each request when it is due, and wait for all of them."""
    rng = random.Random(seed)
    bodies = [endpoint.request("/completions", _body(request, rng)) for request in requests]
    start = time.perf_counter()
    served = (_one(endpoint, request, body, start) for request, body in zip(requests, bodies, strict=True))
    return await asyncio.gather(*served)


async def _one(endpoint: ApiServer, request: Request, body: bytes, start: float) -> Served:
    await asyncio.sleep(start + request.at_s - time.perf_counter())
    connection = await endpoint.connect()
    try:
        exchange: TimedRequest = await connection.exchange(body)
    finally:
        connection.close()
    if exchange.error is not None:
        raise BenchFailed(exchange.error)
    times = exchange.event_times
    gaps_s = [b - a for a, b in itertools.pairwise(times)]
    return Served(request, times[0] - start - request.at_s, exchange.ended_at - start, gaps_s)


def _body(request: Request, rng: random.Random) -> bytes:
    return msgspec.json.encode(
        {
            "model": MODEL,
            "prompt": [rng.randint(TOKEN_ID_MIN, TOKEN_ID_MAX) for _ in range(request.prompt_len)],
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )


@contextlib.asynccontextmanager
async def _engine(discipline: str) -> AsyncIterator[ApiServer]:
    port = free_port()
    argv = [sys.executable, "-m", "engine", "serve", "--model", demo_model(), "--served-model-name", MODEL]
    argv += ["--port", str(port), "--discipline", discipline, "--max-queue-len", "4096"]
    argv += ["--gap-target-ms", str(GAP_TARGET_MS), "--log-level", "error"]
    async with service(argv, f"http://127.0.0.1:{port}/readyz"):
        yield ApiServer(f"http://127.0.0.1:{port}/v1")
