"""DATA and WINDOW_UPDATE beside `h2`.

Nine frames of ten are DATA, and h2 spends 5-8 us on each. Here they are framed and parsed by hand, and the
windows kept in plain integers. Everything else is h2's: it still opens, ends and resets streams.

Rules.

1. This class alone keeps the windows. h2's are always whole: it never sees what moves them, and what it does
   see of DATA is given back to it in silence.
2. h2 learns of the end of a message from an empty DATA frame with END_STREAM.
3. Whatever is not the common case goes to h2, which judges it: padding, a message with a content-length
   (whose bytes h2 counts), DATA where none may be, a WINDOW_UPDATE of zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import h2.events as events

from shared.http2 import frames, limits
from shared.http2.errors import ErrorCode, ProtocolViolation, StreamReset
from shared.http2.stream import Stream

if TYPE_CHECKING:
    from shared.http2.connection import Connection


class FastPath:
    takes: ClassVar[frozenset[int]] = frozenset({frames.GOAWAY, frames.DATA, frames.WINDOW_UPDATE})

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._h2 = connection.h2
        self._credit_at = connection.config.connection_window_len // 16
        self._initial_send_window = limits.INITIAL_WINDOW_LEN
        self.connection_room = limits.INITIAL_WINDOW_LEN
        self.window = connection.config.connection_window_len
        self.uncredited = 0

    def opened(self, stream: Stream) -> None:
        stream.send_window = self._initial_send_window
        stream.receive_window = self._connection.config.stream_window_len

    def settings_changed(self) -> None:
        initial = self._h2.remote_settings.initial_window_size
        delta, self._initial_send_window = initial - self._initial_send_window, initial
        for stream in self._connection.streams.values():
            stream.send_window += delta
            if stream.send_window > limits.WINDOW_LEN_MAX:
                raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS overflow a window")

    # -- sending ------------------------------------------------------------------------------

    def send_room(self, stream: Stream) -> int:
        return min(self.connection_room, stream.send_window)

    def stream_room(self, stream: Stream) -> int:
        return stream.send_window

    def send(self, stream: Stream, data: bytes | memoryview, *, end: bool = False) -> None:
        length = len(data)
        self.connection_room -= length
        stream.send_window -= length
        connection = self._connection
        connection.put(frames.data_header(stream.id, length, frames.END_STREAM if end else 0))
        connection.put(data)
        if end:
            self._h2.end_stream(stream.id)
            self._h2.clear_outbound_data_buffer()  # the empty frame that says so

    # -- receiving ----------------------------------------------------------------------------

    def take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bool:
        if kind == frames.DATA:
            return self._take_data(flags, stream_id, payload)
        return kind == frames.WINDOW_UPDATE and self._take_window_update(stream_id, payload)

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> bool:
        stream = self._connection.streams.get(stream_id)
        if (
            stream is None
            or flags & frames.PADDED
            or stream.sized
            or stream.received_all
            or stream.head is None
        ):
            return False
        length = len(payload)
        self._charge(stream, length)
        stream.deliver(payload, length)
        if flags & frames.END_STREAM:
            self._connection.feed(frames.data_header(stream_id, 0, frames.END_STREAM))
        return True

    def _take_window_update(self, stream_id: int, payload: bytes) -> bool:
        increment = int.from_bytes(payload, "big") & limits.WINDOW_LEN_MAX
        if len(payload) != 4 or not increment:
            return False
        if not stream_id:
            self.connection_room += increment
            if self.connection_room > limits.WINDOW_LEN_MAX:
                raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "the connection window overflows")
            return True
        stream = self._connection.streams.get(stream_id)
        if stream is None:
            return False
        stream.send_window += increment
        if stream.send_window > limits.WINDOW_LEN_MAX:
            code = ErrorCode.FLOW_CONTROL_ERROR
            self._connection.punish(stream, StreamReset(code, by_peer=False), code)
        else:
            self._connection.enqueue(stream)
        return True

    def arrived(self, stream: Stream | None, event: events.DataReceived) -> None:
        length = event.flow_controlled_length
        if length:
            self._restore(length, event.stream_id)
            self._charge(stream, length)
        if stream is not None:
            stream.deliver(event.data, length)

    def _restore(self, length: int, stream_id: int) -> None:
        """Gives h2 back what it counted, and swallows what it would tell the peer."""
        self._h2.increment_flow_control_window(length)
        inner = self._h2.streams.get(stream_id)
        if inner is not None and inner.open:
            self._h2.increment_flow_control_window(length, stream_id)
        self._h2.clear_outbound_data_buffer()

    def _charge(self, stream: Stream | None, length: int) -> None:
        self.window -= length
        self.uncredited += length
        if stream is not None:
            stream.receive_window -= length
        if self.window < 0 or (stream is not None and stream.receive_window < 0):
            raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "the peer sent more than its window")

    def drop(self, length: int) -> None:
        self._charge(None, length)

    def credit_stream(self, stream: Stream, length: int) -> None:
        stream.receive_window += length
        self._connection.put(frames.window_update(stream.id, length))

    def credit_connection(self) -> None:
        if self.uncredited >= self._credit_at:
            self.window += self.uncredited
            self._connection.put(frames.window_update(0, self.uncredited))
            self.uncredited = 0
