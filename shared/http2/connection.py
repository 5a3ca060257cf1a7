"""One HTTP/2 connection: the core that client and server share. No I/O.

Theory. This module decides when bytes may be sent. Bytes come in by `receive`, go out by `take_output`; in
between are streams. The owner (an endpoint, or a test) moves the bytes, is told by `Owner` what happened, and
calls `pump` when there is room again. `h2` handles SETTINGS and PING; `FastPath` parses and builds the frames
of streams by hand, and reports received ones by `received_...`.

Rules.

1. The connection window is credited on arrival, a stream's window on consumption. An unread stream closes its
   own window and no other's. `h2.acknowledge_received_data` ties the two and is never used.
2. A write is framed as far as min(stream window, connection window) and the output buffer allow. Streams that
   wait for the connection are in `_backlog` and get one frame per turn, so that none is passed over; those
   that wait for their own window are in no queue. After every call from outside: backlog non-empty means that
   nothing can be sent.
3. A change of SETTINGS can open every window, so it looks at every stream.
4. After a reset, from either side, frames of that stream may still be on their way (`reset_ids`). They are
   dropped, their bytes credited to the connection, and HEADERS still go through HPACK, whose state belongs to
   all.
5. GOAWAY never reaches `h2`, in either direction: `h2` would close the connection with it, while its point is
   that streams which run may finish. After the peer's GOAWAY no stream is opened; those above its last id
   were never processed, and fail with StreamRefused.
6. A server's report on a stream (report.py) comes in a frame of the connection, after the stream's end:
   neither a window nor a reset holds it up.
7. Everything that a peer can cause this end to hold or do is bounded (limits.py). A breach raises
   ProtocolViolation out of `receive`, with GOAWAY in the output; the owner sends that and closes.
8. What a frame of a stream does depends on where the stream is in its life, and that is in `Stream` alone: no
   `head` yet, `received_all`, `sent_all`. A stream that is in no table is idle, was reset (`reset_ids`), or
   ended.
9. Every header block goes through HPACK, whatever becomes of its stream.
10. Breaking a rule ends the connection (RFC 9113, 5.4 allows it for every error of a stream), except where
    a well-behaved peer may break it unknowingly: frames for a stream that this end has ended, and windows
    that overflow.

Laws (tests/shared/http2): bytes written = bytes read; no window is negative;
window + in flight + unread + uncredited = its size, for the connection and each stream;
a stream's unread bytes never exceed its window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Protocol

import h2.events as events
from h2.exceptions import ProtocolError

from shared.http2 import frames, limits
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import (
    ConnectionLost,
    ErrorCode,
    ProtocolViolation,
    StreamFailed,
    StreamRefused,
    StreamReset,
)
from shared.http2.headers import (
    BlockDecoder,
    HeaderList,
    LiteralEncoder,
    check_request,
    check_response,
    check_trailers,
)
from shared.http2.protocol_state import ProtocolState
from shared.http2.stream import AwaitedReports, Stream

DRAIN_PING: Final = b"draining"
LAST_ID_TO_OPEN: Final = frames.STREAM_ID_MAX - 2
ENDS: Final = frames.END_STREAM | frames.END_HEADERS


class ConnectionPhase(Enum):
    """OPEN ──> RETIRING ──> CLOSED, or from OPEN to CLOSED at once."""

    OPEN = "open"
    RETIRING = "retiring"
    """One side has sent GOAWAY: streams that run may finish, no new one begins."""
    CLOSED = "closed"


MOVES: Final[Mapping[ConnectionPhase, frozenset[ConnectionPhase]]] = {
    ConnectionPhase.OPEN: frozenset({ConnectionPhase.RETIRING, ConnectionPhase.CLOSED}),
    ConnectionPhase.RETIRING: frozenset({ConnectionPhase.CLOSED}),
    ConnectionPhase.CLOSED: frozenset(),
}


class Owner(Protocol):
    """The owner of a connection: an endpoint, or a test.

    Its methods are called from within `Connection.receive` and the streams' methods. They must neither await
    nor call back.
    """

    def output_ready(self) -> None:
        """The output was empty and is not any more."""

    def stream_opened(self, stream: Stream) -> None:
        """A request's header list came, at a server."""

    def stream_closed(self, stream: Stream) -> None:
        """Both sides have ended the stream, or `stream.error` says why it ended early."""

    def load_told(self, payload: bytes) -> None:
        """The server has told its load, at a client."""

    def peer_changed(self) -> None:
        """SETTINGS, GOAWAY or the connection's end has changed how many streams may be opened."""


