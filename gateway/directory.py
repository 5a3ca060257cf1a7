"""Who may call and what they may use, as the configuration says; read again when its file changes.

A revoked key is refused within `POLL_S` of the file's change (or at SIGHUP, at once), everywhere the
file is. Requests that were let in before are not cut off.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from gateway.config import GatewayConfig, load
from gateway.identity.keys import KeyTable
from gateway.identity.tenant import TenantPolicy
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.config import ConfigError

POLL_S: Final = 1.0
assert POLL_S <= 5, "a revoked key is refused within five seconds"

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Directory:
    keys: KeyTable
    tenants: TenantPolicy

    @classmethod
    def of(cls, config: GatewayConfig) -> Self:
        return cls(KeyTable(config.keys), TenantPolicy(config.models, config.tenants, config.tiers))


class DirectoryReader:
    """`now` is the newest directory that could be read. A file that is wrong changes nothing."""

    def __init__(self, config: GatewayConfig, path: Path | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.now = Directory.of(config)
        self._config = config
        self._path = path
        self._clock = clock
        self._seen = self._version()

    def reload(self) -> None:
        """Read the file again, changed or not."""
        if self._path is None:
            return
        self._seen = self._version()
        try:
            config = load(self._path, os.environ)
        except ConfigError as error:
            log.error("config.rejected", path=self._path, problems=list(error.problems))
            return
        taken = replace(self._config, keys=config.keys, tenants=config.tenants, tiers=config.tiers)
        if taken != config:
            log.warning("config.restart_needed", path=self._path, read="keys, tenants and tiers alone")
        self._config = taken
        self.now = Directory.of(taken)
        log.info("config.reloaded", path=self._path, keys=len(config.keys), tenants=len(config.tenants))

    async def watch(self) -> None:
        """Look at the file again and again, until cancelled."""
        while self._path is not None:
            await self._clock.sleep(POLL_S)
            if self._version() != self._seen:
                self.reload()

    def _version(self) -> tuple[int, int, int] | None:
        """Changes whenever the file does, a replaced one too."""
        try:
            stat = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)
