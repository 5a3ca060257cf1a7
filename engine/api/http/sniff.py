"""HTTP/1.1 and HTTP/2 on one port, told apart by the first bytes of a connection.

The HTTP/2 preface begins with `PRI * HTTP/2.0`, which was chosen because no HTTP/1.1 client sends it. On TLS,
ALPN has decided before the first byte. A connection on which nothing is sent is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from shared.http2.frames import PREFACE
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.sockets import bound_transport


class SniffingProtocol(asyncio.Protocol):
    """A protocol that passes its transport to one of two others, with the bytes that it has read."""

    def __init__(
        self,
        http2: Callable[[], asyncio.Protocol],
        http1: Callable[[], asyncio.Protocol],
        *,
        silent: dict[SniffingProtocol, None] | None = None,
        silence_timeout_s: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`silent` has this one in it until it is known which of the two serves it, or it is lost."""
        self._silent = {} if silent is None else silent
        self._http2 = http2
        self._http1 = http1
        self._silence_timeout_s = silence_timeout_s
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._heard = b""
        self._watching: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        bound_transport(self._transport)
        self._silent[self] = None
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() is not None:
            self._switch_to(self._http2 if tls.selected_alpn_protocol() == "h2" else self._http1)
        else:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def data_received(self, data: bytes) -> None:
        self._heard += data
        if self._heard.startswith(PREFACE):
            self._switch_to(self._http2)
        elif not PREFACE.startswith(self._heard):
            self._switch_to(self._http1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._silent.pop(self, None)
        if self._watching is not None:
            self._watching.cancel()

    def _switch_to(self, factory: Callable[[], asyncio.Protocol]) -> None:
        transport = self._transport
        assert transport is not None
        if self._watching is not None:
            self._watching.cancel()
        self._transport = None
        self._silent.pop(self, None)
        protocol = factory()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._heard:
            protocol.data_received(self._heard)

    async def _watch(self) -> None:
        await self._clock.sleep(self._silence_timeout_s)
        self.abort()

    def abort(self) -> None:
        """Close the connection, unless another protocol has it."""
        if self._transport is not None:
            self._transport.abort()
