"""The configuration of one end of a connection: its windows, its streams and the timeouts of its watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shared.http2 import limits


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Bounds of a connection. Lengths are in bytes."""

    stream_window_len: int = limits.STREAM_WINDOW_LEN
    connection_window_len: int = limits.CONNECTION_WINDOW_LEN
    streams_max: int = limits.STREAMS_MAX
    """The most streams open at once. A client's may be fewer, as the server's SETTINGS say."""

    def __post_init__(self) -> None:
        assert limits.INITIAL_WINDOW_LEN <= self.connection_window_len <= limits.WINDOW_LEN_MAX
        assert 0 < self.stream_window_len <= limits.WINDOW_LEN_MAX


@dataclass(frozen=True, slots=True)
class PulseConfig:
    """A client's question whether its server lives, while streams are open, in seconds."""

    interval_s: float = 1.0
    """The time between two PINGs."""
    timeout_s: float = 3.0
    """The time for which a PING may be unanswered, and nothing else come, before the connection is dead."""

    def __post_init__(self) -> None:
        assert 0 < self.interval_s <= self.timeout_s


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """The timeouts of a connection's watch (`endpoint`), in seconds."""

    greeting_timeout_s: float = 10.0
    ping_interval_s: float = 10.0
    ping_timeout_s: float = 5.0
    idle_timeout_s: float = 300.0
    pulse: PulseConfig | None = None
    """The pulse of a client's connection. None: it has none."""

    def __post_init__(self) -> None:
        assert 0 < self.ping_timeout_s <= self.ping_interval_s <= self.idle_timeout_s


WATCH: Final = WatchConfig()
