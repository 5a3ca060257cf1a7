"""`python -m tests.bench outages`: what callers notice of an outage of the Redis that keeps the quotas.

Two gateways are before one paced engine and one Redis: with `fail = "closed"` and with `fail = "local"`. Each
gets short requests at a steady rate, and some streams that are open all the time. After a while Redis is
killed, stopped, cut off, slow..., and later it is what it was. Asked is what gateway/README.md states:

- The answers are 200; from the closed gateway also 503, from the outage until the recovery.
- A request waits at most `timeout_s` (50 ms) longer than others, and only while the outage is not known yet.
- `/readyz` and the metric of the store tell how it is.
- The gateways use Redis again within 5 s of the outage's end, without a restart.
- Streams run on, and every token that was answered is counted: once, and in the end in Redis. Where Redis has
  lost its memory, that cannot be asked.

*Slowed*: requests that took longer than the slowest before the outage by half of `timeout_s` or more. Those
that were sent when the outage was known already are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

import httpx
import msgspec

from gateway.config.quotas import QuotaFail, QuotasConfig
from gateway.config.redis import RedisConfig
from gateway.directory.development import development_config, development_key
from shared.wire.usage_report import UsageReport
from tests.bench.client import ApiServer, TimedRequest
from tests.bench.figures import Figure, at_most, figure
from tests.bench.gateway.cable import Cable
from tests.bench.gateway.paced_engine import MODEL, PROMPT_TOKENS
from tests.bench.gateway.pacing import at_a_rate
from tests.bench.gateway.redis_servers import PRIMARY, Group, RedisMachine, redis_machine, sentinel_group
from tests.bench.gateway.subjects import LIMITS, Engine, gateway_of, paced_engine
from tests.bench.services import free_port
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

INTERVAL_MS: Final = 50.0
STREAMS: Final = 10
EVENTS: Final = 220
"""Events of each stream, which so is open for eleven seconds."""
TOKENS: Final = 4
"""Tokens of each short answer."""
RATE: Final = 40
"""Short requests per second to each gateway."""
BEFORE_S: Final = 3.0
OUTAGE_S: Final = 3.0
AFTER_S: Final = 6.0
KNOWN_S: Final = 0.25
"""The time from which on every request knows of the outage: one has met it, and waited for its answer."""
PATIENCE_S: Final = 30.0
LOOKS_PER_S: Final = 10
NOTICED_S: Final = 1.0
RECOVERED_S: Final = 5.0
HICCUPS: Final = 0.02
"""The share of requests that may meet a Redis that is late by itself: a busy machine's."""
LATE_S: Final = 0.5
"""The delay of the answers of a slow Redis."""
TIMEOUT_S: Final = RedisConfig().timeout_s
MODES: Final[tuple[QuotaFail, ...]] = ("closed", "local")
_STORE_UP: Final = "penstock_gateway_quota_store_up"


@dataclass(slots=True)
class Place:
    """Redis, and the way to it."""

    redis: RedisMachine
    cable: Cable | None = None
    group: Group | None = None

    @property
    def config(self) -> RedisConfig:
        if self.group is not None:
            return RedisConfig(self.group.url, sentinel=PRIMARY)
        port = self.redis.port if self.cable is None else self.cable.port
        return RedisConfig(f"redis://127.0.0.1:{port}")


@dataclass(frozen=True, slots=True)
class Outage:
    """`strike` begins it. `end` returns when Redis is well again."""

    name: str
    strike: Callable[[Place], Awaitable[object]]
    end: Callable[[Place], Awaitable[object]]
    seconds: float = OUTAGE_S
    """Its length; it is longer where `end` takes time."""
    keeps: bool = True
    """True if Redis remembers what it knew."""
    is_noticed: bool = True
    """False where it may be too short for that."""
    has_cable: bool = False
    has_group: bool = False


def _signals(number: signal.Signals) -> Callable[[Place], Awaitable[None]]:
    async def send(place: Place) -> None:
        place.redis.send(number)

    return send


def _asks(*words: str | int) -> Callable[[Place], Awaitable[object]]:
    async def ask(place: Place) -> object:
        return await place.redis.ask(*words)

    return ask


