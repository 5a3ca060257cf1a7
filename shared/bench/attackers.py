"""Sends an attack's requests over plain sockets, and tells what became of each.

    python -m shared.bench.attackers NAME --url http://127.0.0.1:8000

runs one in a process of its own, so that making bodies of megabytes takes nothing from whom is measured.
Sockets have small receive buffers: what a sender does not read stays with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

from shared.bench.attacks import ATTACKS, Attack, Ends
from shared.loops import loop_factory

DEADLINE_S: Final = 120.0
"""After so long an attack is given up: one of its requests hangs."""
RECEIVE_BUFFER_LEN: Final = 16 * 1024
READ_LEN: Final = 64 * 1024
WRITE_LEN: Final = 256 * 1024
KEPT_LEN: Final = 8 * 1024
"""Bytes of an answer that are kept of its beginning and of its end, for its status and its error."""


class Outcome(msgspec.Struct, frozen=True):
    """What one request came to."""

    request_id: str
    status: int | None
    """None when the sender left, or was cut off, before there was an answer."""
    answer_len: int
    """Bytes of the answer that were read, its head included."""
    sent_len: int
    """Bytes of the body that were sent before the answer's end."""
    code: str | None
    """That of the error that was the answer, or that ended it."""
    is_done: bool
    """Whether a stream was read to its `[DONE]`."""


@dataclass(slots=True)
class _Received:
    head: bytes = b""
    tail: bytes = b""
    length: int = 0

    def take(self, data: bytes) -> None:
        self.length += len(data)
        self.head += data[: KEPT_LEN - len(self.head)]
        self.tail = (self.tail + data)[-KEPT_LEN:]

    @property
    def is_whole(self) -> bool:
        """Whether an answer of a stated length is there; the server may leave its connection open."""
        head, found, _ = self.head.lower().partition(b"\r\n\r\n")
        _, is_stated, value = head.partition(b"\r\ncontent-length: ")
        if not (found and is_stated):
            return False
        return self.length >= len(head) + len(found) + int(value.partition(b"\r\n")[0])

    @property
    def status(self) -> int | None:
        return int(self.head.split(b" ", 2)[1]) if self.head.startswith(b"HTTP/1.") else None

    @property
    def code(self) -> str | None:
        _, found, rest = self.tail.partition(b'"code":"')
        return rest.partition(b'"')[0].decode() if found else None


async def send(attack: Attack, url: str, cue: asyncio.Event, tag: str = "") -> list[Outcome]:
    """Run an attack on a gateway at `url`, to its end. `cue` ends the requests that wait for it; `tag` goes
    into the requests' ids, after the attack's own name. Raises TimeoutError."""
    body = attack.body()
    room = asyncio.Semaphore(attack.at_once)

    async def one(number: int) -> Outcome:
        async with room:
            return await _Request(attack, url, body, f"{tag}-{number}", number).run(cue)

    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.gather(*(one(number) for number in range(attack.count)))


class _Request:
    def __init__(self, attack: Attack, url: str, body: bytes, request_id: str, number: int) -> None:
        self._attack = attack
        self._address = urlsplit(url)
        self._body = body
        self._request_id = request_id
        self._key = attack.who[number % len(attack.who)].value
        self._received = _Received()
        self._sent_len = 0

    async def run(self, cue: asyncio.Event) -> Outcome:
        reader, writer = await self._connect()
        sending = asyncio.create_task(self._send(writer))
        try:
            if self._attack.ends is Ends.AT_ONCE:
                await sending
            elif self._attack.ends is Ends.ON_CUE:
                await self._until(cue, reader)
            else:
                await self._read(reader)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()
        received = self._received
        return Outcome(
            self._request_id,
            received.status,
            received.length,
            self._sent_len,
            received.code,
            b"data: [DONE]" in received.tail,
        )

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_LEN)
        await asyncio.get_running_loop().sock_connect(sock, (self._address.hostname, self._address.port))
        return await asyncio.open_connection(sock=sock, limit=READ_LEN)

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(self._head())
            for piece in self._pieces():
                writer.write(piece)
                await writer.drain()
                self._sent_len += len(piece)

    def _head(self) -> bytes:
        attack = self._attack
        lines = [
            f"POST {attack.path} HTTP/1.1",
            f"host: {self._address.netloc}",
            f"authorization: Bearer {self._key}",
            f"x-request-id: {self._request_id}",
            "content-type: application/json",
            "connection: close",
            *(f"{name}: {value}" for name, value in attack.headers.items()),
            f"content-length: {len(self._body)}"
            if attack.chunk_len is None
            else "transfer-encoding: chunked",
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    def _pieces(self) -> Iterator[bytes]:
        """The body as it is written, so much of it as is ever sent."""
        body = self._body[: int(len(self._body) * self._attack.share_sent)]
        if (size := self._attack.chunk_len) is None:
            yield from (body[at : at + WRITE_LEN] for at in range(0, len(body), WRITE_LEN))
            return
        chunks = [
            b"%x\r\n%b\r\n" % (len(part := body[at : at + size]), part) for at in range(0, len(body), size)
        ]
        framed = b"".join(chunks) + b"0\r\n\r\n"
        yield from (framed[at : at + WRITE_LEN] for at in range(0, len(framed), WRITE_LEN))

    async def _until(self, cue: asyncio.Event, reader: asyncio.StreamReader) -> None:
        cued = asyncio.create_task(cue.wait())
        reading = asyncio.create_task(self._read(reader)) if self._attack.reads else cued
        try:
            await asyncio.wait({cued, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cued.cancel()
            reading.cancel()
            await asyncio.gather(cued, reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while not self._received.is_whole and (data := await reader.read(READ_LEN)):
                self._received.take(data)


def named(name: str) -> Attack:
    """The attack of this name among all."""
    return next(attack for attack in ATTACKS if attack.name == name)


async def _main(options: argparse.Namespace) -> Sequence[Outcome]:
    cue = asyncio.Event()
    asyncio.get_running_loop().call_later(options.cue_s, cue.set)
    return await send(named(options.name), options.url, cue, tag=options.tag)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the attack's name in shared.bench.attacks")
    parser.add_argument("--url", required=True, help="the gateway's, without /v1")
    parser.add_argument("--cue-s", type=float, required=True, help="seconds until requests that wait leave")
    parser.add_argument("--tag", default="attack", help="begins the requests' ids")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        sys.stdout.buffer.write(msgspec.json.encode(runner.run(_main(parser.parse_args()))))


if __name__ == "__main__":
    main()
