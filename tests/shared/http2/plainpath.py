"""The plain path, the oracle of the fast one: all frames of streams go through `h2`.

`test_twins.py` holds the fast path to it, and gives it to connections that have a `PlainConfig`. h2 accepts
a few things that RFC 9113 forbids; those are checked here too, so that the two paths agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import h2.events as events
from h2.settings import SettingCodes, Settings

from shared.http2 import frames, limits
from shared.http2.connection import Connection, FastPath
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import ErrorCode, ProtocolViolation, StreamReset
from shared.http2.headers import HeaderList, LiteralEncoder, check_status
from shared.http2.protocol_state import ProtocolState
from shared.http2.stream import Stream


@dataclass(frozen=True, slots=True)
class PlainConfig(ConnectionConfig):
    """The configuration of a connection whose streams go through h2."""


def path_of(connection: Connection) -> FastPath | PlainPath:
    """The path of a connection's streams, as its configuration says."""
    return PlainPath(connection) if isinstance(connection.config, PlainConfig) else FastPath(connection)


class PlainState(ProtocolState):
    """A connection of `h2` with streams. It would end the connection of a peer that opens one stream too
    many: its own limit is twice `streams_max`, so that the surplus can be refused stream by stream."""

    def __init__(self, connection: Connection) -> None:
        config = connection.config
        super().__init__(
            client=connection.client,
            stream_window_len=config.stream_window_len,
            connection_window_len=config.connection_window_len,
            streams_max=config.streams_max,
        )
        self.config.header_encoding = None
        self.config.validate_outbound_headers = False
        self.config.normalize_outbound_headers = False
        self.config.normalize_inbound_headers = False
        self.encoder = LiteralEncoder()  # type: ignore[assignment]  # it has what h2 asks for
        self.decoder.max_header_list_size = limits.HEADER_LIST_LEN_MAX
        kept = {**self.local_settings, SettingCodes.MAX_CONCURRENT_STREAMS: 2 * config.streams_max}
        self.local_settings = Settings(client=connection.client, initial_values=kept)  # type: ignore[arg-type]


class OpenStreams(dict[int, Stream]):
    """The streams of a connection. h2 forgets a closed one with it: frames that still come for it are judged
    by how it was closed."""

    def __init__(self, h2: PlainState) -> None:
        self._h2 = h2

    def pop(self, stream_id: int, *default: Any) -> Any:
        if stream_id in self:
            self._forget(stream_id)
        return super().pop(stream_id, *default)

    def __delitem__(self, stream_id: int) -> None:
        self._forget(stream_id)
        super().__delitem__(stream_id)

    def _forget(self, stream_id: int) -> None:
        closed = self._h2.streams.pop(stream_id, None)
        if closed is not None:
            assert closed.closed, stream_id
            self._h2._closed_streams[stream_id] = closed.closed_by


class PlainPath:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._h2 = connection.h2 = PlainState(connection)
        connection.streams = OpenStreams(self._h2)
        self._credit_at = connection.config.connection_window_len // 16
        self._uncredited = 0
        self._dropped = 0
        self.frame_handlers: Mapping[int, frames.FrameHandler] = {
            frames.DATA: self._check_data,
            frames.HEADERS: self._check_headers,
            frames.RST_STREAM: self._check_reset,
        }
        handlers: Mapping[type[events.Event], Callable[[Any], None]] = {
            events.RequestReceived: self._on_request,
            events.ResponseReceived: self._on_response,
            events.DataReceived: self._on_data,
            events.StreamEnded: self._on_end,
            events.StreamReset: self._on_reset,
            events.WindowUpdated: self._on_window,
        }
        connection._event_handlers.update(handlers)

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
            self._connection.charge_reset()
            if stream is not None:
                self._connection._close_by_reset(stream, StreamReset(code, by_peer=False))
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
