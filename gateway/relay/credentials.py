"""The gateway's credentials towards engines that ask for a key: one per model, from the environment or a
file.

Rule: never in a log, an error or a `repr`. The caller's key is no credential here, and goes nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from gateway.config import ModelConfig
from gateway.secret import read_secret
from shared.config import ConfigError


class Credentials:
    """The tokens by model, read once: a new one takes a restart. Raises ConfigError, which lists all
    problems."""

    __slots__ = ("_by_model",)

    def __init__(self, models: Iterable[ModelConfig], env: Mapping[str, str]) -> None:
        self._by_model: Final[dict[str, str]] = {}
        problems: list[str] = []
        for model in models:
            try:
                if (token := read_secret(model.api_key_env, model.api_key_file, env)) is not None:
                    self._by_model[model.name] = token
            except ValueError as error:
                problems.append(f"models.{model.name}: {error}")
        if problems:
            raise ConfigError(problems)

    def headers(self, model: ModelConfig) -> tuple[tuple[bytes, bytes], ...]:
        """The headers for requests to this model's replicas; empty without a token."""
        token = self._by_model.get(model.name)
        return () if token is None else ((b"authorization", f"Bearer {token}".encode()),)
