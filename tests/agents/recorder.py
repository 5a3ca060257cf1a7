"""What goes between an agent and the gateway, byte for byte, kept and read afterwards.

The recorder listens in the gateway's place and passes on all bytes, ends and breaks of connections, both ways
and as they come; it understands nothing of them. When the agent has ended, each connection's bytes are read
as HTTP/1.1, and each request gets the answer that followed it. Keys are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import h11

CHUNK_LEN: Final = 1 << 16
RECORDED_LEN_MAX: Final = 1 << 28
"""The bytes of all connections of a run together that are kept."""
SECRETS: Final = frozenset({"authorization", "x-api-key", "api-key", "cookie"})


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer, as far as they came."""

    at_s: float
    """When its connection's first byte came, or that of the request that followed another one."""
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int | None
    """None where no answer came."""
    answer_headers: Mapping[str, str]
    answer: bytes
    is_whole: bool
    """True if the answer came to its end."""

    @property
    def request_id(self) -> str:
        """The gateway's; empty where it did not answer."""
        return self.answer_headers.get("x-request-id", "")

    @property
    def json(self) -> dict[str, Any]:
        """The request's body; empty where it is no object."""
        try:
            body = json.loads(self.body)
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}


@dataclass(slots=True)
class Wire:
    """The bytes of one connection, each piece with the time at which it came."""

    sent: list[tuple[float, bytes]] = field(default_factory=list)
    received: list[tuple[float, bytes]] = field(default_factory=list)


class Recorder:
    """Listens on a port of its own for connections to another. `on_answer` hears of each piece of an answer,
    before it is passed on."""

    def __init__(self, upstream: int, on_answer: Callable[[bytes], None] = lambda _: None) -> None:
        self.port = 0
        self.on_answer = on_answer
        self._upstream = upstream
        self._wires: list[Wire] = []
        self._open: set[asyncio.Task[None]] = set()
        self._held = 0

    async def serve(self, listens: threading.Event, over: asyncio.Event) -> None:
        """Pass connections on until it is over; then break off those that are left."""
        async with await asyncio.start_server(self._pass_on, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            listens.set()
            await over.wait()
            server.close()
            for connection in self._open:
                connection.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        wire = Wire()
        self._wires.append(wire)
        try:
            there, here = await asyncio.open_connection("127.0.0.1", self._upstream)
            try:
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._pump(reader, here, wire.sent, lambda _: None))
                    ways.create_task(self._pump(there, writer, wire.received, self.on_answer))
            except* OSError:
                pass  # a side is gone, and so must the other be
            finally:
                here.transport.abort()
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kept: list[tuple[float, bytes]],
        hears: Callable[[bytes], None],
    ) -> None:
        """Pass one way's bytes on until its end; raises where a side is gone."""
        while piece := await reader.read(CHUNK_LEN):
            if self._held < RECORDED_LEN_MAX:
                self._held += len(piece)
                kept.append((time.time(), piece))
            hears(piece)
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    @property
    def exchanges(self) -> list[Exchange]:
        """All so far, in the order in which they began."""
        return sorted((each for wire in self._wires for each in read(wire)), key=lambda each: each.at_s)


@contextmanager
def recording(port: int) -> Iterator[Recorder]:
    """A recorder in front of a port, with a thread of its own."""
    recorder, listens = Recorder(port), threading.Event()
    with asyncio.Runner() as runner:
        loop, over = runner.get_loop(), asyncio.Event()
        thread = threading.Thread(target=runner.run, args=(recorder.serve(listens, over),), name="recorder")
        thread.start()
        try:
            listens.wait()
            yield recorder
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()


def read(wire: Wire) -> list[Exchange]:
    """The requests of a connection, each with its answer."""
    asked = list(_requests(wire.sent))
    answers = list(_answers(wire.received, [message.head for message in asked]))
    return [
        _exchange(message, answers[number] if number < len(answers) else None)
        for number, message in enumerate(asked)
    ]


@dataclass(slots=True)
class _Message:
    """A head and what came of its body."""

    at_s: float
    head: Any
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode("latin-1") for name, value in self.head.headers}


def _requests(pieces: list[tuple[float, bytes]]) -> Iterator[_Message]:
    side = h11.Connection(h11.SERVER, max_incomplete_event_size=CHUNK_LEN)
    for message in _messages(side, pieces):
        yield message
        side.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        side.send(h11.EndOfMessage())
        if not _goes_on(side):
            return


def _answers(pieces: list[tuple[float, bytes]], requests: list[Any]) -> Iterator[_Message]:
    side = h11.Connection(h11.CLIENT, max_incomplete_event_size=CHUNK_LEN)
    answers = _messages(side, pieces)
    for head in requests:
        side.send(h11.Request(method=head.method, target=head.target, headers=[("host", "gateway")]))
        side.send(h11.EndOfMessage())
        if (message := next(answers, None)) is None:
            return
        yield message
        if not _goes_on(side):
            return


def _goes_on(side: h11.Connection) -> bool:
    """Turn to the next exchange. False if the connection has no other."""
    if side.our_state is not h11.DONE or side.their_state is not h11.DONE:
        return False
    side.start_next_cycle()
    return True


def _messages(side: h11.Connection, pieces: list[tuple[float, bytes]]) -> Iterator[_Message]:
    """The messages that came. Between two of them their reader turns to the next exchange."""
    message: _Message | None = None
    with contextlib.suppress(h11.RemoteProtocolError):
        for at_s, piece in [*pieces, (time.time(), b"")]:
            side.receive_data(piece)
            while (event := side.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                match event:
                    case h11.Request() | h11.Response():
                        message = _Message(at_s, event)
                    case h11.Data() if message is not None:
                        message.body += event.data
                    case h11.EndOfMessage() if message is not None:
                        message.is_whole = True
                        yield message
                        message = None
                    case h11.ConnectionClosed():
                        return
    if message is not None:
        yield message


def _exchange(request: _Message, answer: _Message | None) -> Exchange:
    headers = {name: "<set>" if name in SECRETS else value for name, value in request.headers.items()}
    return Exchange(
        at_s=request.at_s,
        method=request.head.method.decode(),
        path=request.head.target.decode(),
        headers=headers,
        body=bytes(request.body),
        status=None if answer is None else answer.head.status_code,
        answer_headers={} if answer is None else answer.headers,
        answer=b"" if answer is None else bytes(answer.body),
        is_whole=answer is not None and answer.is_whole,
    )
