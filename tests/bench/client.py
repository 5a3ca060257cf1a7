"""A load client: HTTP/1.1 on a bare asyncio protocol, some microseconds an event.

It understands what an OpenAI-compatible server sends (fixed length or chunked bodies, SSE) and keeps
nothing but times and the last event, unless it is told to keep all events. It is no general client: an error
ends the request with a reason.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

import msgspec

HEADERS_LEN_MAX: Final = 64 * 1024
EXCHANGE_DEADLINE_S: Final = 1200.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """An OpenAI-compatible base URL, such as `http://127.0.0.1:8000/v1`."""

    url: str
    key: str | None = None
    ca: str | None = None
    """File with the authorities that are trusted, PEM. None: the system's."""

    def request(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a POST request; `headers` are sent besides the usual ones."""
        parts = urlsplit(self.url)
        lines = [
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {parts.netloc}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        if self.key is not None:
            lines.append(f"authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def connect(self) -> LoadConnection:
        parts = urlsplit(self.url)
        if parts.hostname is None:
            raise ValueError(f"not a URL with a host: {self.url!r}")
        tls = ssl.create_default_context(cafile=self.ca) if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(LoadConnection, parts.hostname, port, ssl=tls)
        return connection


@dataclass(slots=True)
class TimedRequest:
    """One request and its answer. Times are seconds on `time.perf_counter`."""

    sent_at: float
    status: int = 0
    event_times: list[float] = field(default_factory=list)
    """The arrival of each SSE data event but `[DONE]`."""
    ended_at: float = 0.0
    last_event: bytes = b""
    events: list[bytes] | None = None
    """All data events; None unless they are kept."""
    saw_done: bool = False
    body: bytes = b""
    """The body of an answer that is no event stream."""
    error: str | None = None

    @property
    def usage(self) -> TokenCounts | None:
        raw = self.last_event.removeprefix(b"data: ") if self.event_times else self.body
        try:
            return msgspec.json.decode(raw, type=_WithUsage).usage
        except msgspec.DecodeError:
            return None


class TokenCounts(msgspec.Struct):
    """The part of a server's usage that every server sends: some leave the details out, or set them to
    null."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def computed(self) -> int:
        """The tokens that steps computed: the prompt without what was cached, and all but the last token."""
        cached = self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens
        return self.prompt_tokens - (cached or 0) + self.completion_tokens - 1


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _WithUsage(msgspec.Struct):
    usage: TokenCounts | None = None


class LoadConnection(asyncio.Protocol):
    """A kept-alive connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: TimedRequest | None = None
        self._done: asyncio.Future[None] | None = None
        self._buffer = b""
        self._body_left: int | None = None  # None for a chunked body
        self._chunk_left = 0
        self._in_body = False
        self._is_sse = False
        self._event = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    @property
    def is_open(self) -> bool:
        """False from when the server has closed it, or this side has."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, deadline_s: float = EXCHANGE_DEADLINE_S) -> TimedRequest:
        self.begin(request)
        return await self.finished(deadline_s)

    def begin(self, request: bytes, *, keeps_events: bool = False) -> TimedRequest:
        """Send a request. The returned value fills as the answer comes."""
        assert self._transport is not None, "not connected"
        assert self._exchange is None, "one exchange at a time"
        self._buffer = self._event = b""
        self._in_body = False
        self._exchange = exchange = TimedRequest(time.perf_counter(), events=[] if keeps_events else None)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return exchange

    async def finished(self, deadline_s: float = EXCHANGE_DEADLINE_S) -> TimedRequest:
        """Wait for the end of the request that was begun, and return it."""
        exchange = self._exchange
        assert exchange is not None, "begin one first"
        assert self._done is not None
        try:
            async with asyncio.timeout(deadline_s):
                await self._done
        except TimeoutError:
            exchange.error = "deadline"
        finally:
            self._exchange = None
        return exchange

    def pause_reading(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(error=f"connection lost: {exc}" if exc else "connection closed")

    def data_received(self, data: bytes) -> None:
        if self._exchange is None or self._exchange.ended_at:
            return
        self._buffer += data
        if not self._in_body and not self._read_headers():
            return
        now = time.perf_counter()
        if self._body_left is None:
            self._read_chunks(now)
        else:
            self._take(self._buffer, now)
            self._body_left -= len(self._buffer)
            self._buffer = b""
            if self._body_left <= 0:
                self._end()

    def _read_headers(self) -> bool:
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            if len(head) > HEADERS_LEN_MAX:
                self._end(error="headers too long")
            return False
        assert self._exchange is not None
        lines = head.lower().lstrip().split(b"\r\n")  # the CRLF after the last answer may come late
        self._exchange.status = int(lines[0].split()[1])
        headers = dict(line.split(b":", 1) for line in lines[1:])
        chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        self._body_left = None if chunked else int(headers.get(b"content-length", b"0"))
        self._is_sse = b"text/event-stream" in headers.get(b"content-type", b"")
        self._buffer, self._in_body, self._chunk_left = rest, True, 0
        return True

    def _read_chunks(self, now: float) -> None:
        buffer, at = self._buffer, 0
        while True:
            if self._chunk_left == 0:
                line_end = buffer.find(b"\r\n", at)
                if line_end < 0:
                    break
                size = int(buffer[at:line_end].split(b";")[0] or b"0", 16)
                if size == 0:
                    self._end()
                    return
                self._chunk_left, at = size + 2, line_end + 2
            taken = min(self._chunk_left, len(buffer) - at)
            if taken == 0:
                break
            payload_len = min(taken, self._chunk_left - 2)
            if payload_len > 0:
                self._take(buffer[at : at + payload_len], now)
            self._chunk_left -= taken
            at += taken
        self._buffer = buffer[at:]

    def _take(self, payload: bytes, now: float) -> None:
        assert self._exchange is not None
        if not self._is_sse:
            self._exchange.body += payload
            return
        *events, self._event = (self._event + payload).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._exchange.saw_done = True
            elif event.startswith(b"data: "):
                self._exchange.event_times.append(now)
                self._exchange.last_event = event
                if self._exchange.events is not None:
                    self._exchange.events.append(event)

    def _end(self, error: str | None = None) -> None:
        if self._exchange is None or self._done is None or self._done.done():
            return
        exchange = self._exchange
        exchange.ended_at = time.perf_counter()
        if error is None and exchange.status != 200:
            error = f"HTTP {exchange.status}: {exchange.body[:200]!r}"
        if error is None and self._is_sse and not exchange.saw_done:
            error = f"the stream ended without [DONE]: {exchange.last_event[:200]!r}"
        exchange.error = error
        self._done.set_result(None)