async def _nothing(_: Place) -> None:
    pass


async def _kill(place: Place) -> None:
    place.redis.kill()


async def _start(place: Place) -> None:
    await place.redis.start()


async def _cut(place: Place) -> None:
    assert place.cable is not None
    place.cable.cut()


async def _mend(place: Place) -> None:
    assert place.cable is not None
    place.cable.mend()


def _delays(seconds: float) -> Callable[[Place], Awaitable[None]]:
    async def delay(place: Place) -> None:
        assert place.cable is not None
        place.cable.delay_s = seconds

    return delay


async def _failed_over(place: Place) -> None:
    assert place.group is not None
    await place.group.failed_over()


OUTAGES: Final = (
    Outage("no outage", _nothing, _nothing, is_noticed=False),
    Outage("killed", _kill, _start, keeps=False),
    Outage("restarted empty", _kill, _start, seconds=0.0, keeps=False, is_noticed=False),
    Outage("stopped", _signals(signal.SIGSTOP), _signals(signal.SIGCONT)),
    Outage("paused", _asks("CLIENT", "PAUSE", int(OUTAGE_S * 1000)), _nothing),
    Outage("read-only", _asks("REPLICAOF", "127.0.0.1", 1), _asks("REPLICAOF", "NO", "ONE")),
    Outage("full", _asks("CONFIG", "SET", "maxmemory", 1), _asks("CONFIG", "SET", "maxmemory", 0)),
    Outage("cut off", _cut, _mend, has_cable=True),
    Outage("answers 500 ms late", _delays(LATE_S), _delays(0.0), has_cable=True),
    Outage("failed over", _kill, _failed_over, seconds=0.0, keeps=False, has_group=True),
)


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a gateway as it tells it itself."""

    at: float
    is_ready: bool
    is_up: bool
    """The metric of the store."""


@dataclass(slots=True)
class Subject:
    """A gateway, what it was asked, and how it was. Times are seconds on `time.perf_counter`."""

    mode: QuotaFail
    server: ApiServer
    url: str
    admin_url: str
    operator: httpx.AsyncClient
    requests: list[TimedRequest] = field(default_factory=list)
    streams: list[TimedRequest] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    _before: int = 0
    """Tokens of the answers of before the measurement."""

    def is_warm(self) -> None:
        """Forget the first requests of the process, which take longer than others; but not their tokens."""
        self._before = self.answered
        self.requests.clear()

    async def ask(self) -> None:
        self.requests.append(await self._asked(TOKENS, stream=False))

    async def stream(self) -> None:
        self.streams.append(await self._asked(EVENTS, stream=True))

    async def _asked(self, max_tokens: int, *, stream: bool) -> TimedRequest:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What does a penstock feed?"}],
            "max_tokens": max_tokens,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        connection = await self.server.connect()
        try:
            return await connection.exchange(
                self.server.request("/chat/completions", msgspec.json.encode(body)), PATIENCE_S
            )
        finally:
            connection.close()

    async def look(self) -> None:
        at = time.perf_counter()
        asked = f"{self.url}/readyz", f"{self.admin_url}/metrics"
        ready, metrics = await asyncio.gather(*map(self.operator.get, asked))
        value = next(
            line.split()[1] for line in metrics.text.splitlines() if line.startswith(f"{_STORE_UP} ")
        )
        self.looks.append(Look(at, ready.status_code == HTTPStatus.OK, float(value) == 1.0))

    @property
    def answered(self) -> int:
        """Tokens of the answers and their prompts."""
        answers = [one.usage for one in self.requests if one.status == HTTPStatus.OK]
        usages = [usage for usage in answers if usage is not None]
        streamed = sum(PROMPT_TOKENS + len(one.event_times) for one in self.streams)
        return self._before + streamed + sum(one.prompt_tokens + one.completion_tokens for one in usages)

    async def counted(self) -> int:
        """Tokens that the gateway says that its tenants used."""
        answer = (await self.operator.get(f"{self.admin_url}/admin/v1/usage")).raise_for_status()
        return sum(row.total_tokens for row in msgspec.json.decode(answer.content, type=UsageReport).rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [outage.name for outage in OUTAGES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="OUTAGE", help=str(names))


async def run(options: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    async with paced_engine(INTERVAL_MS) as engine:
        for outage in OUTAGES:
            if outage.name in options.only:
                figures += await _measure(outage, engine)
    return figures


async def _measure(outage: Outage, engine: Engine) -> list[Figure]:
    """One outage, of a Redis and at gateways of its own."""
    async with contextlib.AsyncExitStack() as stack:
        place = await stack.enter_async_context(_place(outage))
        subjects = [await stack.enter_async_context(_gateway(mode, place, engine)) for mode in MODES]
        struck_s, ended_s = await _load(outage, place, subjects)
        figures: list[Figure] = []
        for subject in subjects:
            uncounted = await _uncounted(subject) if outage.keeps else 0
            figures += figures_of(outage, subject.mode, seen(subject, struck_s, ended_s, uncounted))
    return figures


@contextlib.asynccontextmanager
async def _place(outage: Outage) -> AsyncIterator[Place]:
    async with contextlib.AsyncExitStack() as stack:
        if outage.has_group:
            group = await stack.enter_async_context(sentinel_group())
            yield Place(group.primary, group=group)
            return
        redis = await stack.enter_async_context(redis_machine())
        cable = await stack.enter_async_context(Cable(redis.port)) if outage.has_cable else None
        yield Place(redis, cable)


@contextlib.asynccontextmanager
async def _gateway(mode: QuotaFail, place: Place, engine: Engine) -> AsyncIterator[Subject]:
    port, admin_port, key, admin_key = free_port(), free_port(), development_key(), development_key()
    config = development_config(
        port=port,
        key=key,
        model=MODEL,
        engine_url=engine.url,
        limits=LIMITS,
        admin=(admin_port, admin_key),
    )
    redis = replace(place.config, key_prefix=f"bench-{mode}")
    config = replace(config, redis=redis, quotas=QuotasConfig("redis", fail=mode, gateways=len(MODES)))
    url, admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
    server = ApiServer(f"{url}/v1", key)
    headers = {"authorization": f"Bearer {admin_key}"}
    async with (
        gateway_of(config, server, f"{url}/readyz"),
        httpx.AsyncClient(trust_env=False, headers=headers, timeout=PATIENCE_S) as operator,
    ):
        yield Subject(mode, server, url, admin_url, operator)


async def _load(outage: Outage, place: Place, subjects: Sequence[Subject]) -> tuple[float, float]:
    """Send the load, strike, and end the outage. Returns when both were, on `time.perf_counter`."""
    for _ in range(RATE):
        await asyncio.gather(*(subject.ask() for subject in subjects))
    for subject in subjects:
        subject.is_warm()
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for subject in subjects:
            for _ in range(STREAMS):
                group.create_task(subject.stream())
            group.create_task(at_a_rate(RATE, subject.ask, over))
            group.create_task(at_a_rate(LOOKS_PER_S, subject.look, over))
        await asyncio.sleep(BEFORE_S)
        struck_s = time.perf_counter()
        await outage.strike(place)
        await asyncio.sleep(outage.seconds)
        await outage.end(place)
        ended_s = time.perf_counter()
        await asyncio.sleep(AFTER_S)
        over.set()
    return struck_s, ended_s


async def _uncounted(subject: Subject) -> int:
    """The tokens that were answered and are not counted, when that has come to rest. Less than zero: more
    were counted."""
    deadline_s = time.perf_counter() + PATIENCE_S
    while (difference := subject.answered - await subject.counted()) != 0:
        if time.perf_counter() > deadline_s:
            break
        await asyncio.sleep(1 / LOOKS_PER_S)
    return difference


# -- what was seen --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """The experience of one gateway's callers and operators."""

    requests: int
    unstated: int
    """Answers that gateway/README.md does not state."""
    without: int
    """Answers 503, as they are given without Redis."""
    without_otherwise: float
    """The share of the requests that were answered so before the outage, or when it was over."""
    longest_beyond_ms: float
    """The longest time that a request took from the outage until it was over, beyond that of before."""
    slowed: int
    slowed_late: int
    """The slowed requests that were sent when the outage was known."""
    noticed_s: float
    """The time from the outage until the metric said so. NaN: it never did."""
    dishonest: int
    """Looks at `/readyz` that said otherwise than the metric."""
    recovered_s: float
    """The time from its end until requests, and the metric, were again as before."""
    cut: int
    uncounted: int


