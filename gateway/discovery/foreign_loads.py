"""The metrics of engines of other makes, asked for at intervals: their queue counts as load.

Off the requests' path, and bounded: each engine is asked alone, for no longer than an interval and for no
more than `EXPOSITION_LEN_MAX` bytes, and one that tells nothing is left alone for `RETRY_S`. So one that is
slow, or that answers nonsense, costs its own report and nobody else's.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

import msgspec

from gateway.config.whole import ModelConfig
from gateway.relay.engines import Engines
from gateway.relay.upstream import Credentials, Outbound, Upstream
from gateway.routing.exposition import EXPOSITION_LEN_MAX, parse_exposition
from gateway.routing.replicas import Replica, Replicas
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.errors import ApiError
from shared.wire.load_report import LoadReport

METRICS_PATH: Final = "/metrics"
RETRY_S: Final = 60.0
"""The time after which an engine that told nothing is asked again, in seconds."""
AT_ONCE_MAX: Final = 32
"""The engines that are asked at one time."""

INTERVAL_S: Final = 1.0
"""The time between two reports of an engine, in seconds."""

log = logs.get(__name__)


class ForeignLoads:
    """Asks the engines of other makes for their metrics."""

    def __init__(
        self,
        models: tuple[ModelConfig, ...],
        engines: Engines,
        replicas: Replicas,
        upstream: Upstream,
        credentials: Credentials,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`credentials` are shown for the metrics as well: llama.cpp's server has a key for them, too."""
        self._models: Final = models
        self._engines: Final = engines
        self._replicas: Final = replicas
        self._upstream: Final = upstream
        self._credentials: Final = credentials
        self._clock: Final = clock
        self._mute_until_s: dict[str, float] = {}
        """When an engine that told nothing is asked again, by its URL."""

    async def watch(self) -> None:
        """Ask all of them at every interval, until cancelled."""
        while True:
            await self._clock.sleep(INTERVAL_S)
            await self.ask()

    async def ask(self) -> None:
        """Ask each engine once that is due."""
        now_s, limit = self._clock.monotonic(), asyncio.Semaphore(AT_ONCE_MAX)
        found = {
            replica.url: (replica, model)
            for model in self._models
            if self._engines.of(model).is_foreign
            for replica in self._replicas.members(model.name)
        }
        self._mute_until_s = {url: at_s for url, at_s in self._mute_until_s.items() if url in found}
        due = [one for url, one in found.items() if self._mute_until_s.get(url, now_s) <= now_s]
        await asyncio.gather(*(self._ask_one(*one, limit) for one in due))

    async def _ask_one(self, replica: Replica, model: ModelConfig, limit: asyncio.Semaphore) -> None:
        async with limit:
            report = None
            try:
                async with asyncio.timeout(INTERVAL_S):
                    report = await self._fetched(replica, model)
            except (ApiError, TimeoutError) as error:
                log.debug("engine.metrics_failed", replica=replica.id, error=type(error).__name__)
        if report is None:
            self._mute_until_s[replica.url] = self._clock.monotonic() + RETRY_S
        else:
            interval_ms = int(1000 * INTERVAL_S)
            self._replicas.observe(replica, msgspec.structs.replace(report, interval_ms=interval_ms))

    async def _fetched(self, replica: Replica, model: ModelConfig) -> LoadReport | None:
        request = Outbound("GET", METRICS_PATH, self._credentials.headers(model))
        answer = await self._upstream.send(replica.protocol, replica.url, request, INTERVAL_S)
        try:
            if answer.status != HTTPStatus.OK:
                return None
            text = await answer.read_all(EXPOSITION_LEN_MAX)
        finally:
            await answer.aclose()
        return parse_exposition(text, replica.view.uncounted)
