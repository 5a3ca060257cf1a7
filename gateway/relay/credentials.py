"""The gateway's credentials towards engines that ask for a key: one per model, from the environment or a
file.

Rule: never in a log, an error or a `repr`. The caller's key is no credential here, and goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from gateway.config.secret import RenewableSecret
from gateway.config.whole import ModelConfig
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.config import ConfigError

POLL_S: Final = 1.0
"""The time between two looks at the files, in seconds. No request waits for a disk."""


class Credentials:
    """The tokens by model."""

    __slots__ = ("_by_model", "_clock", "_files")

    def __init__(
        self, models: Iterable[ModelConfig], env: Mapping[str, str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Raises ConfigError, which lists all problems."""
        self._clock: Final = clock
        self._by_model: Final[dict[str, RenewableSecret]] = {}
        self._files: Final[dict[str, RenewableSecret]] = {}
        """Those that may be renewed, by their file, which models may share."""
        problems: list[str] = []
        for model in models:
            variable, file = model.api_key_env, model.api_key_file
            try:
                secret = RenewableSecret(variable, file, env)
            except ValueError as error:
                problems.append(f"models.{model.name}: {error}")
                continue
            self._by_model[model.name] = secret if file is None else self._files.setdefault(file, secret)
        if problems:
            raise ConfigError(problems)

    async def watch(self) -> None:
        """Read the files again and again, until cancelled. Returns where there are none."""
        while self._files:
            await self._clock.sleep(POLL_S)
            for secret in self._files.values():
                await secret.now()

    def headers(self, model: ModelConfig) -> tuple[tuple[bytes, bytes], ...]:
        """The headers for requests to this model's replicas; empty without a token."""
        secret = self._by_model.get(model.name)
        if secret is None or secret.text is None:
            return ()
        return ((b"authorization", f"Bearer {secret.text}".encode()),)
