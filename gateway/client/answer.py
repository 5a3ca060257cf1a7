"""The client's end of an answer: one head, then bytes under backpressure.

aiohttp reads the requests and keeps the connections; an answer's bytes are framed here. aiohttp's own
response lets a handler change headers until they are sent, and costs a twentieth of a unary request's CPU
time.

Rules:

1. An answer that is whole when it begins has its length declared. Any other is chunked or, to HTTP/1.0,
   ends with the connection.
2. The head and the first of the body are one write.
3. At most `PIECE_LEN` bytes are written at once: TLS keeps a buffer as large as what it was given for as long
   as the connection lasts.
4. No value of the head holds a line end, so none can begin a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion, HttpVersion10, HttpVersion11

from gateway.client.blocked import BlockedSpan, note_blocked
from gateway.client.deadlines import Watch
from gateway.client.responses import error_response
from gateway.endpoints.dialect import Dialect
from shared.process.clock import SYSTEM_CLOCK
from shared.process.listening import SERVER
from shared.wire.errors import ApiError, SlowClient
from shared.wire.http import ClientGone
from shared.wire.request_body import send_continue

BODILESS: Final = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
STATUS_LINES_MAX: Final = 1024
PIECE_LEN: Final = 64 * 1024
_SERVER_LINE: Final = f"server: {SERVER}"
_CHUNK: Final = b"%x\r\n%b\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Begun(web.StreamResponse):
    """The response that aiohttp is given for an answer whose bytes it does not write: the status, and whether
    the connection is kept. It is not mutable, so that many answers share one."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        super().__init__(status=status)
        self._is_kept = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._is_kept

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        assert not data


class Client:
    """The sink (`gateway.client.interface.Sink`) of an answer over HTTP/1."""

    __slots__ = (
        "_is_stream", "_monotonic", "_protocol", "_request", "_watch", "blocked", "finished",
        "is_chunked", "response", "slow_client_s", "status",
    )  # fmt: skip

    def __init__(
        self,
        request: web.BaseRequest,
        watch: Watch,
        slow_client_s: float,
        monotonic: Callable[[], float] = SYSTEM_CLOCK.monotonic,
    ) -> None:
        self._request = request
        self._monotonic = monotonic
        self._protocol = request.protocol
        self._watch = watch
        self.is_chunked = False
        """True if each piece of the answer is a chunk."""
        self._is_stream = False
        self.slow_client_s = slow_client_s
        self.blocked: list[BlockedSpan] = []
        self.response: web.StreamResponse | None = None
        """The response that aiohttp is given. None until it has begun, or was refused."""
        self.status: int | None = None
        """The status of an answer that has begun, which can no longer be changed. None until then."""
        self.finished = False

    @property
    def is_gone(self) -> bool:
        """True if the connection is broken."""
        transport = self._protocol.transport
        return transport is None or transport.is_closing()

    async def go_on(self) -> None:
        """Tell a client that waits for it to send the body."""
        await send_continue(self._request.writer)

    def refuse(self, error: ApiError, headers: Mapping[str, str], dialect: Dialect, *, closes: bool) -> None:
        """Answer with an error, where no answer has begun. aiohttp writes it."""
        assert self.status is None
        self.response = error_response(error, headers, dialect)
        if closes:
            self.response.force_close()

    async def begin(self, status: int, headers: Mapping[str, str], body: bytes, *, whole: bool) -> None:
        """Write the head and the first bytes of the body, or all of the body when `whole`. `headers` have the
        content's type and nothing of the framing. Raises ClientGone."""
        assert self.status is None
        request = self._request
        version, keep_alive = request.version, request.keep_alive
        lines = [_status_line(version, status), *map(": ".join, headers.items())]
        if status in BODILESS:
            body = b""
        elif whole:
            lines.append(f"content-length: {len(body)}")
            body = body if request.method != "HEAD" else b""
        elif version >= HttpVersion11:
            lines.append("transfer-encoding: chunked")
            self.is_chunked = True
        else:
            keep_alive = False
        lines += f"date: {rfc822_formatted_time()}", _SERVER_LINE
        if not keep_alive:
            lines.append("connection: close")
        elif version == HttpVersion10:
            lines.append("connection: keep-alive")
        text = "".join(lines)
        if "\n" in text or "\r" in text:
            raise ValueError("a header's value holds a line end")
        self.response, self.status = _begun(status, keep_alive), status
        self._is_stream = headers["content-type"].startswith("text/event-stream")
        first = _CHUNK % (len(body), body) if body and self.is_chunked else body
        head = "\r\n".join([*lines, "", ""]).encode()
        request.writer.output_size = len(head)  # how aiohttp's error handling knows that it comes too late
        room = max(0, PIECE_LEN - len(head))
        if not self.write_framed(head + first[:room]):
            await self.drain()
        for at in range(room, len(first), PIECE_LEN):  # no copy of a long body, which many answers may share
            if not self.write_framed(first[at : at + PIECE_LEN]):
                await self.drain()

    def write_nowait(self, data: bytes) -> bool:
        """Gives `data`, which is not empty, to the transport, at once. Returns whether there is room for
        more; where there is none, wait for `drain` first. Raises ClientGone. This is `write_framed`, in a
        frame less, as it runs once per event."""
        protocol = self._protocol
        transport = protocol.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        transport.write(_CHUNK % (len(data), data) if self.is_chunked else data)
        return not protocol.writing_paused

    async def drain(self) -> None:
        """Wait until the transport has room again. Raises ClientGone; the watch raises SlowClient when the
        client does not read."""
        self._watch.expect(self.slow_client_s, SlowClient, "The client stopped reading its answer.")
        began_s = self._monotonic()
        try:
            await self._request.writer.drain()
        except ConnectionError:
            raise ClientGone from None
        finally:
            note_blocked(self.blocked, began_s, self._monotonic())

    async def write(self, data: bytes) -> None:
        if not self.write_nowait(data):
            await self.drain()

    async def finish(self) -> None:
        assert self.status is not None
        if self.is_chunked and not self.write_framed(_LAST_CHUNK):
            await self.drain()
        self.finished = True

    async def fail(self, error: ApiError, event: bytes | None) -> None:
        """End an answer that has begun and is not finished. `event` is the error event for a stream; None
        where no event may be appended."""
        assert not self.finished
        assert self.status is not None
        if self._is_stream and event is not None and not isinstance(error, SlowClient):
            self.write_nowait(event)
            if self.is_chunked:
                self.write_framed(_LAST_CHUNK)
            return
        self.response = _begun(self.status, False)
        if (transport := self._protocol.transport) is not None:
            transport.abort()

    def write_framed(self, data: bytes) -> bool:
        """Give bytes with their framing to the transport, as aiohttp's `StreamWriter.write` does, without the
        checks that `begin` has made. Returns and raises as `write_nowait` does."""
        protocol = self._protocol
        transport = protocol.transport
        if transport is None or transport.is_closing():
            raise ClientGone
        transport.write(data)
        return not protocol.writing_paused


@lru_cache(maxsize=STATUS_LINES_MAX)
def _begun(status: int, keep_alive: bool) -> Begun:
    return Begun(status, keep_alive=keep_alive)


@lru_cache(maxsize=STATUS_LINES_MAX)
def _status_line(version: HttpVersion, status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # an engine may answer with any number
        phrase = ""
    return f"HTTP/{version.major}.{version.minor} {status} {phrase}"
