"""The settings of `[responses]`: whether responses are kept for callers to refer to, where, how many bytes of
them, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from msgspec import Meta

from shared.fairness.fair_share import FairShare
from shared.process.setting_values import ConfigError
from shared.process.settings import Unit

KIB: Final = 1024
MIB: Final = 1024 * KIB
Bytes = Annotated[int, Unit("bytes")]


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """Responses that are kept for callers to refer to: text of prompts and answers."""

    store: Literal["off", "memory", "redis"] = "off"
    """off: none are kept, and what asks for that is refused. memory: this process keeps them, and a restart
    forgets. redis: they are on the server of [redis], for all gateways together."""
    ttl_s: Annotated[float, Meta(ge=1.0, le=31_536_000.0)] = 86_400.0
    """How long a response is kept, since it was answered, or another one was that goes on with it."""
    response_len_max: Annotated[Bytes, Meta(ge=KIB, le=4 * MIB)] = MIB
    """Length of a response with its own input; a longer one is answered, and not kept."""
    tenant_len_max: Annotated[Bytes, Meta(ge=64 * KIB, le=1024 * 1024 * MIB)] = 64 * MIB
    """Bytes of all that is kept for a tenant; beyond it the oldest go."""
    memory: Annotated[Bytes, Meta(ge=MIB, le=1024 * 1024 * MIB)] = 256 * MIB
    """With store = "memory", bytes of all that is kept for all tenants together. A tenant has three quarters
    of it at most; one that would have more loses its own oldest."""

    def __post_init__(self) -> None:
        problems = []
        if self.response_len_max > self.tenant_len_max:
            problems.append("response_len_max: it is more than tenant_len_max")
        if self.store == "memory" and FairShare(self.memory).most < self.response_len_max:
            problems.append("memory: three quarters of it do not hold a response of response_len_max")
        if problems:
            raise ConfigError(problems)
