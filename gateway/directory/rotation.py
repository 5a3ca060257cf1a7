"""The replacement of a key's secret, of callers' and of operators' keys alike."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta

from gateway.config.edge import OperatorKeyConfig
from gateway.config.whole import KeyConfig
from gateway.identity.keys import KEYID_LEN, mint_key
from shared.wire.errors import Conflict

OVERLAP_S: Final = 24 * 3600.0
"""How long a replaced secret still works, unless the operator says otherwise, in seconds."""
OVERLAP_S_MAX: Final = 30 * 24 * 3600.0
OPERATORS_ENV: Final = "admin"
"""The part of an operator's key before its id. It tells a reader, or a scanner for secrets, what it opens."""
_KEYID: Final = re.compile(rf"[a-z0-9]{{{KEYID_LEN}}}")
K = TypeVar("K", KeyConfig, OperatorKeyConfig)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The replacement of a key's secret."""

    overlap_s: Annotated[float, Meta(ge=0.0, le=OVERLAP_S_MAX)] = OVERLAP_S
    """How long the secret that is replaced still works. 0 ends every older secret at once."""


def rotated(key: K, rotation: Rotation, now_s: float) -> tuple[K, str]:
    """The key with another secret, and its text. Raises Conflict where the key does not work, or while a
    still older secret works: two at most ever do, since a third would end one that may still be in use."""
    if key.disabled:
        raise Conflict("The key is revoked.")
    if key.expires is not None and key.expires.timestamp() <= now_s:
        raise Conflict("The key has expired.")
    env = key.env if isinstance(key, KeyConfig) else OPERATORS_ENV
    minted = mint_key(env, key.id if _KEYID.fullmatch(key.id) else None)
    previous: dict[str, Any] = {"previous_hash": None, "previous_expires": None}
    if rotation.overlap_s:
        if key.previous_expires is not None and key.previous_expires.timestamp() > now_s:
            until = f"{key.previous_expires:%Y-%m-%dT%H:%M:%SZ}"
            raise Conflict(
                f"The secret before this one works until {until}. Wait, or end both with an overlap_s of 0."
            )
        until_s = ceil(now_s + rotation.overlap_s)
        previous = {"previous_hash": key.hash, "previous_expires": datetime.fromtimestamp(until_s, UTC)}
    return replace(key, hash=minted.hash, **previous), minted.text
