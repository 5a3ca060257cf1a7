"""The fast path: all frames of streams built and parsed by hand, beside `h2`.

h2 spends 140 us on the frames of one question and its answer, and 5-8 us on each DATA frame after. Here a
stream is what `Stream` says it is, windows are plain integers, and header lists are checked as a whole. h2
never hears of a stream; SETTINGS and PING remain its own.

Rules.

1. What a frame does depends on where its stream is in its life, and that is in `Stream` alone: no `head` yet,
   `received_all`, `sent_all`. A stream that is in no table is idle, was reset (`Connection.abandoned`), or
   ended.
2. Every header block goes through HPACK, whatever becomes of its stream.
3. Breaking a rule ends the connection (RFC 9113, 5.4 allows it for every error of a stream), except where
   a well-behaved peer may break it unknowingly: frames for a stream that this end has ended, and windows that
   overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shared.http2 import frames, limits
from shared.http2.connection_errors import ErrorCode, ProtocolViolation, StreamReset
from shared.http2.headers import (
    BlockDecoder,
    HeaderList,
    LiteralEncoder,
    check_request,
    check_response,
    check_trailers,
)
from shared.http2.stream import Stream

if TYPE_CHECKING:
    from shared.http2.connection import Connection


class FastPath:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._credit_at = connection.config.connection_window_len // 16
        self._initial_send_window = limits.INITIAL_WINDOW_LEN
        self._encode = LiteralEncoder().encode
        self._decode = BlockDecoder().decode
        self._begun: tuple[int, bytearray] | None = None  # flags and beginning of a header block
        self.frame_handlers: Mapping[int, frames.FrameHandler] = {
            frames.DATA: self._take_data,
            frames.HEADERS: self._take_headers,
            frames.RST_STREAM: self._take_reset,
            frames.WINDOW_UPDATE: self._take_window_update,
            frames.CONTINUATION: self._take_continuation,
        }
        self.connection_room = limits.INITIAL_WINDOW_LEN
        self.window = connection.config.connection_window_len
        self.uncredited = 0

    def opened(self, stream: Stream) -> None:
        stream.send_window = self._initial_send_window
        stream.receive_window = self._connection.config.stream_window_len

    def settings_changed(self) -> None:
        initial = self._connection.h2.remote_settings.initial_window_size
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

    def send_head(self, stream: Stream, head: HeaderList, *, end: bool) -> None:
        flags = frames.END_HEADERS | frames.END_STREAM if end else frames.END_HEADERS
        block = self._encode(head)
        assert len(block) <= limits.FRAME_LEN_MAX, "the ends bound what they send"
        self._connection.put(frames.frame(frames.HEADERS, flags, stream.id, block))

    def send(self, stream: Stream, data: bytes | memoryview, *, end: bool = False) -> None:
        length = len(data)
        self.connection_room -= length
        stream.send_window -= length
        connection = self._connection
        connection.put(frames.data_header(stream.id, length, frames.END_STREAM if end else 0))
        connection.put(data)

    def end(self, stream: Stream) -> None:
        self._connection.put(frames.data_header(stream.id, 0, frames.END_STREAM))

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        self._connection.put(frames.rst_stream(stream.id, code))

    # -- receiving ----------------------------------------------------------------------------

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> bool:
        stream = self._connection.streams.get(stream_id)
        length = len(payload)
        if stream is None or stream.received_all:
            return self._connection.received_unexpected_data(stream_id, length)
        if stream.head is None:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "DATA before HEADERS")
        self.window -= length
        self.uncredited += length
        stream.receive_window -= length
        if self.window < 0 or stream.receive_window < 0:
            raise _overrun()
        stream.deliver(frames.unpadded(payload, flags) if flags & frames.PADDED else payload, length)
        if flags & frames.END_STREAM:
            self._connection.received_end(stream)
        return True

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> bool:
        self._connection.check_opening(stream_id)
        fragment = frames.header_fragment(payload, flags, stream_id)
        if flags & frames.END_HEADERS:
            self._on_block(flags, stream_id, fragment)
        else:
            self._begun = flags, bytearray(fragment)
        return True

    def _take_continuation(self, flags: int, stream_id: int, payload: bytes) -> bool:
        assert self._begun is not None, "the splitter sees to that"
        first_flags, block = self._begun
        block += payload
        if flags & frames.END_HEADERS:
            self._begun = None
            self._on_block(first_flags, stream_id, bytes(block))
        return True

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        connection, head, end = self._connection, self._decode(block), bool(flags & frames.END_STREAM)
        stream = connection.streams.get(stream_id)
        if stream is None:
            if stream_id not in connection.reset_ids:
                check_request(head)
                connection.received_request(stream_id, head)
                if end and (stream := connection.streams.get(stream_id)) is not None:
                    connection.received_end(stream)
        elif stream.received_all:
            connection.reset_half_closed(stream)
        elif stream.head is not None:
            check_trailers(head)
            if not end:
                raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "trailers that do not end a message")
            connection.received_end(stream)
        elif not check_response(head):
            stream.deliver_head(head)
            if end:
                connection.received_end(stream)
        elif end:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "an interim response that ends a message")

    def _take_reset(self, flags: int, stream_id: int, payload: bytes) -> bool:
        if len(payload) != 4:
            return False
        if (stream := self._connection.streams.get(stream_id)) is None:
            self._connection.check_known(stream_id)
        else:
            self._connection.received_reset(stream, int.from_bytes(payload, "big"))
        return True

    def _take_window_update(self, flags: int, stream_id: int, payload: bytes) -> bool:
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
            self._connection.check_known(stream_id)
            return True
        stream.send_window += increment
        if stream.send_window > limits.WINDOW_LEN_MAX:
            code = ErrorCode.FLOW_CONTROL_ERROR
            self._connection.reset_and_charge(stream, StreamReset(code, by_peer=False), code)
        else:
            self._connection.enqueue(stream)
        return True

    def drop(self, length: int) -> None:
        self.window -= length
        self.uncredited += length
        if self.window < 0:
            raise _overrun()

    def credit_stream(self, stream: Stream, length: int) -> None:
        stream.receive_window += length
        self._connection.put(frames.window_update(stream.id, length))

    def credit_connection(self) -> None:
        if self.uncredited >= self._credit_at:
            self.window += self.uncredited
            self._connection.put(frames.window_update(0, self.uncredited))
            self.uncredited = 0


def _overrun() -> ProtocolViolation:
    return ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "the peer sent more than its window")