def seen(subject: Subject, struck_s: float, ended_s: float, uncounted: int) -> Seen:
    """The sums of what a gateway answered; the outage was between the two times."""
    may_refuse = subject.mode == "closed"
    refused = [one for one in subject.requests if one.status == HTTPStatus.SERVICE_UNAVAILABLE]
    others = [
        one for one in subject.requests if one.status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE)
    ]
    served = [one.sent_at for one in subject.requests if one.status == HTTPStatus.OK]
    served_again_s, up_again_s = (
        next((at for at in times if at >= ended_s), math.inf)
        for times in (served, [look.at for look in subject.looks if look.is_up])
    )
    over_s = max(served_again_s, up_again_s)
    took = {one.sent_at: one.ended_at - one.sent_at for one in subject.requests}
    usual_s = max(took_s for sent_at, took_s in took.items() if sent_at < struck_s - TIMEOUT_S)
    meanwhile = {at: took_s for at, took_s in took.items() if struck_s - TIMEOUT_S <= at <= over_s}
    slowed = [at for at, took_s in meanwhile.items() if took_s >= usual_s + TIMEOUT_S / 2]
    otherwise = [one for one in refused if one.ended_at < struck_s or one.sent_at > over_s]
    return Seen(
        requests=len(took),
        unstated=len(others) + (0 if may_refuse else len(refused)),
        without=len(refused),
        without_otherwise=len(otherwise) / len(took),
        longest_beyond_ms=1000 * (max(meanwhile.values(), default=0.0) - usual_s),
        slowed=len(slowed),
        slowed_late=sum(at > struck_s + KNOWN_S for at in slowed),
        noticed_s=next(
            (look.at - struck_s for look in subject.looks if look.at >= struck_s and not look.is_up), math.nan
        ),
        dishonest=sum(
            look.is_ready != (look.is_up or not may_refuse)
            for before, look, after in zip(subject.looks, subject.looks[1:], subject.looks[2:], strict=False)
            if before.is_up == look.is_up == after.is_up
        ),
        recovered_s=over_s - ended_s,
        cut=sum(not one.saw_done for one in subject.streams),
        uncounted=uncounted,
    )


