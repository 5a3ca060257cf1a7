"""A client that speaks HTTP/1.1 over a connection of its own, and disconnects as its history says."""

from __future__ import annotations

import asyncio
import re
from typing import Final

from tests.histories.draw import End, History
from tests.histories.virtual import Transport, VirtualLoop

LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
LEAST_STAY_S: Final = 0.012
"""The time in which sent data has arrived at every latency, in seconds."""
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Caller(asyncio.Protocol):
    """The client's end of one connection, with the answer so far."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.is_over = False
        """Whether the answer is complete or its connection is gone."""
        self._change = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.is_over = self.is_over or self._is_whole()
        self._change.set()

    def eof_received(self) -> None:
        self.is_over = True
        self._change.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        self._change.set()

    @property
    def status(self) -> int:
        """The HTTP status; 0 before the head has arrived."""
        return int(self.received[9:12]) if b"\r\n\r\n" in self.received else 0

    @property
    def events(self) -> int:
        return self.received.count(b"\n\n")

    @property
    def body(self) -> bytes:
        """The body as far as it has arrived, without chunk framing."""
        head, _, rest = bytes(self.received).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head:
            return rest
        body = b""
        while rest:
            length, _, rest = rest.partition(b"\r\n")
            body += rest[: int(length, 16)]
            rest = rest[int(length, 16) + 2 :]
        return body

    async def until_event(self, number: int) -> None:
        """Wait for so many events or the end of the answer; with 0, for its head."""
        while not self.is_over and not (self.status and self.events >= number):
            self._change.clear()
            await self._change.wait()

    async def until_over(self) -> None:
        while not self.is_over:
            self._change.clear()
            await self._change.wait()

    def _is_whole(self) -> bool:
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found:
            return False
        if (length := _LENGTH.search(head + b"\r\n")) is not None:
            return len(body) >= int(length[1])
        return self.received.endswith(LAST_CHUNK)


async def call(loop: VirtualLoop, port: int, history: History) -> Caller:
    """Send the request, and behave as `history` says. Returns when the connection is closed."""
    transport, protocol = await loop.create_connection(Caller, port=port)
    assert isinstance(protocol, Caller)
    try:
        await _behave(transport, protocol, history)
    finally:
        transport.abort()
    return protocol


async def _behave(transport: Transport, caller: Caller, history: History) -> None:
    after_s = LEAST_STAY_S + history.after_s
    head, body = _head(history), history.body
    match history.end:
        case End.LEAVES_BEFORE_BODY:
            transport.write(head)
            await asyncio.sleep(after_s)
        case End.LEAVES_IN_BODY:
            transport.write(head + body[:20])
            await asyncio.sleep(after_s)
        case End.BODY_NEVER_COMES:
            transport.write(head + body[:20])
            await caller.until_over()
        case End.LEAVES_LATER:
            transport.write(head + body)
            await asyncio.sleep(after_s)
        case End.LEAVES_AT_HEAD:
            transport.write(head + body)
            await caller.until_event(0)
        case End.LEAVES_AT_EVENT:
            transport.write(head + body)
            await caller.until_event(history.events)
        case End.STOPS_READING | End.PAUSES_READING:
            transport.write(head + body)
            await caller.until_event(1)
            transport.pause_reading()
            await asyncio.sleep(4.0 if history.end is End.STOPS_READING else after_s)
            transport.resume_reading()
            await caller.until_over()
        case _:
            transport.write(head + body)
            await caller.until_over()


def _head(history: History) -> bytes:
    headers = {
        "host": "gateway",
        "authorization": f"Bearer {history.key}",
        "x-request-id": history.request_id,
        "content-type": "application/json",
        "content-length": str(len(history.body)),
        **history.headers,
    }
    lines = [f"POST {history.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
