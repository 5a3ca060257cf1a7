"""`python -m tests.bench foreign`: what the relay of an engine of another make costs, beside that of our own.

Two gateways, each before a paced engine: one of ours over HTTP/2, with a closing comment, and one of another
make over HTTP/1.1, whose streams end with their usage. The same streams run through both, one right after the
other and in alternating order. What is compared is the gateway's CPU time per event, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from gateway.directory.development import development_config, development_key
from tests.bench.client import ApiServer
from tests.bench.figures import Figure, at_most, figure, quantile
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.streams import measured
from tests.bench.gateway.subjects import LIMITS, Engine, ServerUnderTest, gateway, gateway_of, paced_engine
from tests.bench.services import free_port
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

RATIO_TARGET: Final = at_most(1.3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=128, help="concurrent streams")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between two events of a stream")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each run")
    parser.add_argument("--pairs", type=int, default=7, help="runs of each")


async def run(options: argparse.Namespace) -> list[Figure]:
    async with (
        paced_engine(options.interval_ms) as engine,
        paced_engine(options.interval_ms, is_foreign=True) as other,
        gateway(engine) as ours,
        _gateway_of_foreign(other) as foreign,
    ):
        costs_us: dict[str, list[float]] = {"our engine": [], "another make": []}
        subjects = {"our engine": ours, "another make": foreign}
        for pair in range(options.pairs):
            for name in sorted(subjects, reverse=pair % 2 == 0):
                window = await measured(subjects[name], options.streams, options.seconds)
                costs_us[name].append(window.cpu_us_per_event)
    ratios = [theirs / own for own, theirs in zip(*costs_us.values(), strict=True)]
    return [
        *(figure(f"{name}: gateway CPU", quantile(cost, 0.5), "us/event") for name, cost in costs_us.items()),
        figure("another make / our engine", quantile(ratios, 0.5), "x", RATIO_TARGET),
        figure("least of the pairs", min(ratios), "x"),
    ]


@contextlib.asynccontextmanager
async def _gateway_of_foreign(engine: Engine) -> AsyncIterator[ServerUnderTest]:
    port, key = free_port(), development_key()
    config = development_config(port=port, key=key, model=MODEL, engine_url=engine.url, limits=LIMITS)
    [model] = config.models
    config = replace(config, models=(replace(model, protocol="http1"),))
    server = ApiServer(f"http://127.0.0.1:{port}/v1", key)
    async with gateway_of(config, server, f"http://127.0.0.1:{port}/readyz") as subject:
        yield subject
