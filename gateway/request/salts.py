"""The salts that keep tenants' cached prefixes apart at engines of other makes.

Rules:

1. Two tenants never have the same salt, whatever they ask for. A caller's own salt narrows its tenant's.
2. Nobody can compute one without the secret: who reaches such an engine by another way shares nothing.
3. The same secret gives the same salts: gateways before the same engines are given one, or what one of them
   had cached is not found through another.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from gateway.config.edge import HopConfig
from gateway.config.secret import read_secret
from shared.process.setting_values import ConfigError

SECRET_LEN: Final = 32
SALTS_KEPT: Final = 1024


def new_secret() -> str:
    """A secret for a gateway that was given none, and for all its workers."""
    return secrets.token_urlsafe(SECRET_LEN)


def salts_secret(config: HopConfig, env: Mapping[str, str], own: str) -> bytes:
    """The configured secret; `own` where there is none. Raises ConfigError."""
    try:
        return (read_secret(config.salt, env) or own).encode()
    except ValueError as error:
        raise ConfigError([f"hop: {error}"]) from None


@lru_cache(maxsize=SALTS_KEPT)
def salt_of(secret: bytes, tenant: str, asked: str | None) -> str:
    """The salt of a tenant's requests; `asked` is the caller's own."""
    text = tenant if asked is None else f"{tenant}\0{asked}"  # no tenant's id has a NUL
    return base64.urlsafe_b64encode(hmac.digest(secret, text.encode(), "sha256")).decode().rstrip("=")
