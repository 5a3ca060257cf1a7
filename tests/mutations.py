"""Mutated requests in memory: `Connection` hands their bytes to the public listener's protocol,
40,000 requests in five seconds."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gateway.listen.listener import BoundedServer
from tests.bench.gateway.mutations import bodies, corpus

KEY: Final = "dev-key"
MODEL: Final = "tiny"
BODIES: Final = bodies(MODEL)
CORPUS: Final = corpus(KEY, MODEL)


class Connection(asyncio.Transport):
    """A client's connection to a public listener, in memory: bytes go in, and what is answered is kept."""

    def __init__(self, server: BoundedServer) -> None:
        super().__init__({"peername": ("192.0.2.1", 1), "sockname": ("192.0.2.2", 2)})
        self.answer = bytearray()
        self.is_open = True
        self._protocol = server()
        self._protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        if self.is_open:
            self._protocol.data_received(data)

    def leave(self) -> None:
        """The client's end is closed."""
        self.is_open = False
        self._protocol.connection_lost(None)

    def write(self, data: Any) -> None:
        self.answer += data

    def is_closing(self) -> bool:
        return not self.is_open

    def close(self) -> None:
        self.is_open = False

    abort = close

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits here."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """All has been sent already."""

    def resume_reading(self) -> None:
        """All has been sent already."""

    def is_reading(self) -> bool:
        return True
