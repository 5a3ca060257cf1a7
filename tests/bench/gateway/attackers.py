"""The sender of an attack's requests, over plain sockets, which tells the outcome of each.

Sockets have small receive buffers, so that an answer which a sender does not read stays with the server.

    python -m tests.bench.gateway.attackers --url http://127.0.0.1:8000

runs a sender in a process of its own, which the kernel lets run only while a core is idle: it stands for
other machines, whose bodies cost the services no CPU time before they arrive. It reads `prepare NAME`, `go`
and `cue` from its standard input, a line each, and answers `prepare` with an empty line and each `go`, at the
attack's end, with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import urlsplit

import msgspec

from shared.process.loops import loop_factory
from tests.bench.gateway.attack import Attack, Ends
from tests.bench.gateway.attacks import ATTACKS

DEADLINE_S: Final = 120.0
"""The longest time that an attack may take, in seconds. One of its requests hangs if it takes longer."""
RECEIVE_BUFFER_LEN: Final = 16 * 1024
READ_LEN: Final = 64 * 1024
WRITE_LEN: Final = 256 * 1024
ANSWER_LEN_MAX: Final = 16 * 1024 * 1024
"""Bytes of a sender's line of JSON. It has some two hundred for each request."""
KEPT_LEN: Final = 8 * 1024
"""Bytes kept of an answer's beginning, for its status, and as many of its end, for its error."""


class RequestOutcome(msgspec.Struct, frozen=True):
    """The outcome of one request."""

    request_id: str
    status: int | None
    """The status of the answer. None when the connection ended before there was one."""
    answer_len: int
    """Bytes read of the answer, head included."""
    sent_len: int
    """Bytes sent of the body before the answer's end."""
    code: str | None
    """The code of the error that was the answer, or that ended it. None without an error."""
    is_stream: bool
    is_done: bool
    """True if a stream was read to its `[DONE]`."""


@dataclass(slots=True)
class _Received:
    head: bytes = b""
    tail: bytes = b""
    length: int = 0

    def append(self, data: bytes) -> None:
        self.length += len(data)
        self.head += data[: KEPT_LEN - len(self.head)]
        self.tail = (self.tail + data)[-KEPT_LEN:]

    @property
    def is_whole(self) -> bool:
        """True if an answer with a Content-Length has been read to its end. The server may keep the
        connection open."""
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


_TRUSTING: Final = ssl.create_default_context()
_TRUSTING.check_hostname = False
_TRUSTING.verify_mode = ssl.CERT_NONE  # an attacker tells nobody a secret


async def send(
    attack: Attack, url: str, cue: asyncio.Event, tag: str, body: bytes | None = None
) -> list[RequestOutcome]:
    """Run an attack on the gateway at `url` to its end.

    `cue` ends the requests that end on cue. Request ids begin with `tag`. `body` is the attack's, where it
    was made before. Raises TimeoutError.
    """
    made = attack.body() if body is None else body
    room = asyncio.Semaphore(attack.at_once)

    async def one(number: int) -> RequestOutcome:
        async with room:
            return await _Request(attack, url, made, f"{tag}-{number}", number).run(cue)

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

    async def run(self, cue: asyncio.Event) -> RequestOutcome:
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
        return RequestOutcome(
            self._request_id,
            received.status,
            received.length,
            self._sent_len,
            received.code,
            b"text/event-stream" in received.head,
            b"data: [DONE]" in received.tail,
        )

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_LEN)
        await asyncio.get_running_loop().sock_connect(sock, (self._address.hostname, self._address.port))
        tls = (_TRUSTING, self._address.hostname) if self._address.scheme == "https" else (None, None)
        return await asyncio.open_connection(sock=sock, limit=READ_LEN, ssl=tls[0], server_hostname=tls[1])

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
        """The part of the body that is sent, framed and in pieces for the socket."""
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
                self._received.append(data)


def named(name: str) -> Attack:
    """The attack of this name."""
    return next(attack for attack in ATTACKS if attack.name == name)


class _Sender:
    """The sender process: it carries out the orders on its standard input."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._attack = ATTACKS[0]
        self._body = b""
        self._cue = asyncio.Event()
        self._sent = 0
        self._sending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Read and carry out orders until the standard input ends."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            order, _, name = line.decode().strip().partition(" ")
            match order:
                case "prepare":
                    self._attack = named(name)
                    self._body = self._attack.body()
                    _write_line(b"")
                case "go":
                    self._cue = asyncio.Event()
                    self._sending = asyncio.create_task(self._send())
                case "cue":
                    self._cue.set()

    async def _send(self) -> None:
        self._sent += 1
        outcomes = await send(self._attack, self._url, self._cue, f"a{self._sent}", self._body)
        _write_line(msgspec.json.encode(outcomes))


def _write_line(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


class Sender:
    """A sender in a process of its own."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders = process.stdin
        self._answers = process.stdout

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, url: str) -> AsyncIterator[Self]:
        argv = [sys.executable, "-m", "tests.bench.gateway.attackers", "--url", url]
        process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, limit=ANSWER_LEN_MAX)
        try:
            yield cls(process)
        finally:
            process.kill()
            await process.wait()

    async def prepare(self, attack: Attack) -> None:
        """Make the attack's body in the sender's process."""
        self._orders.write(f"prepare {attack.name}\n".encode())
        await self._answers.readline()

    async def send(self, cue: asyncio.Event) -> list[RequestOutcome]:
        """Send the attack that was prepared. `cue` is passed on. Raises EOFError when the sender failed."""
        self._orders.write(b"go\n")
        passing = asyncio.create_task(self._pass_on(cue))
        try:
            return msgspec.json.decode(await self._answers.readuntil(b"\n"), type=list[RequestOutcome])
        finally:
            passing.cancel()

    async def _pass_on(self, cue: asyncio.Event) -> None:
        await cue.wait()
        self._orders.write(b"cue\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="the gateway's, without /v1")
    options = parser.parse_args()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_Sender(options.url).run())


if __name__ == "__main__":
    main()
