"""The cost of quotas and accounting to the gateway: a seat, a reservation and a settlement, in memory and in
Redis.

This process does what a gateway does for each request's quotas, from 1 caller and from many, and
nothing else; its CPU time is divided by the requests. Redis is a process of its own, started here unless
--redis names one. The third row sends the same calls through redis-py's pool of connections. The fourth sends
the same commands without a store, and looks at no answer: a caller that is alone pays for two turns of the
loop, four system calls and two wake-ups, which are dearer the longer it has waited, whatever it does with the
answers. The last row is a request without limits where billing lines are written: it is noted in Redis and
settled. Only this row waits for the note, so that the settlement follows its answer, as it does in a gateway.

The rows take turns, and each figure is a median of turns. Ratios and differences are taken within a turn, and
they alone mean anything elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, cast
from urllib.parse import urlsplit

import hiredis
import redis.asyncio
import uvloop
from msgspec import Struct
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.admission.memory_store import MemoryStore
from gateway.admission.quota import QuotaStore, ReservationId, Scope, Settlement, StoreUnavailable, Subject
from gateway.admission.redis_calls import SCRIPT
from gateway.admission.redis_store import RedisStore, open_store
from gateway.admission.usage import Payer, Used
from gateway.config.quotas import QuotaLimits
from gateway.config.redis import RedisConfig
from gateway.redis.link import Command, RedisLink, SlotMoved, packed
from gateway.service import collect_rarely
from shared.wire.ids import KeyId, TenantId
from tests.bench.figures import Figure, Target, at_most, figure, quantile
from tests.bench.gateway.redis_servers import redis_machine
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

POOL_RATIO_TARGET: Final = at_most(0.5)
"""CPU of our connection over that of redis-py's pool."""
ALONE_TARGET: Final = at_most(40)
"""CPU of a request whose caller is alone, in us."""
LOADED_TARGET: Final = at_most(12)
"""CPU of a request among many, in us."""
START_S: Final = 10.0
TIMEOUT_S: Final = 5.0
Request = Callable[[], AsyncIterator[None]]
"""Makes the calls of a request, one at each turn."""
_LIMITS: Final = QuotaLimits(10**9, 10**9, 10**6, None)
_TENANT: Final = TenantId("bench")
_PAYER: Final = Payer(_TENANT, KeyId("key"), "model")
_SUBJECTS: Final = (
    Subject(Scope.KEY, "key", _LIMITS, _TENANT),
    Subject(Scope.TENANT, _TENANT, _LIMITS, _TENANT),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000, help="requests of a turn")
    parser.add_argument("--turns", type=int, default=31, help="turns of each row")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 64], help="callers at once, a row each")
    parser.add_argument("--redis", metavar="URL", help="a server to use instead of one that is started")


async def run(options: argparse.Namespace) -> list[Figure]:
    def on_a_gateways_loop() -> list[Figure]:
        with _collecting_rarely(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options))

    return await asyncio.to_thread(on_a_gateways_loop)


