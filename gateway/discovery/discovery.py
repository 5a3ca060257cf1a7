"""The sources of all models whose replicas are discovered, as background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final

from gateway.config.discovery import DiscoveryConfig
from gateway.config.whole import ModelConfig
from gateway.discovery.dns import DnsSource
from gateway.discovery.kubernetes import KubernetesSource
from gateway.discovery.source import AGE, Source, SourceProgress
from gateway.routing.replicas import Replicas
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.setting_values import ConfigError

FIRST_S: Final = 10.0
"""The time for which a start waits for all sources, in seconds."""


class Discovery:
    """The sources, by model. Raises ConfigError."""

    def __init__(
        self,
        models: Iterable[ModelConfig],
        replicas: Replicas,
        env: Mapping[str, str],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock: Final = clock
        self._sources: Final[list[tuple[SourceProgress, Source]]] = []
        problems: list[str] = []
        for model in models:
            if model.discovery is None:
                continue
            progress = SourceProgress(model.name, partial(replicas.list_members, model.name), clock)
            try:
                self._sources.append((progress, _source(model.discovery, env, clock)))
            except ConfigError as error:
                problems += (f"models.{model.name}.discovery.{problem}" for problem in error.problems)
        if problems:
            raise ConfigError(problems)
        AGE.set_function(self.ages)

    def works(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The background tasks, by name."""
        return {
            f"replicas of {progress.model}": partial(source.watch, progress)
            for progress, source in self._sources
        }

    async def first(self) -> None:
        """Wait until every source has succeeded once, though not for long."""
        waits = [asyncio.ensure_future(progress.first.wait()) for progress, _ in self._sources]
        if waits:
            _, late = await asyncio.wait(waits, timeout=FIRST_S)
            for wait in late:
                wait.cancel()

    def ages(self) -> dict[tuple[object, ...], float]:
        """The seconds since each model's members were last confirmed, for those that ever were."""
        now_s = self._clock.monotonic()
        return {
            (progress.model,): now_s - progress.well_at_s
            for progress, _ in self._sources
            if progress.well_at_s is not None
        }


def _source(config: DiscoveryConfig, env: Mapping[str, str], clock: Clock) -> Source:
    if config.kubernetes is not None:
        return KubernetesSource(config, env, clock)
    return DnsSource(config, clock=clock)