class FloodBudgets:
    """The budgets of one peer, which pays for frames that cause work though they carry no message. Spending
    raises ProtocolViolation when nothing is left."""

    __slots__ = ("by_type", "empty_frames")

    def __init__(self, now: Callable[[], float], *, client: bool) -> None:
        reports = {frames.REPORT: limits.Budget("REPORTs", limits.REPORTS, now)} if client else {}
        self.by_type: Final[Mapping[int, limits.Budget]] = {
            **reports,
            frames.RST_STREAM: limits.Budget("resets", limits.RESETS, now),
            frames.PING: limits.Budget("PINGs", limits.PINGS, now),
            frames.SETTINGS: limits.Budget("SETTINGS", limits.SETTINGS_FRAMES, now),
            frames.PRIORITY: limits.Budget("PRIORITYs", limits.PRIORITIES, now),
        }
        self.empty_frames: Final = limits.Budget("empty frames", limits.EMPTY_FRAMES, now)


class Connection:
    def __init__(
        self, owner: Owner, *, client: bool, config: ConnectionConfig, now: Callable[[], float]
    ) -> None:
        self.client = client
        self.config = config
        self.phase = ConnectionPhase.OPEN
        self.streams: dict[int, Stream] = {}
        self.paused = False  # the transport is full
        self.greeted = False  # the peer's SETTINGS came
        self.receives = 0  # the number of calls of `receive`, a sign of life
        self.error: ConnectionLost | None = None  # why it closed
        self.credit_at = max(1, config.stream_window_len // 2)
        self.to_flush: list[Stream] = []  # streams whose readers get this turn's bytes at its end
        self.reset_ids: dict[int, None] = {}  # ids closed by a reset, oldest first
        self._awaited = AwaitedReports()
        self._takes_reports = False  # by the peer's SETTINGS
        self._owner = owner
        self._out = bytearray()
        self._backlog: deque[Stream] = deque()
        self._opened_id = -1  # the last stream that this end has opened
        self._accepted_id = 0  # the last stream that the peer has opened
        self._allowed = 0  # the most streams of this end, by the peer's SETTINGS
        self._announcing = False  # the first GOAWAY is on its way
        self._accept_max = frames.STREAM_ID_MAX  # streams above are refused
        self._splitter = frames.Splitter(b"" if client else frames.PREFACE)
        self._floods = FloodBudgets(now, client=client)
        self.h2 = ProtocolState(
            client=client,
            stream_window_len=config.stream_window_len,
            connection_window_len=config.connection_window_len,
            streams_max=config.streams_max,
        )
        self._out += self.h2.greeting
        self._event_handlers: dict[type[events.Event], Callable[[Any], None]] = {
            events.RemoteSettingsChanged: self._on_settings,
            events.PingAckReceived: self._on_pong,
        }
        self.path = FastPath(self)
        self._frame_handlers: dict[int, frames.FrameHandler] = {
            **self.path.frame_handlers,
            frames.GOAWAY: self._on_goaway,
        }
        if client:
            self._frame_handlers[frames.REPORT] = self._on_report
        ignored = dict.fromkeys((frames.WINDOW_UPDATE, frames.RST_STREAM), frames.ignore)
        self._frame_handlers_of_reset = {**self._frame_handlers, **ignored, frames.DATA: self._drop_data}

    # -- what the owner asks ------------------------------------------------------------------

    @property
    def streams_room(self) -> int:
        """The number of streams that this end may open now."""
        if self.phase is not ConnectionPhase.OPEN or self._opened_id >= LAST_ID_TO_OPEN:
            return 0
        return self._allowed - len(self.streams)

    @property
    def may_close(self) -> bool:
        """True if the connection retires, no stream runs, and no announced stream is still on its way."""
        return self.phase is ConnectionPhase.RETIRING and not self.streams and not self._announcing

    @property
    def awaits_reports(self) -> bool:
        """True if the server has yet to report on a stream that is over. False at a server."""
        return self._awaited.are_due

    @property
    def unfinished(self) -> bool:
        """True if the peer has begun a frame or a header block and not ended it."""
        return self._splitter.unfinished

    @property
    def frames_whole(self) -> int:
        return self._splitter.whole

    def take_output(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data

    def pump(self) -> None:
        """Frame what waits in the backlog, a frame for each stream in turn, as far as may be sent."""
        backlog, path = self._backlog, self.path
        while backlog and not self.full and path.connection_room > 0:
            stream = backlog.popleft()
            rest = stream.pending
            if rest is None or stream.error is not None:
                stream.queued = False
                continue
            length = min(len(rest), path.send_room(stream), limits.FRAME_LEN_MAX)
            if length > 0:
                path.send(stream, rest[:length])
                stream.pending = rest = rest[length:]
            if not rest:
                stream.queued = False
                stream.written()
            elif path.stream_room(stream) > 0:
                backlog.append(stream)
            else:
                stream.queued = False

    @property
    def full(self) -> bool:
        return self.paused or len(self._out) >= limits.OUT_LEN_SOFT

    def open(self, head: HeaderList, *, end: bool) -> Stream:
        """Open a stream with a request's header list, at a client. Asserts that there is room for a
        stream."""
        assert self.client
        assert self.phase is ConnectionPhase.OPEN
        assert len(self.streams) < self._allowed
        self._opened_id += 2
        stream = Stream(self._opened_id, self)
        if (b":method", b"HEAD") in head[:4]:  # pseudo-headers come first
            stream.left = 0
        self.path.send_head(stream, head, end=end)
        self.path.opened(stream)
        self.streams[stream.id] = stream
        stream.sent_all = end
        return stream

    def respond(self, stream: Stream, head: HeaderList, *, end: bool) -> None:
        """Send a response's header list, at a server. Raises the stream's error if it has failed."""
        if stream.error is not None:
            raise stream.error.copy()
        self.path.send_head(stream, head, end=end)
        if end:
            self._ended(stream)

    def inform(self, stream: Stream, status: bytes) -> None:
        """Send an interim response (1xx), at a server."""
        if stream.error is None:
            self.path.send_head(stream, [(b":status", status)], end=False)

    def report(self, stream_id: int, payload: bytes, flags: int = 0) -> None:
        """Send the report on a stream, open or not, at a server, if the peer takes reports."""
        if self._takes_reports and self.phase is not ConnectionPhase.CLOSED:
            self.put(frames.report(stream_id, payload, flags))

    def ping(self, data: bytes) -> None:
        self.h2.ping(data)
        self.collect()

    def retire(self) -> None:
        """Send the first of two GOAWAYs, which announces the end and accepts streams that are on their way.

        The PING after it comes back when the peer has received the GOAWAY; `_on_pong` then sends the second,
        which names the last stream that is served.
        """
        if self.phase is ConnectionPhase.OPEN:
            self._move(ConnectionPhase.RETIRING)
            self._announcing = True
            self.put(frames.goaway(frames.STREAM_ID_MAX, ErrorCode.NO_ERROR))
            self.ping(DRAIN_PING)

    def close(self, error: ConnectionLost, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Send GOAWAY, and fail every stream."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        self.put(frames.goaway(self._accepted_id, code))
        self.lost(error)

    def lost(self, error: ConnectionLost) -> None:
        """Close without sending: fail every stream, and await no more reports."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        self._move(ConnectionPhase.CLOSED)
        self.error = error
        self._backlog.clear()
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.fail(error)
            self._owner.stream_closed(stream)
        self._awaited.give_up()
        self._owner.peer_changed()

    def _move(self, phase: ConnectionPhase) -> None:
        assert phase in MOVES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    # -- what streams ask ---------------------------------------------------------------------

    def send(self, stream: Stream, data: bytes | memoryview, *, end: bool = False) -> memoryview | None:
        """Frame as much of `data` as may go now. Returns the rest, or None. `end` as in
        `Stream.write_nowait`."""
        path = self.path
        length = len(data)
        if length <= limits.FRAME_LEN_MAX and not self.full and length <= path.send_room(stream):
            if length:
                path.send(stream, data, end=end)
                if end:
                    self._ended(stream)
            return None
        rest = memoryview(data)
        while rest and not self.full:
            length = min(len(rest), path.send_room(stream), limits.FRAME_LEN_MAX)
            if length <= 0:
                break
            path.send(stream, rest[:length])
            rest = rest[length:]
        return rest or None

    def enqueue(self, stream: Stream) -> None:
        """Put a stream that has pending bytes into the backlog, if its own window is open."""
        if stream.pending is not None and not stream.queued and self.path.stream_room(stream) > 0:
            stream.queued = True
            self._backlog.append(stream)

    def end(self, stream: Stream) -> None:
        self.path.end(stream)
        self._ended(stream)

    def reset(self, stream: Stream, error: StreamFailed, code: ErrorCode) -> None:
        self.path.reset(stream, code)
        self._close_by_reset(stream, error)

    def credit_stream(self, stream: Stream, length: int) -> None:
        self.path.credit_stream(stream, length)

    # -- what the path needs ------------------------------------------------------------------

    def put(self, data: bytes | memoryview) -> None:
        if not self._out:
            self._owner.output_ready()
        self._out += data

    def collect(self) -> None:
        """Move the bytes that h2 wrote behind those that are there already, so that the order of calls is
        kept."""
        if data := self.h2.data_to_send():
            self.put(data)

    def reset_and_charge(self, stream: Stream, error: StreamFailed, code: ErrorCode) -> None:
        """Reset a stream because of what the peer sent, and charge the reset to the peer's budget."""
        self.charge_reset()
        self.reset(stream, error, code)

    def charge_reset(self) -> None:
        self._floods.by_type[frames.RST_STREAM].spend()

    def check_known(self, stream_id: int) -> None:
        """Check that this stream was opened at some time. Raises ProtocolViolation."""
        if stream_id % 2 != 1 or stream_id > max(self._opened_id, self._accepted_id):
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"a frame of stream {stream_id}, which is idle")

    def check_opening(self, stream_id: int) -> None:
        """Check that HEADERS may come: the stream is new, open, or was reset. Raises ProtocolViolation."""
        if stream_id in self.streams or stream_id in self.reset_ids:
            return
        if self.client or stream_id % 2 != 1 or stream_id <= self._accepted_id:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"HEADERS for stream {stream_id}")

    def received_request(self, stream_id: int, head: HeaderList) -> None:
        self._accepted_id = stream_id
        stream = Stream(stream_id, self)
        self.path.opened(stream)
        refuse = stream_id > self._accept_max or len(self.streams) >= self.config.streams_max
        self.streams[stream_id] = stream
        if refuse:
            self.reset_and_charge(stream, StreamRefused("draining or full"), ErrorCode.REFUSED_STREAM)
            return
        stream.deliver_head(head)
        self._owner.stream_opened(stream)

    def received_end(self, stream: Stream) -> None:
        stream.deliver_end()
        self._close_if_done(stream)

    def received_reset(self, stream: Stream, code: int) -> None:
        if code == ErrorCode.REFUSED_STREAM:
            self._close_by_reset(stream, StreamRefused("refused by peer"))
        else:
            self._close_by_reset(stream, StreamReset(code, by_peer=True))

    def reset_half_closed(self, stream: Stream) -> None:
        """Reset a stream on which the peer sends more after its END_STREAM."""
        code = ErrorCode.STREAM_CLOSED
        self.reset_and_charge(stream, StreamReset(code, by_peer=False), code)

    def received_unexpected_data(self, stream_id: int, length: int) -> bool:
        """Answer DATA of a stream that expects none with RST_STREAM. Returns whether the DATA was such."""
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.received_all:
            return False
        self.path.drop(length)
        if stream is not None:
            self.reset_half_closed(stream)
        else:
            self.check_known(stream_id)
            self.charge_reset()
            self.put(frames.rst_stream(stream_id, ErrorCode.STREAM_CLOSED))
        return True

    # -- what the peer sent -------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Process what the peer sent. Raises ProtocolViolation; GOAWAY is then in the output, and every
        stream has failed."""
        if self.phase is ConnectionPhase.CLOSED:
            return
        self.receives += 1
        try:
            self._receive(data)
            self._flush_to_readers()
            self.path.credit_connection()
            self.pump()
            if len(self._out) > limits.OUT_LEN_MAX:
                raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read our answers")
        except ProtocolViolation as error:
            self.h2.clear_outbound_data_buffer()
            self.close(ConnectionLost(str(error)), error.code)
            raise

    def _receive(self, data: bytes) -> None:
        """Feed h2 runs of frames that are as long as possible; a frame with a handler of ours ends a run."""
        budgets, reset_ids, frame_handlers = self._floods.by_type, self.reset_ids, self._frame_handlers
        data, whole = self._splitter.feed(data)
        fed = done = 0
        for kind, flags, stream_id, start, stop in whole:
            if kind in budgets:
                budgets[kind].spend()
            elif kind > frames.CONTINUATION or (stop - start == frames.HEADER_LEN and not flags & ENDS):
                self._floods.empty_frames.spend()
            take = (self._frame_handlers_of_reset if stream_id in reset_ids else frame_handlers).get(kind)
            if take is not None:
                if fed < start:
                    self.feed(data[fed:start])
                fed = stop if take(flags, stream_id, data[start + frames.HEADER_LEN : stop]) else start
            done = stop
        if fed < done:
            self.feed(data[fed:done])

    def _flush_to_readers(self) -> None:
        """Pass the bytes of this turn on to the readers, those of one stream as one piece."""
        for stream in self.to_flush:
            stream.flush_to_reader()
        self.to_flush.clear()

    def _on_report(self, flags: int, _stream_id: int, payload: bytes) -> bool:
        stream_id, report_payload = frames.parse_report(payload)
        stream = self.streams.get(stream_id)
        if flags & frames.OF_LOAD:
            self._owner.load_told(report_payload)
            if stream is not None and stream.report is not None:
                stream.report.counted()
            return True
        report = self._awaited.pop(stream_id) if stream is None else stream.report
        if report is not None:
            report.deliver(report_payload)
        return True

    def _drop_data(self, _flags: int, _stream_id: int, payload: bytes) -> bool:
        self.path.drop(len(payload))
        return True

    def feed(self, data: bytes) -> None:
        try:
            happened = self.h2.receive_data(data)
        except ProtocolError as error:
            raise ProtocolViolation(ErrorCode(error.error_code), str(error)) from error
        self.collect()
        for event in happened:
            if (handle := self._event_handlers.get(type(event))) is not None:
                handle(event)

    def _on_settings(self, event: events.RemoteSettingsChanged) -> None:
        self.greeted = True
        self._allowed = min(self.h2.remote_settings.max_concurrent_streams, self.config.streams_max)
        self._takes_reports = bool(self.h2.remote_settings.get(frames.TAKES_REPORTS, 0))
        self.path.settings_changed()
        for stream in self.streams.values():
            self.enqueue(stream)
        self._owner.peer_changed()

    def _on_pong(self, event: events.PingAckReceived) -> None:
        if event.ping_data == DRAIN_PING and self._announcing and self.phase is ConnectionPhase.RETIRING:
            self._announcing = False
            self._accept_max = self._accepted_id
            self.put(frames.goaway(self._accept_max, ErrorCode.NO_ERROR))
            self._owner.peer_changed()

    def _on_goaway(self, _flags: int, _stream_id: int, payload: bytes) -> bool:
        last_stream_id, code = frames.parse_goaway(payload)
        if self.phase is ConnectionPhase.OPEN:
            self._move(ConnectionPhase.RETIRING)
        if self.client:
            for stream in [stream for stream in self.streams.values() if stream.id > last_stream_id]:
                self.reset(stream, StreamRefused(f"GOAWAY {code}: not processed"), ErrorCode.CANCEL)
        self._owner.peer_changed()
        return True

    # -- the end of a stream ------------------------------------------------------------------

    def _ended(self, stream: Stream) -> None:
        """Record that this end has sent END_STREAM."""
        stream.sent_all = True
        self._close_if_done(stream)

    def _close_if_done(self, stream: Stream) -> None:
        if stream.received_all and stream.sent_all and self.streams.pop(stream.id, None) is not None:
            self._await_report(stream)
            self._owner.stream_closed(stream)

    def _close_by_reset(self, stream: Stream, error: StreamFailed) -> None:
        self.reset_ids[stream.id] = None
        if len(self.reset_ids) > limits.RESET_IDS_MAX:
            del self.reset_ids[next(iter(self.reset_ids))]
        del self.streams[stream.id]
        if not isinstance(error, StreamRefused):
            self._await_report(stream)
        stream.fail(error)
        self._owner.stream_closed(stream)

    def _await_report(self, stream: Stream) -> None:
        """Await the server's report on a stream that is over, if the server takes, and so sends, reports."""
        if self._takes_reports and stream.report is not None:
            self._awaited.expect(stream.id, stream.report)


# -- the frames of streams ------------------------------------------------------------------------


class FastPath:
    """All frames of streams, built and parsed by hand, beside `h2` (rules 8 to 10).

    h2 spends 140 us on the frames of one question and its answer, and 5-8 us on each DATA frame after. Here a
    stream is what `Stream` says it is, windows are plain integers, and header lists are checked as a whole.
    h2 never hears of a stream; SETTINGS and PING remain its own."""

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
