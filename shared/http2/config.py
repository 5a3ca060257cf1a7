"""The configuration of one end of a connection: its windows, its streams and the timeouts of its watch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shared.http2 import limits


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Bounds of a connection, and the path of its streams. Lengths are in bytes."""

    fast: bool = True
    """True if streams go beside h2 (`fastpath`) or through it (`plainpath`)."""
    stream_window_len: int = limits.STREAM_WINDOW_LEN
    connection_window_len: int = limits.CONNECTION_WINDOW_LEN
    streams_max: int = limits.STREAMS_MAX
    """The most streams open at once. A client's may be fewer, as the server's SETTINGS say."""

    def __post_init__(self) -> None:
        assert limits.INITIAL_WINDOW_LEN <= self.connection_window_len <= limits.WINDOW_LEN_MAX
        assert 0 < self.stream_window_len <= limits.WINDOW_LEN_MAX


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """The timeouts of a connection's watch (`endpoint`), in seconds."""

    greeting_timeout_s: float = 10.0
    ping_interval_s: float = 10.0
    ping_timeout_s: float = 5.0
    idle_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        assert 0 < self.ping_timeout_s <= self.ping_interval_s <= self.idle_timeout_s


WATCH: Final = WatchConfig()
