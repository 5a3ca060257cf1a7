"""The pulse of a client's connection: PINGs while streams are open. They find a server that has stopped, or
is cut off, within seconds. TCP takes minutes, and a stream that waits for bytes cannot tell.

A server answers PINGs from its event loop, whatever its streams wait for. Any bytes count as an answer. Time
is counted in beats, not by the clock: a client that was itself held up, by its own work or by its machine,
finds one beat gone when it goes on, and the server's answer in its buffer before the next.
"""

from __future__ import annotations

from shared.http2.config import PulseConfig
from shared.http2.connection import Connection

PING: bytes = b"\0\0pulse\0"


class Pulse:
    """The pulse of one connection. `beat` is called once per interval."""

    __slots__ = ("_beats_max", "_connection", "_heard", "_is_asked", "silent_beats")

    def __init__(self, connection: Connection, config: PulseConfig) -> None:
        self._connection = connection
        self._beats_max = -(-config.timeout_s // config.interval_s)
        self._heard = 0
        self._is_asked = False
        self.silent_beats = 0
        """The beats without a byte since the PING that is unanswered."""

    def beat(self) -> bool:
        """Look whether the server lives, and ask. Returns False when it has not answered in time."""
        connection = self._connection
        if connection.receives != self._heard or not connection.streams:
            self._heard, self._is_asked, self.silent_beats = connection.receives, False, 0
        elif self._is_asked:
            self.silent_beats += 1
        if connection.streams and not self._is_asked:
            self._is_asked = True
            connection.ping(PING)
        return self.silent_beats < self._beats_max
