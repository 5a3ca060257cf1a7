"""DATA and WINDOW_UPDATE through `h2`: the twin that the fast path is tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import h2.events as events

from shared.http2 import frames
from shared.http2.stream import Stream

if TYPE_CHECKING:
    from shared.http2.connection import Connection


class PlainPath:
    takes: ClassVar[frozenset[int]] = frozenset({frames.GOAWAY})
    """Kinds of frames that are not simply fed to h2."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._h2 = connection.h2
        self._credit_at = connection.config.connection_window_len // 16
        self._uncredited = 0
        self._dropped = 0

    @property
    def window(self) -> int:
        """What the peer may still send us, all streams together, by our book."""
        return self._h2.inbound_flow_control_window - self._dropped

    @property
    def uncredited(self) -> int:
        """What arrived and was not given back yet; it is, once it is worth a frame."""
        return self._uncredited + self._dropped

    def opened(self, stream: Stream) -> None:
        """h2 keeps the stream's windows."""

    def settings_changed(self) -> None:
        """h2 has moved every window."""

    # -- sending ------------------------------------------------------------------------------

    @property
    def connection_room(self) -> int:
        return self._h2.outbound_flow_control_window

    def send_room(self, stream: Stream) -> int:
        return self._h2.local_flow_control_window(stream.id)

    def stream_room(self, stream: Stream) -> int:
        """What its own window allows, whatever the connection's does."""
        return self._h2.streams[stream.id].outbound_flow_control_window

    def send(self, stream: Stream, data: bytes | memoryview, *, end: bool = False) -> None:
        self._h2.send_data(stream.id, data, end_stream=end)
        self._connection.collect()

    # -- receiving ----------------------------------------------------------------------------

    def take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bool:
        """Whether the frame is dealt with, so that h2 must not see it."""
        return False

    def arrived(self, stream: Stream | None, event: events.DataReceived) -> None:
        """h2 saw DATA; of no stream, if the stream was reset a moment ago."""
        self._uncredited += event.flow_controlled_length
        if stream is not None:
            stream.deliver(event.data, event.flow_controlled_length)

    def drop(self, length: int) -> None:
        """DATA that h2 never saw came for a stream that was reset."""
        self._dropped += length

    def credit_stream(self, stream: Stream, length: int) -> None:
        self._h2.increment_flow_control_window(length, stream.id)
        self._connection.collect()

    def credit_connection(self) -> None:
        """Called after every read of the socket."""
        if self._uncredited + self._dropped < self._credit_at:
            return
        if self._uncredited:
            self._h2.increment_flow_control_window(self._uncredited)
            self._connection.collect()
        if self._dropped:
            self._connection.put(frames.window_update(0, self._dropped))
        self._uncredited = self._dropped = 0
