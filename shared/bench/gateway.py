"""`penstock bench gateway`: what the gateway costs, in CPU time and in latency.

In front of an engine with no model (`paced_engine`) runs one gateway process with everything on:
key, schema, exact count, quota, metrics, log line. Its CPU time is read from the kernel before and
after a load, and divided by the events forwarded, or by the requests answered. The added time to the
first byte is that of the gateway less that of the engine alone, in the same run.

With `--url` a gateway that runs already is measured from outside: latency and rates, no CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.bench.client import Endpoint, Exchange
from shared.bench.cpu import cpu_s
from shared.bench.figures import Figure, at_most, figure, quantile
from shared.bench.paced_engine import MODEL
from shared.bench.services import demo_model, free_port, service
from shared.cli.settings import development_key, gateway_toml

CPU_US_PER_EVENT_TARGET = at_most(15)
CPU_US_PER_UNARY_TARGET = at_most(400)
ADDED_TTFB_MS_TARGET = at_most(1)
TTFB_REQUESTS = 150
UNARY_REQUESTS = 600
UNARY_CONNECTIONS = 8


class BenchFailed(Exception):
    """A request failed under the load."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The gateway under test; `pid` and `engine` only when it is our own."""

    endpoint: Endpoint
    model: str
    pid: int | None = None
    engine: Endpoint | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="base URL of a running gateway (http://host:port/v1); default: start our own"
    )
    parser.add_argument("--model", help="with --url, the model's name there")
    parser.add_argument("--key", help="API key for --url")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[128, 256], help="concurrent streams, a run each"
    )
    parser.add_argument(
        "--interval-ms", type=float, nargs="+", default=[20.0, 10.0], help="time between events"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each streaming run")


async def run(options: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    for interval_ms in options.interval_ms:
        async with _subject(options, interval_ms) as subject:
            for streams in options.streams:
                events = int(options.seconds * 1e3 / interval_ms)
                figures += await _streaming(subject, streams, events, interval_ms)
            if interval_ms == options.interval_ms[-1]:
                figures += await _unary(subject)
                figures += await _ttfb(subject)
    return figures


async def _streaming(subject: Subject, streams: int, events: int, interval_ms: float) -> list[Figure]:
    await _stream_all(subject, min(streams, 16), 2)  # warm-up, not counted
    before_s = _cpu(subject)
    done = await _stream_all(subject, streams, events)
    used_s = _cpu(subject) - before_s
    forwarded = sum(len(exchange.event_times) for exchange in done)
    gaps = [1e3 * (b - a) for exchange in done for a, b in itertools.pairwise(exchange.event_times)]
    name = f"{streams} streams at {interval_ms:g} ms"
    figures = [figure(f"{name}: gap p50", quantile(gaps, 0.5), "ms")]
    if subject.pid is not None:
        cost = figure(f"{name}: gateway CPU", 1e6 * used_s / forwarded, "us/event", CPU_US_PER_EVENT_TARGET)
        figures.insert(0, cost)
    return figures


async def _stream_all(subject: Subject, streams: int, events: int) -> list[Exchange]:
    request = subject.endpoint.request("/chat/completions", _body(subject.model, events, stream=True))

    async def one() -> Exchange:
        connection = await subject.endpoint.connect()
        try:
            return _checked(await connection.exchange(request))
        finally:
            connection.close()

    return await asyncio.gather(*(one() for _ in range(streams)))


async def _unary(subject: Subject) -> list[Figure]:
    request = subject.endpoint.request("/chat/completions", _body(subject.model, 16, stream=False))

    async def closed_loop() -> None:
        connection = await subject.endpoint.connect()
        try:
            for _ in range(UNARY_REQUESTS // UNARY_CONNECTIONS):
                _checked(await connection.exchange(request))
        finally:
            connection.close()

    await closed_loop()  # warm-up, not counted
    before_s, start = _cpu(subject), time.perf_counter()
    await asyncio.gather(*(closed_loop() for _ in range(UNARY_CONNECTIONS)))
    used_s, elapsed_s = _cpu(subject) - before_s, time.perf_counter() - start
    figures = [figure("unary: rate", UNARY_REQUESTS / elapsed_s, "requests/s")]
    if subject.pid is not None:
        cost = figure(
            "unary: gateway CPU", 1e6 * used_s / UNARY_REQUESTS, "us/request", CPU_US_PER_UNARY_TARGET
        )
        figures.insert(0, cost)
    return figures


async def _ttfb(subject: Subject) -> list[Figure]:
    """Alternates gateway and engine, so that both meet the same noise. Unary answers: no pacing."""
    through, direct = await _first_bytes(subject.endpoint, subject.model, subject.engine)
    figures = [figure("time to first byte p50", quantile(through, 0.5), "ms")]
    if direct:
        added = quantile(through, 0.5) - quantile(direct, 0.5)
        figures.append(figure("added time to first byte p50", added, "ms", ADDED_TTFB_MS_TARGET))
    return figures


async def _first_bytes(
    gateway: Endpoint, model: str, engine: Endpoint | None
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    pairs = [(gateway, model, times[0])] + ([(engine, MODEL, times[1])] if engine is not None else [])
    connections = [(await endpoint.connect(), endpoint, name, into) for endpoint, name, into in pairs]
    try:
        for _ in range(TTFB_REQUESTS):
            for connection, endpoint, name, into in connections:
                request = endpoint.request("/chat/completions", _body(name, 1, stream=False))
                exchange = _checked(await connection.exchange(request))
                into.append(1e3 * (exchange.ended_at - exchange.sent_at))
    finally:
        for connection, *_ in connections:
            connection.close()
    return times


def _checked(exchange: Exchange) -> Exchange:
    if exchange.error is not None:
        raise BenchFailed(exchange.error)
    return exchange


def _cpu(subject: Subject) -> float:
    return cpu_s(subject.pid) if subject.pid is not None else 0.0


def _body(model: str, max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "Tell me, in a few words, what a penstock is and what it feeds."}]
    return msgspec.json.encode(
        {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream, "temperature": 0}
    )


@contextlib.asynccontextmanager
async def _subject(options: argparse.Namespace, interval_ms: float) -> AsyncIterator[Subject]:
    if options.url is not None:
        if options.model is None:
            raise BenchFailed("--url needs --model: the name that the server knows its model by")
        yield Subject(Endpoint(options.url, options.key), options.model)
        return
    engine_port, gateway_port, key = free_port(), free_port(), development_key()
    engine_url = f"http://127.0.0.1:{engine_port}"
    engine_argv = [sys.executable, "-m", "shared.bench.paced_engine", "--port", str(engine_port)]
    engine_argv += ["--interval-ms", str(interval_ms), "--tokenizer", demo_model()]
    with tempfile.TemporaryDirectory() as run_dir:
        config = Path(run_dir) / "gateway.toml"
        config.write_text(
            gateway_toml(port=gateway_port, key=key, model=MODEL, aliases=(), engine_url=engine_url)
        )
        gateway_argv = [sys.executable, "-m", "gateway", "--config", str(config)]
        async with (
            service(engine_argv, f"{engine_url}/readyz"),
            service(gateway_argv, f"http://127.0.0.1:{gateway_port}/readyz") as process,
        ):
            endpoint = Endpoint(f"http://127.0.0.1:{gateway_port}/v1", key)
            yield Subject(endpoint, MODEL, process.pid, Endpoint(f"{engine_url}/v1"))
