"""The cost of quotas and accounting to the gateway: a seat, a reservation and a settlement, in memory and in
Redis.

This process does what a gateway does for each request's quotas, from 1 caller and from many, and
nothing else; its CPU time is divided by the requests. Redis is a process of its own, started here unless
--redis names one. The third row sends the same calls through redis-py's pool of connections. Only the
ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import shutil
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, cast

import redis.asyncio
import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import QuotaStore, ReservationId, Scope, Settlement, StoreUnavailable, Subject
from gateway.admission.redis_link import Command, Moved, RedisLink, Word
from gateway.admission.redis_links import links_of
from gateway.admission.redis_store import SCRIPT, RedisStore
from gateway.admission.usage import Payer, Used
from gateway.quota_config import QuotaLimits, QuotasConfig
from shared.bench.figures import Figure, at_most, figure, quantile
from shared.bench.services import free_port
from shared.bench.streams import BenchFailed
from shared.ids import KeyId, TenantId

__all__ = ["BenchFailed", "add_arguments", "run"]

POOL_RATIO_TARGET: Final = at_most(0.5)
"""CPU of our connection over that of redis-py's pool."""
START_S: Final = 10.0
TIMEOUT_S: Final = 5.0
_LIMITS: Final = QuotaLimits(10**9, 10**9, 10**6, None)
_TENANT: Final = TenantId("bench")
_PAYER: Final = Payer(_TENANT, KeyId("key"), "model")
_SUBJECTS: Final = (
    Subject(Scope.KEY, "key", _LIMITS, _TENANT),
    Subject(Scope.TENANT, _TENANT, _LIMITS, _TENANT),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=6000, help="requests of each row")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions, of which the cheapest counts")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 64], help="callers at once, a row each")
    parser.add_argument("--redis", metavar="URL", help="a server to use instead of one that is started")


async def run(options: argparse.Namespace) -> list[Figure]:
    def on_a_gateways_loop() -> list[Figure]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options))

    return await asyncio.to_thread(on_a_gateways_loop)


