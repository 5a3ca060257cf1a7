"""`GET /admin/v1/engines`: the engines' own figures, read from their metrics over the hop, for operators.

Rules:

1. Engines are asked only while somebody looks, or once a minute for `gateway.operators.overview`, and at most
   once in `EVERY_S`, however many look: whoever asks meanwhile is given what was read last, or waits for the
   reading that is under way.
2. Each engine is asked alone, for no longer than `ASK_S` and for no more bytes than an exposition has: one
   that is slow or answers nonsense costs its own figures. At most `ENGINES_MAX` are asked, by id.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.operators.figures import SAMPLE_AGE_MAX_S, EngineFigures, Sample, figures, parse_sample
from gateway.operators.operations import Asks, Operation, OperatorRequest
from gateway.operators.versions import Versions
from gateway.relay.upstream import Outbound, Upstream
from gateway.routing.exposition import EXPOSITION_LEN_MAX
from gateway.routing.replicas import Replica, Replicas
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import ApiError, forget_frames

ENGINES: Final = "/admin/v1/engines"
METRICS_PATH: Final = "/metrics"
EVERY_S: Final = 1.0
ASK_S: Final = 2.0
AT_ONCE_MAX: Final = 16
ENGINES_MAX: Final = 256


class EngineView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine as operators see it."""

    id: str
    models: list[str]
    phase: str
    health: str
    requests: int
    """The requests of this process that are there."""
    figures: EngineFigures | None = None
    """None where it did not tell any."""
    problem: str | None = None
    """Why it did not."""


class EnginesView(Struct, frozen=True):
    """All engines."""

    data: tuple[EngineView, ...]
    age_ms: float
    """How long ago they were asked."""
    has_more: bool
    """True if there are more than are asked."""


class _Last(Struct, frozen=True):
    sample: Sample
    at_s: float


class EnginesApi:
    """The handler."""

    def __init__(self, replicas: Replicas, upstream: Upstream, clock: Clock = SYSTEM_CLOCK) -> None:
        self._replicas: Final = replicas
        self._upstream: Final = upstream
        self._clock: Final = clock
        self._versions: Final = Versions()
        self._last: dict[str, _Last] = {}
        """The samples that were taken last, by the engines' URLs."""
        self._views: tuple[EngineView, ...] = ()
        self._has_more = False
        self._read_at_s: float | None = None
        self._reading: Final = asyncio.Lock()

    @Operation(
        f"GET {ENGINES}", "Tell the engines' own figures.", EnginesView, is_watched=True, asks=Asks.ONE
    )
    async def _answer(self, asked: OperatorRequest) -> web.Response:
        """Where the figures are the same, their age is not told anew."""
        views = await self.views()
        age_ms = round((self._clock.monotonic() - (self._read_at_s or 0.0)) * 1e3, 1)
        body = msgspec.json.encode(EnginesView(views, age_ms, self._has_more))
        return self._versions.told(asked.request, body, msgspec.json.encode((views, self._has_more)))

    async def views(self) -> tuple[EngineView, ...]:
        """The engines as they were read last, which is `EVERY_S` ago at most."""
        async with self._reading:
            if self._read_at_s is None or self._clock.monotonic() - self._read_at_s >= EVERY_S:
                await self._read()
        return self._views

    async def _read(self) -> None:
        """Ask them all once."""
        found = sorted(self._replicas.members(), key=lambda replica: replica.id)
        self._has_more = len(found) > ENGINES_MAX
        found = found[:ENGINES_MAX]
        limit = asyncio.Semaphore(AT_ONCE_MAX)
        self._views = tuple(await asyncio.gather(*(self._view(replica, limit) for replica in found)))
        urls = {replica.url for replica in found}
        self._last = {url: last for url, last in self._last.items() if url in urls}
        self._read_at_s = self._clock.monotonic()

    async def _view(self, replica: Replica, limit: asyncio.Semaphore) -> EngineView:
        told: EngineFigures | None = None
        problem: str | None = None
        async with limit:
            try:
                async with asyncio.timeout(ASK_S):
                    told = await self._figures(replica)
                problem = None if told is not None else "It tells no figures: it is of another make."
            except ApiError as error:
                problem = f"It did not answer: {error.code}."
                forget_frames(error)
            except TimeoutError:
                problem = f"It did not answer within {ASK_S:g} s."
        return EngineView(
            id=replica.id,
            models=sorted(replica.standings),
            phase=replica.phase.value,
            health=replica.health.phase.value,
            requests=replica.view.requests,
            figures=told,
            problem=problem,
        )

    async def _figures(self, replica: Replica) -> EngineFigures | None:
        """Raises ApiError."""
        request = Outbound("GET", METRICS_PATH, ())
        answer = await self._upstream.send(replica.protocol, replica.url, request, ASK_S)
        try:
            text = await answer.read_all(EXPOSITION_LEN_MAX) if answer.status == HTTPStatus.OK else b""
        finally:
            await answer.aclose()
        if not (sample := parse_sample(text)):
            return None
        now_s, before = self._clock.monotonic(), self._last.get(replica.url)
        self._last[replica.url] = _Last(sample, now_s)
        if before is None or not 0 < now_s - before.at_s <= SAMPLE_AGE_MAX_S:
            return figures(sample)
        return figures(sample, before.sample, now_s - before.at_s)
