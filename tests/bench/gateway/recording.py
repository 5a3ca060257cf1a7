"""The row `recording` of `python -m tests.bench gateway`: what it costs that a request can be looked at
afterwards.

Three gateways stand before one engine, the same but for what they keep: nothing, the records of requests
(`admin.records`, as by default), and the spans of a tenth of the traces, which go to a receiver that reads
them and drops them. They are measured in turns, and a ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

from gateway.config.edge import AdminConfig
from gateway.directory.development import development_config, development_key
from shared.process.build import DISTRIBUTION
from shared.telemetry.tracing import TracingConfig
from tests.bench.client import ApiServer
from tests.bench.figures import Figure, at_most, figure, quantile
from tests.bench.gateway.features import in_turns
from tests.bench.gateway.paced_engine import MODEL
from tests.bench.gateway.streams import Load
from tests.bench.gateway.subjects import LIMITS, Engine, ServerUnderTest, gateway_of, paced_engine
from tests.bench.services import free_port
from tests.bench.streams import BenchFailed

RATIO: Final = 0.1
EVENT_TARGET: Final = at_most(1.03)
TRACED_TARGET: Final = at_most(1.1)
BATCH_LEN_MAX: Final = 1 << 24
"""Bytes of a batch of spans that the receiver takes."""


@dataclass(frozen=True, slots=True)
class _Keeps:
    """The way in which a gateway keeps requests."""

    name: str
    records: int = 0
    traced: float = 0.0


_NOTHING: Final = _Keeps("without")
_RECORDS: Final = _Keeps("records", AdminConfig().records)
_TRACES: Final = _Keeps(f"spans of {RATIO:.0%}", traced=RATIO)


async def recording(load: Load, seconds: float) -> list[Figure]:
    """CPU time per request and per event with each, and its ratio to that with nothing."""
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        raise BenchFailed(f"the row recording needs the extra otel: pip install '{DISTRIBUTION}[otel]'")
    async with contextlib.AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(_receiver())
        engine = await stack.enter_async_context(paced_engine(load.interval_ms))
        subjects = {
            one: await stack.enter_async_context(_gateway(engine, one, receiver))
            for one in (_NOTHING, _RECORDS, _TRACES)
        }
        requests_us, events_us = await in_turns(subjects, load, seconds)
    figures: list[Figure] = []
    for what, unit, cost_us in (("unary", "request", requests_us), (load.name, "event", events_us)):
        for one in subjects:
            figures.append(figure(f"{what}: {one.name}: CPU", quantile(cost_us[one], 0.5), f"us/{unit}"))
            if one is _NOTHING:
                continue
            ratios = [a / b for a, b in zip(cost_us[one], cost_us[_NOTHING], strict=True)]
            target = EVENT_TARGET if unit == "event" else TRACED_TARGET if one is _TRACES else None
            figures.append(figure(f"{what}: {one.name} / without", quantile(ratios, 0.5), "x", target))
    return figures


@contextlib.asynccontextmanager
async def _gateway(engine: Engine, keeps: _Keeps, receiver: str) -> AsyncIterator[ServerUnderTest]:
    port, admin_port, key = free_port(), free_port(), development_key()
    config = development_config(port=port, key=key, model=MODEL, engine_url=engine.url, limits=LIMITS)
    tracing = TracingConfig(receiver, keeps.traced) if keeps.traced else TracingConfig()
    config = replace(config, admin=AdminConfig(port=admin_port, records=keeps.records), tracing=tracing)
    server = ApiServer(f"http://127.0.0.1:{port}/v1", key)
    async with gateway_of(config, server, f"http://127.0.0.1:{admin_port}/readyz") as subject:
        yield subject


@contextlib.asynccontextmanager
async def _receiver() -> AsyncIterator[str]:
    """A receiver of OTLP that drops what it gets. The address that it has."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(min(length, BATCH_LEN_MAX))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
    finally:
        server.close()