async def _run(options: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    async with contextlib.AsyncExitStack() as stack:
        url = options.redis or await stack.enter_async_context(redis_server())
        stores: dict[str, QuotaStore] = {
            "memory": MemoryStore(),
            "Redis": await stack.enter_async_context(_ours(url)),
            "Redis, redis-py's pool": await stack.enter_async_context(_pooled(url, max(options.callers))),
        }
        for callers in options.callers:
            measured = {name: await _best(store, callers, options) for name, store in stores.items()}
            for name, row in measured.items():
                figures += row.figures(f"{callers} callers: {name}")
            ours, pooled = measured["Redis"].cpu_us, measured["Redis, redis-py's pool"].cpu_us
            name = f"{callers} callers: Redis / redis-py's pool"
            figures.append(figure(name, ours / pooled, "x", POOL_RATIO_TARGET))
    return figures


class _Row:
    """One measurement."""

    def __init__(self, cpu_us: float, wall_s: float, latencies_s: list[float]) -> None:
        self.cpu_us = cpu_us
        """Per request."""
        self.wall_s = wall_s
        self.latencies_s = latencies_s
        """The three calls of a request, each by itself."""

    def figures(self, name: str) -> Iterable[Figure]:
        yield figure(f"{name}: CPU", self.cpu_us, "us/request")
        yield figure(f"{name}: calls", len(self.latencies_s) / self.wall_s, "calls/s")
        for q in (0.5, 0.99):
            yield figure(f"{name}: call, p{q * 100:g}", 1e6 * quantile(self.latencies_s, q), "us")


async def _best(store: QuotaStore, callers: int, options: argparse.Namespace) -> _Row:
    await _measure(store, callers, 20 * callers)  # connections are made, code is warm
    rows = [await _measure(store, callers, options.requests) for _ in range(options.rounds)]
    return min(rows, key=lambda row: row.cpu_us)


async def _measure(store: QuotaStore, callers: int, requests: int) -> _Row:
    latencies_s: list[float] = []
    began_s, cpu_before_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_caller(store, requests // callers, latencies_s) for _ in range(callers)))
    cpu_s, wall_s = time.process_time() - cpu_before_s, time.perf_counter() - began_s
    return _Row(1e6 * cpu_s / (requests // callers * callers), wall_s, latencies_s)


async def _caller(store: QuotaStore, requests: int, latencies_s: list[float]) -> None:
    now = time.perf_counter
    for _ in range(requests):
        name = ReservationId(uuid.uuid4().hex)
        at = [now()]
        for call in (
            lambda name=name: store.enter(name, _SUBJECTS, needs_tokens=True),
            lambda name=name: store.reserve(name, _SUBJECTS, 500, 500, _PAYER),
            lambda name=name: store.settle(name, Used(prompt=200, completion=100)),
        ):
            if await call() is None:
                raise BenchFailed("a reservation was lost")
            at.append(now())
        latencies_s += [after - before for before, after in itertools.pairwise(at)]


def _prefix() -> str:
    return f"bench-{uuid.uuid4().hex[:8]}"


# -- the stores -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[str]:
    """The URL of a server that keeps nothing."""
    command = shutil.which("redis-server")
    if command is None:
        raise BenchFailed("there is no redis-server: install it, or name one with --redis")
    port = str(free_port())
    options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"]  # noqa: S108 -- nothing is written there
    process: Process = await asyncio.create_subprocess_exec(
        command, *options, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def _ours(url: str) -> AsyncIterator[QuotaStore]:
    config = QuotasConfig(store="redis", url=url, timeout_s=TIMEOUT_S)
    store = RedisStore(links_of(config, {}), _prefix())
    try:
        async with asyncio.timeout(START_S):
            while not store.is_well:
                with contextlib.suppress(StoreUnavailable):
                    await store.renew([])
        yield store
    finally:
        await store.aclose()


class _Pool:
    """redis-py in the place of our connection: one that sends nothing twice."""

    is_cluster: Final = False
    timeout_ms: Final = int(TIMEOUT_S * 1000)
    server_ms: Final = -timeout_ms
    """So that calls have no time limit at the server, whose clock is not known here."""

    def __init__(self, url: str, connections: int) -> None:
        self.client = redis.asyncio.Redis.from_url(
            url, max_connections=connections, retry=Retry(NoBackoff(), 0), socket_timeout=TIMEOUT_S
        )

    def require_up(self) -> None:
        pass

    async def call(self, *words: Word) -> Any:
        return await self.client.execute_command(*words)  # type: ignore[no-untyped-call]

    def of(self, tenant: TenantId) -> RedisLink:
        return cast(RedisLink, self)

    def all(self) -> Iterable[RedisLink]:
        return (cast(RedisLink, self),)

    def tag_of(self, link: RedisLink) -> str:
        return "probe"

    async def follow(self, moved: Moved, tag: str, probe: Command) -> RedisLink:
        raise moved

    async def refresh(self) -> None:
        pass

    async def aclose(self) -> None:
        await self.client.aclose()


class _PooledStore(RedisStore):
    """One whose settlement is awaited, too, as each call through a pool is."""

    async def settle(self, reservation: ReservationId, used: Used) -> Settlement | None:  # type: ignore[override]
        held = self._held.pop(reservation)
        words = used.tokens, used.prompt, used.cached, used.completion
        reply = await self._run("settle", reservation, held.subjects, *words)
        return Settlement(reply[1], used.tokens)


@contextlib.asynccontextmanager
async def _pooled(url: str, connections: int) -> AsyncIterator[QuotaStore]:
    pool = _Pool(url, connections)
    await pool.client.script_load(SCRIPT)
    store = _PooledStore(pool, _prefix())
    try:
        yield store
    finally:
        await store.aclose()