async def _run(options: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    async with contextlib.AsyncExitStack() as stack:
        url = options.redis or (await stack.enter_async_context(redis_machine())).url
        ours = await stack.enter_async_context(_ours(url))
        stores: dict[str, QuotaStore] = {
            "memory": MemoryStore(),
            "Redis": ours,
            "Redis, redis-py's pool": await stack.enter_async_context(_pooled(url, max(options.callers))),
        }
        bare = await stack.enter_async_context(_bare(url, ours))
        rows = {name: _quotas(store) for name, store in stores.items()} | {"bare calls": bare.request}
        rows["no limits, noted"] = _notes(ours)
        for callers in options.callers:
            turns = await _in_turns(rows, callers, options)
            for name in rows:
                target = None if name != "Redis" else ALONE_TARGET if callers == 1 else LOADED_TARGET
                figures += _figures(f"{callers} callers: {name}", [turn[name] for turn in turns], target)
            figures += _compared(callers, turns)
    return figures


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """The garbage collector set as a gateway sets it, until this ends."""
    threshold = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


class _Row(Struct):
    """One measurement."""

    cpu_us: float
    """Per request."""
    wall_s: float
    latencies_s: list[float]
    """The calls of a request, each by itself."""

    @property
    def calls_per_s(self) -> float:
        return len(self.latencies_s) / self.wall_s


Turn = Mapping[str, _Row]


def _figures(name: str, rows: Sequence[_Row], target: Target | None) -> Iterable[Figure]:
    yield figure(f"{name}: CPU", median(row.cpu_us for row in rows), "us/request", target)
    yield figure(f"{name}: calls", median(row.calls_per_s for row in rows), "calls/s")
    for q in (0.5, 0.99):
        latency_us = median(1e6 * quantile(row.latencies_s, q) for row in rows)
        yield figure(f"{name}: call, p{q * 100:g}", latency_us, "us")


def _compared(callers: int, turns: Sequence[Turn]) -> Iterable[Figure]:
    pool = "Redis, redis-py's pool"
    ratio = median(turn["Redis"].cpu_us / turn[pool].cpu_us for turn in turns)
    yield figure(f"{callers} callers: Redis / redis-py's pool", ratio, "x", POOL_RATIO_TARGET)
    noted = median(turn["no limits, noted"].cpu_us / turn["Redis"].cpu_us for turn in turns)
    yield figure(f"{callers} callers: no limits, noted / Redis", noted, "x")
    for other in ("bare calls", "memory"):
        beyond_us = median(turn["Redis"].cpu_us - turn[other].cpu_us for turn in turns)
        yield figure(f"{callers} callers: Redis beyond {other}", beyond_us, "us/request")


async def _in_turns(rows: Mapping[str, Request], callers: int, options: argparse.Namespace) -> list[Turn]:
    for request in rows.values():
        await _measure(request, callers, 20 * callers)  # connections are made, code is warm
    turns: list[Turn] = []
    for turn in range(options.turns):
        order = list(rows)[:: -1 if turn % 2 else 1]
        turns.append({name: await _measure(rows[name], callers, options.requests) for name in order})
    return turns


async def _measure(request: Request, callers: int, requests: int) -> _Row:
    latencies_s: list[float] = []
    began_s, cpu_before_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_caller(request, requests // callers, latencies_s) for _ in range(callers)))
    cpu_s, wall_s = time.process_time() - cpu_before_s, time.perf_counter() - began_s
    return _Row(1e6 * cpu_s / (requests // callers * callers), wall_s, latencies_s)


async def _caller(request: Request, requests: int, latencies_s: list[float]) -> None:
    now = time.perf_counter
    for _ in range(requests):
        at = [now(), *[now() async for _ in request()]]
        latencies_s += [after - before for before, after in itertools.pairwise(at)]


def _quotas(store: QuotaStore) -> Request:
    """The calls of a request."""
    numbers = itertools.count()

    async def request() -> AsyncIterator[None]:
        name = ReservationId(f"bench-{next(numbers)}")
        for call in (
            lambda: store.enter(name, _SUBJECTS, needs_tokens=True),
            lambda: store.reserve(name, _SUBJECTS, 500, 500, _PAYER),
            lambda: store.settle(name, Used(prompt=200, completion=100)),
        ):
            if await call() is None:
                raise BenchFailed("a reservation was lost")
            yield

    return request


def _notes(store: RedisStore) -> Request:
    """The calls of a request without limits."""
    numbers = itertools.count()

    async def request() -> AsyncIterator[None]:
        name = ReservationId(f"noted-{next(numbers)}")
        noted = asyncio.get_running_loop().create_future()
        store.note(name, _PAYER, 500, noted.set_result)
        await noted
        yield
        if await store.settle(name, Used(prompt=200, completion=100)) is None:
            raise BenchFailed("a note was lost")
        yield

    return request


def _prefix() -> str:
    return f"bench-{uuid.uuid4().hex[:8]}"


# -- the stores -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _ours(url: str) -> AsyncIterator[RedisStore]:
    store = open_store(RedisConfig(url, timeout_s=TIMEOUT_S, key_prefix=_prefix()), {})
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
    deadline_ms: Final = 0
    """Calls have no time limit at the server, whose clock is not known here."""

    def __init__(self, url: str, connections: int) -> None:
        self.client = redis.asyncio.Redis.from_url(
            url, max_connections=connections, retry=Retry(NoBackoff(), 0), socket_timeout=TIMEOUT_S
        )

    def require_up(self) -> None:
        pass

    async def call(self, command: bytes) -> Any:
        pool = self.client.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(command)
            return await connection.read_response()
        finally:
            await pool.release(connection)

    def of(self, tenant: TenantId) -> RedisLink:
        return cast(RedisLink, self)

    def all(self) -> Iterable[RedisLink]:
        return (cast(RedisLink, self),)

    def tag_of(self, link: RedisLink) -> str:
        return "probe"

    async def follow(self, moved: SlotMoved, tag: str, probe: Command) -> RedisLink:
        raise moved

    async def refresh(self) -> None:
        pass

    async def aclose(self) -> None:
        await self.client.aclose()


class _PooledStore(RedisStore):
    """One whose settlement is awaited, too, as each call through a pool is."""

    async def settle(self, reservation: ReservationId, used: Used) -> Settlement | None:  # type: ignore[override]
        held = self._held.pop(reservation)
        command = self._calls_of(held.subjects).settle(reservation, 0, used, is_counted=True)
        reply = await self._ask(held.tenant, command)
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


class _Bare(asyncio.Protocol):
    """A connection over which the commands of a request go, and that looks at no answer."""

    def __init__(self, store: RedisStore) -> None:
        self._calls = store._calls_of(_SUBJECTS)
        self._row = store._row_of(_PAYER)
        self._reader = hiredis.Reader()
        self._waiting: deque[asyncio.Future[None] | None] = deque()
        """None for a settlement, for which nobody waits."""
        self._names = itertools.count()
        self._unsent = b""
        """The settlements, which leave with the next call."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            assert not isinstance(reply, hiredis.ReplyError), reply
            if (answered := self._waiting.popleft()) is not None:
                answered.set_result(None)

    async def request(self) -> AsyncIterator[None]:
        name = f"bare-{next(self._names)}"
        await self._asked(self._calls.enter(name, 0, 0, 1))
        yield
        await self._asked(self._calls.reserve(name, 0, 0, 500, 500, 500, self._row))
        yield
        self._waiting.append(None)
        self._unsent += self._calls.settle(name, 0, Used(prompt=200, completion=100), is_counted=True)
        yield

    async def settled(self) -> None:
        """Send the last settlements, and wait for them."""
        await self._asked(packed(("PING",)))

    def _asked(self, command: bytes) -> asyncio.Future[None]:
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        self._transport.write(self._unsent + command)
        self._unsent = b""
        return answered


@contextlib.asynccontextmanager
async def _bare(url: str, store: RedisStore) -> AsyncIterator[_Bare]:
    at = urlsplit(url)
    if at.scheme != "redis" or at.password:
        raise BenchFailed("--redis: a server without TLS and without a password is needed")
    loop = asyncio.get_running_loop()
    transport, bare = await loop.create_connection(
        lambda: _Bare(store), at.hostname or "localhost", at.port or 6379
    )
    try:
        yield bare
        await bare.settled()
    finally:
        transport.close()
