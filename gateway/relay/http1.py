"""HTTP/1.1 to the engines, on aiohttp's client, with the interface of `shared.http2.client.Http2Transport`.

httpx's own transport was measured and is not used: httpcore walks all its connections twice, one inside the
other, for every request (8 ms of CPU each with 256 open), and parses in Python. The same load through
aiohttp's client and its parser in C costs a fraction.
"""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import httpx
from aiohttp.connector import AddrInfoType
from yarl import URL

from shared.http2.client import NO_TIMEOUTS, Timeouts
from shared.http2.report import Report

IDLE_S: Final = 15.0
"""The time for which an unused connection is kept, in seconds: below any engine's own limit, or requests
would be sent into closed sockets."""
RECEIVE_BUFFER_LEN: Final = 128 * 1024
"""SO_RCVBUF in bytes. An answer that the client does not read waits there, and the kernel's default grows to
megabytes."""
READ_BUFFER_LEN: Final = 32 * 1024
"""Bytes of aiohttp's own buffer of an answer; it stops reading at twice this."""
PIECE_LEN: Final = 64 * 1024
URLS_MAX: Final = 1024
_OWN_HEADERS: Final = frozenset({"user-agent", "accept", "accept-encoding"})
"""Headers that aiohttp would add."""


class Http1Transport:
    """A transport over HTTP/1.1, made in a running loop. It has as many connections as requests in flight:
    quotas and queues throttle, not the pool."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_end.append(_on_connected)
        tracing.on_connection_reuseconn.append(_on_connected)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_S, socket_factory=_socket, ssl=ssl_context or True
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BUFFER_LEN,
            skip_auto_headers=_OWN_HEADERS,
            trace_configs=[tracing],
        )

    async def exchange(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[bytes, bytes]],
        content: bytes,
        *,
        timeouts: Timeouts = NO_TIMEOUTS,
        connected: Callable[[], None] | None = None,
        report: Report | None = None,
    ) -> Http1ResponseStream:
        """Send a request, and wait for the response's headers. The caller closes the response.

        Of the timeouts only `connect_s` is applied. `connected` is called once there is a connection, new or
        kept: what fails before was not dispatched. No report comes over HTTP/1.1. Raises httpx's errors.
        """
        try:
            answer = await self._session.request(
                method,
                _url(url),
                data=_sendable(content),
                headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
                timeout=aiohttp.ClientTimeout(total=None, connect=timeouts.connect_s),
                allow_redirects=False,
                trace_request_ctx=connected,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error) from error
        return Http1ResponseStream(answer)

    async def aclose(self) -> None:
        await self._session.close()


class Http1ResponseStream:
    """A response whose body is still to be read. Closing it before its end closes the connection."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.status: Final = answer.status
        self.headers: Final[Mapping[str, str]] = answer.headers
        self._answer = answer

    async def read(self) -> bytes | None:
        """All bytes that have come, at least one. None at the end."""
        try:
            return await self._answer.content.readany() or None
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error) from error

    async def pass_on(self, accept: Callable[[bytes], bool]) -> bool:
        """Call `accept` as `shared.http2.stream.Stream.pass_on` does, with one read after the other."""
        while (data := await self.read()) is not None:
            if not accept(data):
                return True
        return False

    async def aclose(self) -> None:
        self._answer.close()  # without effect on a connection that the session took back at the answer's end


def _sendable(content: bytes) -> bytes | io.BytesIO | None:
    """The content for aiohttp. A large body is a file to it, sent in pieces, so that copying it does not hold
    up the event loop."""
    return io.BytesIO(content) if len(content) > PIECE_LEN else content or None


@lru_cache(maxsize=URLS_MAX)
def _url(text: str) -> URL:
    return URL(text, encoded=True)


async def _on_connected(_session: object, context: SimpleNamespace, _params: Any) -> None:
    if (connected := context.trace_request_ctx) is not None:
        connected()


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_LEN)
    return made


def _translated(error: Exception) -> httpx.TransportError:
    text = f"{type(error).__name__}: {error}"
    match error:
        case aiohttp.ConnectionTimeoutError() | asyncio.TimeoutError():
            return httpx.ConnectTimeout(text)
        case aiohttp.ClientConnectorError():
            return httpx.ConnectError(text)
        case aiohttp.ClientPayloadError():
            return httpx.RemoteProtocolError(text)
        case _:
            return httpx.ReadError(text)
