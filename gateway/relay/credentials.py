"""The gateway's credentials towards engines that ask for a key: one per model, from the environment or a
file.

Rule: never in a log, an error or a `repr`. The caller's key is no credential here, and goes nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from gateway.config import ModelConfig
from shared.config import ConfigError

TOKEN_LEN_MAX: Final = 8 * 1024
"""Characters; some tokens hold a whole certificate's worth of claims."""
_TOKEN: Final = re.compile(rf"[!-~]{{1,{TOKEN_LEN_MAX}}}")


class Credentials:
    """The tokens by model, read once: a new one takes a restart. Raises ConfigError, which lists all
    problems."""

    __slots__ = ("_by_model",)

    def __init__(self, models: Iterable[ModelConfig], env: Mapping[str, str]) -> None:
        self._by_model: Final[dict[str, str]] = {}
        problems: list[str] = []
        for model in models:
            try:
                if (token := _read(model, env)) is not None:
                    self._by_model[model.name] = token
            except ValueError as error:
                problems.append(f"models.{model.name}: {error}")
        if problems:
            raise ConfigError(problems)

    def headers(self, model: ModelConfig) -> tuple[tuple[bytes, bytes], ...]:
        """The headers for requests to this model's replicas; empty without a token."""
        token = self._by_model.get(model.name)
        return () if token is None else ((b"authorization", f"Bearer {token}".encode()),)


def _read(model: ModelConfig, env: Mapping[str, str]) -> str | None:
    """Raises ValueError; its message is for the operator, and does not show the token."""
    if model.api_key_env is not None:
        where, text = f"the environment variable {model.api_key_env}", env.get(model.api_key_env, "")
    elif model.api_key_file is not None:
        where = model.api_key_file
        try:
            text = Path(where).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read: {type(error).__name__}") from None
    else:
        return None
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{where} holds no key")
    return token
