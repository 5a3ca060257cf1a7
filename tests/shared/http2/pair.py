"""A client's core and a server's core, joined in memory: bytes move only when the test moves them."""

from __future__ import annotations

from collections.abc import Iterator

from shared.http2 import frames
from shared.http2.connection import Connection
from shared.http2.connection_config import ConnectionConfig
from shared.http2.headers import HeaderList
from shared.http2.stream import Stream

REQUEST: HeaderList = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"engine"),
    (b":path", b"/v1/chat/completions"),
]
RESPONSE: HeaderList = [(b":status", b"200"), (b"content-type", b"text/event-stream")]


class End:
    """One core and what it told its owner. `wire` holds what it sent and nobody received yet."""

    def __init__(self, *, client: bool, config: ConnectionConfig) -> None:
        self.now_s = 0.0
        self.opened: list[Stream] = []
        self.closed: list[Stream] = []
        self.peer_changes = 0
        self.loads: list[bytes] = []
        self.wire = b""
        self.connection = Connection(self, client=client, config=config, now=lambda: self.now_s)

    def output_ready(self) -> None:
        pass

    def stream_opened(self, stream: Stream) -> None:
        self.opened.append(stream)

    def stream_closed(self, stream: Stream) -> None:
        self.closed.append(stream)

    def load_told(self, payload: bytes) -> None:
        self.loads.append(payload)

    def peer_changed(self) -> None:
        self.peer_changes += 1

    def flush(self) -> None:
        while not self.connection.paused and (data := self.connection.take_output()):
            self.wire += data
            self.connection.pump()

    def write(self, stream: Stream, data: bytes) -> None:
        """`Stream.write` without the waiting."""
        rest = stream.write_nowait(data)
        if rest is not None:
            stream.pending = rest
            self.connection.enqueue(stream)


class Pair:
    def __init__(
        self, client: ConnectionConfig | None = None, server: ConnectionConfig | None = None
    ) -> None:
        self.client = End(client=True, config=client or ConnectionConfig())
        self.server = End(client=False, config=server or ConnectionConfig())
        self.settle()

    def other(self, end: End) -> End:
        return self.server if end is self.client else self.client

    def move(self, sender: End, size: int | None = None) -> None:
        """Delivers the next `size` bytes (all, if None) that `sender` sent."""
        sender.flush()
        data, sender.wire = (sender.wire, b"") if size is None else (sender.wire[:size], sender.wire[size:])
        if data:
            self.other(sender).connection.receive(data)

    def settle(self) -> None:
        """Until neither has anything to say."""
        for end in (self.client, self.server):
            end.connection.paused = False
            end.connection.pump()
        while True:
            self.client.flush()
            self.server.flush()
            if not self.client.wire and not self.server.wire:
                return
            self.move(self.client)
            self.move(self.server)

    def request(self, *, end: bool = False, head: HeaderList = REQUEST) -> tuple[Stream, Stream]:
        """A stream as both ends see it."""
        ours = self.client.connection.open(head, end=end)
        self.settle()
        return ours, self.server.opened[-1]

    def exchange(self, *, end: bool = False) -> tuple[Stream, Stream]:
        """A stream whose response has begun."""
        ours, theirs = self.request(end=end)
        self.server.connection.respond(theirs, RESPONSE, end=False)
        self.settle()
        return ours, theirs

    def in_flight(self, sender: End) -> Iterator[tuple[int, int, bytes]]:
        """Kind, stream and payload of what `sender` framed and the other has not processed."""
        receiver = self.other(sender).connection
        data = receiver._splitter._partial + sender.wire + bytes(sender.connection._out)
        start = 0
        while start < len(data):
            length = int.from_bytes(data[start : start + 3], "big")
            stream_id = int.from_bytes(data[start + 5 : start + 9], "big")
            yield data[start + 3], stream_id, data[start + 9 : start + 9 + length]
            start += 9 + length

    def check_laws(self) -> None:
        for receiver in (self.client, self.server):
            self._check_windows(receiver, self.other(receiver))

    def _check_windows(self, receiver: End, sender: End) -> None:
        """What the sender may send + what is on its way, either way + what is unread or not yet given
        back = the window's size."""
        data: dict[int, int] = {0: 0}
        given: dict[int, int] = {}
        for kind, stream_id, payload in self.in_flight(sender):
            if kind == frames.DATA:
                data[stream_id] = data.get(stream_id, 0) + len(payload)
                data[0] += len(payload)
        for kind, stream_id, payload in self.in_flight(receiver):
            if kind == frames.WINDOW_UPDATE:
                increment = int.from_bytes(payload, "big")
                given[stream_id] = given.get(stream_id, 0) + increment
        ours, theirs = receiver.connection, sender.connection
        size = ours.config.stream_window_len
        room = theirs.path.connection_room
        assert room >= 0
        assert ours.path.window >= 0
        assert room + data[0] + ours.path.uncredited + given.get(0, 0) == ours.config.connection_window_len
        assert ours.path.window + ours.path.uncredited == ours.config.connection_window_len
        for stream in ours.streams.values():
            assert stream.buffered + stream.uncredited <= size
            far = theirs.streams.get(stream.id)
            if far is None or stream.received_all:
                continue
            kept = stream.buffered + stream.uncredited
            near = theirs.path.stream_room(far) + data.get(stream.id, 0) + kept + given.get(stream.id, 0)
            assert near == size, f"{stream} {far}"
