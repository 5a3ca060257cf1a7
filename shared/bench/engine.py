"""`penstock bench engine`: tokens/s, time to first token and gap between tokens of an engine.

Without `--url` it starts an engine of its own on a free port; with it, any OpenAI-compatible server
is measured the same way. Prompts are random token ids, all different, so that no prefix cache helps;
answers run to their full length with `ignore_eos`. Times are taken by a client in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from shared.bench.client import Endpoint, Exchange
from shared.bench.cpu import resident_bytes
from shared.bench.figures import Figure, figure, quantile
from shared.bench.services import demo_model, free_port, service

TOKEN_ID_MIN, TOKEN_ID_MAX = 300, 2000
"""Prompt ids are drawn from here: plain tokens in every vocabulary that we know of."""


class BenchFailed(Exception):
    """The server under test answered with an error."""


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    rounds: int
    prompt_len: int
    output_len: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", help="base URL of a running server (http://host:port/v1); default: start our own"
    )
    parser.add_argument(
        "--model",
        help="model directory to start (default: the demo model), or with --url the model's name there",
    )
    parser.add_argument("--key", help="API key for --url")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1, 8, 32], help="concurrent streams, a run each"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="requests that each stream makes, one after another"
    )
    parser.add_argument("--prompt-tokens", type=int, default=200, help="length of every prompt")
    parser.add_argument("--output-tokens", type=int, default=64, help="length of every answer")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")


async def run(options: argparse.Namespace) -> list[Figure]:
    rng = random.Random(options.seed)
    figures: list[Figure] = []
    async with _server(options) as (endpoint, model, pid):
        await measure(endpoint, model, Load(1, 1, options.prompt_tokens, 8), rng)  # warm-up, not counted
        for streams in options.streams:
            load = Load(streams, options.rounds, options.prompt_tokens, options.output_tokens)
            figures += await measure(endpoint, model, load, rng)
        if pid is not None:
            figures.append(figure("resident memory", resident_bytes(pid) / 1e6, "MB"))
    return figures


async def measure(endpoint: Endpoint, model: str, load: Load, rng: random.Random) -> list[Figure]:
    """Figures of one load. Raises `BenchFailed` when any request fails."""
    prompts = [
        [
            [rng.randint(TOKEN_ID_MIN, TOKEN_ID_MAX) for _ in range(load.prompt_len)]
            for _ in range(load.rounds)
        ]
        for _ in range(load.streams)
    ]
    start = time.perf_counter()
    done = await asyncio.gather(*(_stream(endpoint, model, load, mine) for mine in prompts))
    elapsed_s = time.perf_counter() - start
    exchanges = [exchange for mine in done for exchange in mine]
    tokens = sum(_completion_tokens(exchange) for exchange in exchanges)
    first = [1e3 * (exchange.event_times[0] - exchange.sent_at) for exchange in exchanges]
    gaps = [1e3 * (b - a) for exchange in exchanges for a, b in itertools.pairwise(exchange.event_times)]
    name = f"{load.streams} stream" + ("s" if load.streams > 1 else "")
    return [
        figure(f"{name}: output", tokens / elapsed_s, "tokens/s"),
        figure(f"{name}: TTFT p50", quantile(first, 0.5), "ms"),
        figure(f"{name}: TTFT p99", quantile(first, 0.99), "ms"),
        figure(f"{name}: gap p50", quantile(gaps, 0.5), "ms"),
        figure(f"{name}: gap p99", quantile(gaps, 0.99), "ms"),
    ]


async def _stream(endpoint: Endpoint, model: str, load: Load, prompts: list[list[int]]) -> list[Exchange]:
    connection = await endpoint.connect()
    try:
        done = []
        for prompt in prompts:
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": load.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            exchange = await connection.exchange(endpoint.request("/completions", msgspec.json.encode(body)))
            if exchange.error is not None:
                raise BenchFailed(exchange.error)
            done.append(exchange)
        return done
    finally:
        connection.close()


def _completion_tokens(exchange: Exchange) -> int:
    """What the server says; where it says nothing, one token an event."""
    usage = exchange.usage
    return usage.completion_tokens if usage is not None else len(exchange.event_times)


@contextlib.asynccontextmanager
async def _server(options: argparse.Namespace) -> AsyncIterator[tuple[Endpoint, str, int | None]]:
    """The server under test: its endpoint, its model's name, and its process when it is ours."""
    if options.url is not None:
        if options.model is None:
            raise BenchFailed("--url needs --model: the name that the server knows its model by")
        yield Endpoint(options.url, options.key), options.model, None
        return
    port = free_port()
    argv = [sys.executable, "-m", "engine", "serve", "--model", options.model or demo_model()]
    argv += ["--served-model-name", "bench", "--port", str(port)]
    async with service(argv, f"http://127.0.0.1:{port}/readyz") as process:
        yield Endpoint(f"http://127.0.0.1:{port}/v1"), "bench", process.pid
