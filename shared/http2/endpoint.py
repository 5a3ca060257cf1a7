"""The asyncio edge of a connection: the bytes, the pauses and the watch. Shared by client and server.

Output is written once per turn of the event loop, whatever was framed in that turn, and again for as long as
the transport takes more and streams have more.

The watch is one task per connection. It ends a connection whose peer

- has not sent its SETTINGS within `greeting_timeout_s`,
- leaves a PING unanswered for `ping_timeout_s` and sends nothing else either,
- leaves a frame or header block unfinished for a whole `ping_interval_s`,
- or has had no stream for `idle_timeout_s`.
"""

from __future__ import annotations

import asyncio
from typing import cast

from shared.http2.connection import Connection, ConnectionPhase
from shared.http2.connection_config import ConnectionConfig, WatchConfig
from shared.http2.connection_errors import ConnectionLost, ErrorCode, ProtocolViolation
from shared.http2.stream import Stream
from shared.process.clock import Clock


class ConnectionEndpoint(asyncio.Protocol):
    """One end of one connection. A subclass decides what to do with a stream."""

    def __init__(self, *, client: bool, config: ConnectionConfig, watch: WatchConfig, clock: Clock) -> None:
        self._watch_config = watch
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._watching: asyncio.Task[None] | None = None
        self._flush_due = False
        self._idle_since_s = clock.monotonic()
        self.connection = Connection(self, client=client, config=config, now=clock.monotonic)

    # -- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._watching = self._loop.create_task(self._watch())
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            self.connection.receive(data)
        except ProtocolViolation:
            self._hang_up()

    def eof_received(self) -> None:
        self._fail("the peer closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._watching is not None:
            self._watching.cancel()
        self._fail(f"the connection was lost: {exc}" if exc else "the connection was closed")

    def pause_writing(self) -> None:
        self.connection.paused = True

    def resume_writing(self) -> None:
        self.connection.paused = False
        self.connection.pump()
        self._flush()

    # -- Owner --------------------------------------------------------------------------------

    def output_ready(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def stream_opened(self, stream: Stream) -> None:
        raise AssertionError("only a client opens streams: push is off")

    def stream_closed(self, stream: Stream) -> None:
        self._idle_since_s = self._clock.monotonic()
        if self.connection.phase is ConnectionPhase.RETIRING:
            self._loop.call_soon(self.close_if_done)

    def load_told(self, payload: bytes) -> None:
        raise AssertionError("only a client is told")

    def peer_changed(self) -> None:
        if self.connection.phase is ConnectionPhase.RETIRING:
            self._loop.call_soon(self.close_if_done)

    # -- ending -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if the connection is still needed."""
        return bool(self.connection.streams)

    def close(self, reason: str, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Send GOAWAY, fail the open streams, and close the connection."""
        self.connection.close(ConnectionLost(reason), code)
        self._hang_up()

    def close_if_done(self) -> None:
        """Close a retiring connection if its last stream has ended."""
        if self.connection.may_close and not self.busy:
            self.close("retired")

    def _fail(self, reason: str) -> None:
        self.connection.lost(ConnectionLost(reason))
        if self._transport is not None:
            self._transport.abort()

    def _hang_up(self) -> None:
        """Write what was framed, and close the connection after it."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        self._flush_due = False
        connection, transport = self.connection, self._transport
        if transport is None:
            return
        while not connection.paused and (data := connection.take_output()):
            transport.write(data)
            connection.pump()

    # -- the watch ----------------------------------------------------------------------------

    async def _watch(self) -> None:
        connection, config = self.connection, self._watch_config
        await self._clock.sleep(config.greeting_timeout_s)
        if not connection.greeted:
            self._fail("the peer sent no SETTINGS in time")
        beat = 0
        while connection.phase is not ConnectionPhase.CLOSED:
            beat += 1
            unfinished = connection.unfinished and connection.frames_whole
            heard = connection.receives
            connection.ping(beat.to_bytes(8, "big"))
            await self._clock.sleep(config.ping_timeout_s)
            if connection.receives == heard:
                self._fail("the peer left a PING unanswered")
            await self._clock.sleep(config.ping_interval_s - config.ping_timeout_s)
            if unfinished and connection.unfinished and connection.frames_whole == unfinished:
                self._fail("the peer left a frame unfinished")
            if not self.busy and self._clock.monotonic() - self._idle_since_s >= config.idle_timeout_s:
                self.close("idle")
        await self._clock.sleep(config.ping_timeout_s)
        if self._transport is not None:
            self._transport.abort()  # it was closed, but the peer does not read the rest
