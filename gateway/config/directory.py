"""The settings of `[directory]`: where the tenants and keys are kept that operators change while gateways
run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

KeyEnv = Annotated[str, Meta(pattern=r"^[a-z0-9]{1,16}$")]
"""The part of a minted key that tells where it belongs, such as `live` or `test`."""


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """Where tenants and keys are kept that operators change while gateways run."""

    store: Literal["file", "redis"] = "file"
    """file: in this file, which the admin listener edits. redis: on the server of [redis], for all gateways
    together, beside those of this file."""
    stale_s: Annotated[float, Meta(ge=10.0, le=604_800.0)] = 3600.0
    """How long a gateway goes by what it read last when Redis does not answer any more; then callers whose
    keys are in Redis get 503."""