def figures_of(outage: Outage, mode: QuotaFail, one: Seen) -> Iterator[Figure]:
    """The figures of one outage at one gateway."""
    name = f"{outage.name}, {mode}"
    yield figure(f"{name}: requests", one.requests, "requests")
    yield figure(f"{name}: answers that are not stated", one.unstated, "requests", at_most(0))
    if mode == "closed":
        yield figure(f"{name}: answers 503", one.without, "requests")
        yield figure(f"{name}: answers 503 before or after", one.without_otherwise, "share", at_most(HICCUPS))
    longest = at_most(1000 * TIMEOUT_S)
    yield figure(f"{name}: longest beyond the longest before", one.longest_beyond_ms, "ms", longest)
    yield figure(f"{name}: slowed", one.slowed, "requests")
    yield figure(f"{name}: slowed when it was known", one.slowed_late, "requests", at_most(0))
    if outage.is_noticed:
        yield figure(f"{name}: in the metric after", one.noticed_s, "s", at_most(NOTICED_S))
    yield figure(f"{name}: /readyz otherwise than stated", one.dishonest, "looks", at_most(0))
    yield figure(f"{name}: recovered after", one.recovered_s, "s", at_most(RECOVERED_S))
    yield figure(f"{name}: streams that ended early", one.cut, "streams", at_most(0))
    if outage.keeps:
        yield figure(f"{name}: tokens counted otherwise", abs(one.uncounted), "tokens", at_most(0))
