"""The settings that bound a request in time: everybody's, and those of a model, a service tier or a tenant,
which win over them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, TypeVar

from msgspec import Meta

from gateway.config.edge import Seconds


@dataclass(frozen=True, slots=True)
class TimeoutsConfig:
    """Time limits of every request."""

    body_s: Seconds = 30.0
    """From the headers of a request to the last byte of its body."""
    connect_s: Seconds = 5.0
    """Connecting to an engine."""
    first_token_s: Seconds = 120.0
    """From dispatch to the first event of a stream. A unary answer has no first token on the wire: only
    total_s bounds its wait."""
    inter_token_s: Seconds = 60.0
    """Between any two reads from the engine after the first byte."""
    total_s: Seconds = 1800.0
    """From the request's arrival to the last byte of its answer."""
    slow_client_s: Seconds = 30.0
    """How long a client may leave its connection's buffers full."""
    idle_s: Seconds = 75.0
    """How long a connection may have no request in progress."""
    head_s: Seconds = 10.0
    """From the first byte of a request's headers to their last; then the connection is closed."""
    drain_s: Seconds = 60.0
    """How long open requests may take to end after SIGTERM."""
    drain_delay_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """How long new connections are still served after SIGTERM, while /readyz says no already: as long as load
    balancers take to notice."""


General = TypeVar("General", TimeoutsConfig, "TimeoutOverrides")


@dataclass(frozen=True, slots=True)
class TimeoutOverrides:
    """The time limits of one model or one tenant. None leaves the more general setting as
    it is."""

    connect_s: Seconds | None = None
    """Wins over the more general connect_s, be it shorter or longer, as each of these does."""
    first_token_s: Seconds | None = None
    """Wins over the more general first_token_s."""
    inter_token_s: Seconds | None = None
    """Wins over the more general inter_token_s."""
    total_s: Seconds | None = None
    """Wins over the more general total_s."""
    slow_client_s: Seconds | None = None
    """Wins over the more general slow_client_s."""

    def over(self, general: General) -> General:
        """The more general settings, with those that are set here in their place."""
        return replace(general, **{name: s for name, s in asdict(self).items() if s is not None})
