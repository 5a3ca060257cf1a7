"""The configuration that workers start with: the newest that was accepted.

Rules:

1. The supervisor follows the file as each worker does (`gateway.directory.accounts`), by the same rules, and
   is told of it when they are. A file with mistakes changes nothing: whatever was accepted before it stays,
   such as the revocation of a key, and else the configuration of the supervisor's start.
2. A worker starts with that, and reads the file again before it listens (`gateway.app`). So what it says is
   never older than what the workers beside it go by, nor than a change that was made while it started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gateway.config.whole import GatewayConfig
from gateway.directory.accounts import AccountsReader
from gateway.identity.caller import Identity
from gateway.identity.jwks import KeySources
from gateway.identity.keys import KeyTable
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.files import FileVersion
from shared.process.setting_values import to_toml
from shared.wire.ids import TenantId


class Accepted:
    """The newest configuration that was accepted."""

    def __init__(
        self,
        config: GatewayConfig,
        path: Path,
        clock: Clock = SYSTEM_CLOCK,
        *,
        seen: FileVersion | None = None,
    ) -> None:
        """`config` is that of the supervisor's start, and `seen` the version of its file. Raises ConfigError
        where an issuer's keys cannot be read from their file."""
        self._sources: Final = KeySources(clock)
        self._reader: Final = AccountsReader(config, path, clock, self._checked, seen=seen)

    async def text(self) -> str:
        """The newest configuration as TOML."""
        return await asyncio.to_thread(to_toml, self._reader.config)

    async def reload(self) -> None:
        """Read the file again, changed or not."""
        await self._reader.reload()

    async def watch(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        await self._reader.watch()

    def _checked(self, config: GatewayConfig, keys: KeyTable, _: Iterable[TenantId]) -> Identity:
        """The keys alone: no caller is identified here. Refused is what workers refuse: an issuer's file that
        cannot be read."""
        self._sources.of(config.issuers)
        return keys
