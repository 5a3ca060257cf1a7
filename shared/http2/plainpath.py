"""The plain path: all frames of streams go through `h2`. The fast path is tested against it.

h2 accepts a few things that RFC 9113 forbids; those are checked here too, so that the two paths agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import h2.events as events

from shared.http2 import frames
from shared.http2.connection_errors import ErrorCode, ProtocolViolation
from shared.http2.headers import HeaderList, check_status
from shared.http2.stream import Stream

if TYPE_CHECKING:
    from shared.http2.connection import Connection


class PlainPath:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._h2 = connection.h2
        self._credit_at = connection.config.connection_window_len // 16
        self._uncredited = 0
        self._dropped = 0
        self.frame_handlers: Mapping[int, frames.FrameHandler] = {
            frames.DATA: self._check_data,
            frames.HEADERS: self._check_headers,
            frames.RST_STREAM: self._check_reset,
        }
        self.event_handlers: Mapping[type[events.Event], Callable[[Any], None]] = {
            events.RequestReceived: self._on_request,
            events.ResponseReceived: self._on_response,
            events.DataReceived: self._on_data,
            events.StreamEnded: self._on_end,
            events.StreamReset: self._on_reset,
            events.WindowUpdated: self._on_window,
        }

    @property
    def window(self) -> int:
        """The bytes that the peer may still send on all streams together, as this end counts them."""
        return self._h2.inbound_flow_control_window - self._dropped

    @property
    def uncredited(self) -> int:
        """Bytes that have arrived and are not given back to the window yet, until they are worth a frame."""
        return self._uncredited + self._dropped

    def opened(self, stream: Stream) -> None:
        """Do nothing: h2 keeps the stream's windows."""

    def closed(self, stream: Stream) -> None:
        self._h2.forget(stream.id)

    def settings_changed(self) -> None:
        """Do nothing: h2 has moved every window."""

    # -- sending ------------------------------------------------------------------------------

    @property
    def connection_room(self) -> int:
        return self._h2.outbound_flow_control_window

    def send_room(self, stream: Stream) -> int:
        return self._h2.local_flow_control_window(stream.id)

    def stream_room(self, stream: Stream) -> int:
        """The bytes that the stream's own window allows, whatever the connection's does."""
        return self._h2.streams[stream.id].outbound_flow_control_window

    def send_head(self, stream: Stream, head: HeaderList, *, end: bool) -> None:
        self._h2.send_headers(stream.id, head, end_stream=end)
        self._connection.collect()

    def send(self, stream: Stream, data: bytes | memoryview, *, end: bool = False) -> None:
        self._h2.send_data(stream.id, data, end_stream=end)
        self._connection.collect()

    def end(self, stream: Stream) -> None:
        self._h2.end_stream(stream.id)
        self._connection.collect()

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        self._h2.reset_stream(stream.id, code)
        self._connection.collect()

    # -- receiving ----------------------------------------------------------------------------

    def _check_data(self, _flags: int, stream_id: int, payload: bytes) -> bool:
        return self._connection.received_unexpected_data(stream_id, len(payload))

    def _check_headers(self, _flags: int, stream_id: int, _payload: bytes) -> bool:
        self._connection.check_opening(stream_id)
        return False

    def _check_reset(self, _flags: int, stream_id: int, _payload: bytes) -> bool:
        self._connection.check_known(stream_id)
        return False

    def _on_request(self, event: events.RequestReceived) -> None:
        self._connection.received_request(event.stream_id, list(event.headers))

    def _on_response(self, event: events.ResponseReceived) -> None:
        if (stream := self._connection.streams.get(event.stream_id)) is not None:
            head = list(event.headers)
            check_status(head)
            stream.deliver_head(head)

    def _on_data(self, event: events.DataReceived) -> None:
        """Deliver DATA, unless its stream was reset a moment ago."""
        self._uncredited += event.flow_controlled_length
        if (stream := self._connection.streams.get(event.stream_id)) is not None:
            stream.deliver(event.data, event.flow_controlled_length)

    def _on_end(self, event: events.StreamEnded) -> None:
        if (stream := self._connection.streams.get(event.stream_id)) is not None:
            self._connection.received_end(stream)

    def _on_reset(self, event: events.StreamReset) -> None:
        """Handle a reset, from the peer or by h2, which resets a stream when a frame breaks a rule of it."""
        stream, code = self._connection.streams.get(event.stream_id), int(event.error_code or 0)
        if not event.remote_reset:
            self._connection.was_reset(stream, code)
        elif stream is not None:
            self._connection.received_reset(stream, code)

    def _on_window(self, event: events.WindowUpdated) -> None:
        if event.stream_id and (stream := self._connection.streams.get(event.stream_id)) is not None:
            self._connection.enqueue(stream)

    def drop(self, length: int) -> None:
        """Count DATA of a stream that was reset, which h2 does not see."""
        self._dropped += length
        if self.window < 0:
            raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "the peer sent more than its window")

    def credit_stream(self, stream: Stream, length: int) -> None:
        self._h2.increment_flow_control_window(length, stream.id)
        self._connection.collect()

    def credit_connection(self) -> None:
        """Give the connection's window back, if it is worth a frame. Called after every read of the
        socket."""
        if self._uncredited + self._dropped < self._credit_at:
            return
        if self._uncredited:
            self._h2.increment_flow_control_window(self._uncredited)
            self._connection.collect()
        if self._dropped:
            self._connection.put(frames.window_update(0, self._dropped))
        self._uncredited = self._dropped = 0
