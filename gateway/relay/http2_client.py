"""The gateway's end of the hop by HTTP/2.

    async with Http2Transport() as transport:
        response = await transport.exchange("POST", url, headers, body)
        while (data := await response.read()) is not None: ...
        await response.aclose()

Promises.

- A response that is left before its end, and a call that is cancelled before its headers, reset their stream:
  the server knows at once.
- A request that the server did not process (GOAWAY, REFUSED_STREAM) is sent again, on another connection if
  need be, `ATTEMPTS_MAX` times; then StreamRefused says that repeating it is safe. No other request is ever
  repeated.
- `http://` is HTTP/2 with prior knowledge; `https://` must agree on `h2` by ALPN. There is no fall-back: a
  server that does not speak HTTP/2 is NotHttp2.
- `connect_s` bounds the wait for a connection with a free stream; the caller bounds all other waits. An
  attempt to connect ends after the watch's `greeting_timeout_s`, or later if a waiting request's `connect_s`
  is longer.
- `connected` is called once there is a connection with room: whatever fails before was not dispatched.

The pulse of a connection: PINGs while streams are open. They find a server that has stopped, or is cut off,
within seconds. TCP takes minutes, and a stream that waits for bytes cannot tell. A server answers PINGs from
its event loop, whatever its streams wait for. Any bytes count as an answer. Time is counted in beats, not by
the clock: a client that was itself held up, by its own work or by its machine, finds one beat gone when it
goes on, and the server's answer in its buffer before the next.

The connections to one origin are a pool, with the queue of requests that wait for a stream. Streams are
assigned synchronously (`_serve`), whenever something changed: a stream ended, SETTINGS or GOAWAY came, a
connection was made or lost. Making a connection is a task of the pool's own, one at a time; no request owns
it, so a request that is cancelled cancels nothing else. Its rules:

1. The first connection with room is used, so that the connections that the load does not need fall idle and
   expire.
2. Requests wait in one queue; a stream is opened for the first of them as soon as there is room.
3. A connection is made only while requests wait, and there are never more than `connections_max`.
4. A failed connection attempt fails all waiting requests, unless there are connections left that will serve
   them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import TracebackType
from typing import Final

from yarl import URL

from gateway.relay.hop_errors import (
    Draining,
    HopError,
    NoConnection,
    NoConnectionInTime,
    NotHttp2,
    Unsendable,
)
from shared.http2.connection import Connection, ConnectionPhase
from shared.http2.connection_config import ConnectionConfig, PulseConfig, WatchConfig
from shared.http2.connection_errors import StreamFailed, StreamRefused
from shared.http2.endpoint import ConnectionEndpoint
from shared.http2.headers import BadHeader, HeaderList, Headers, header_list
from shared.http2.stream import Report, Stream
from shared.process.clock import SYSTEM_CLOCK, Clock

# -- the pulse ------------------------------------------------------------------------------------


PING: bytes = b"\0\0pulse\0"


class Pulse:
    """The pulse of one connection. `beat` is called once per interval."""

    __slots__ = ("_beats_max", "_connection", "_heard", "_is_asked", "silent_beats")

    def __init__(self, connection: Connection, config: PulseConfig) -> None:
        self._connection = connection
        self._beats_max = -(-config.timeout_s // config.interval_s)
        self._heard = 0
        self._is_asked = False
        self.silent_beats = 0
        """The beats without a byte since the PING that is unanswered."""

    def beat(self) -> bool:
        """Look whether the server lives, and ask. Returns False when it has not answered in time."""
        connection = self._connection
        if connection.receives != self._heard or not connection.streams:
            self._heard, self._is_asked, self.silent_beats = connection.receives, False, 0
        elif self._is_asked:
            self.silent_beats += 1
        if connection.streams and not self._is_asked:
            self._is_asked = True
            connection.ping(PING)
        return self.silent_beats < self._beats_max


# -- the pool -------------------------------------------------------------------------------------


WAITING_MAX: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class QueuePlace:
    """A place in the queue, and what to open once there is room."""

    head: HeaderList
    end: bool
    within_s: float | None
    opened: asyncio.Future[Stream]


class OriginPool:
    def __init__(
        self, connect: Callable[[OriginPool, float], Awaitable[ConnectionEndpoint]], connections_max: int
    ) -> None:
        """`connect` is called with the pool and the longest time that a waiting request allows for it, in
        seconds."""
        assert connections_max > 0
        self._connect = connect
        self._connections_max = connections_max
        self._waiting: deque[QueuePlace] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self.endpoints: list[ConnectionEndpoint] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> bool:
        return bool(self.endpoints or self._waiting or self._connecting)

    def open_now(self, head: HeaderList, *, end: bool) -> Stream | None:
        """A stream on which `head` was sent. None when there is no room, or others wait for it."""
        if not self._waiting and (endpoint := self._with_room()) is not None:
            return endpoint.connection.open(head, end=end)
        return None

    async def open(self, head: HeaderList, *, end: bool, within_s: float | None) -> Stream:
        """A stream on which `head` was sent, once its turn has come. Raises NoConnection,
        NoConnectionInTime."""
        if len(self._waiting) >= WAITING_MAX:
            raise NoConnectionInTime("too many requests wait for a stream")
        place = QueuePlace(head, end, within_s, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._serve()
        awaited = "stream became free" if self.endpoints else "connection"
        try:
            async with asyncio.timeout(within_s):
                return await place.opened
        except TimeoutError:
            self._leave(place)
            raise NoConnectionInTime(f"no {awaited} in time") from None
        except asyncio.CancelledError:
            self._leave(place)
            raise
        finally:
            del place  # it may hold an error, whose traceback holds this frame

    def _leave(self, place: QueuePlace) -> None:
        """Leave the queue. A stream that was opened for the place already is reset."""
        if place in self._waiting:
            self._waiting.remove(place)
        if place.opened.done() and not place.opened.cancelled() and place.opened.exception() is None:
            place.opened.result().reset()

    def changed(self) -> None:
        """Note that a connection has changed. Connections call it, at any time."""
        self.endpoints = [one for one in self.endpoints if one.connection.phase is not ConnectionPhase.CLOSED]
        self._serve()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        self._fail_waiting(NoConnection("the transport is closed"))
        for endpoint in list(self.endpoints):
            endpoint.close("the transport is closed")

    def _with_room(self) -> ConnectionEndpoint | None:
        for endpoint in self.endpoints:
            if endpoint.connection.streams_room > 0:
                return endpoint
        return None

    def _serve(self) -> None:
        while self._waiting:
            if self._waiting[0].opened.done():  # cancelled, and about to leave the queue
                self._waiting.popleft()
            elif (endpoint := self._with_room()) is not None:
                place = self._waiting.popleft()
                place.opened.set_result(endpoint.connection.open(place.head, end=place.end))
            else:
                break
        if self._waiting and self._connecting is None and self._live < self._connections_max:
            self._connecting = asyncio.get_running_loop().create_task(self._grow())

    @property
    def _live(self) -> int:
        """The number of connections that accept streams. Those that retire do not count; they end by
        themselves."""
        return sum(one.connection.phase is ConnectionPhase.OPEN for one in self.endpoints)

    async def _grow(self) -> None:
        patience_s = max((place.within_s or 0.0 for place in self._waiting), default=0.0)
        try:
            self.endpoints.append(await self._connect(self, patience_s))
        except HopError as error:
            if not self._live:
                self._fail_waiting(error)
            return
        finally:
            self._connecting = None
        self.changed()

    def _fail_waiting(self, error: HopError) -> None:
        for place in self._waiting:
            if not place.opened.done():
                place.opened.set_exception(type(error)(str(error)))  # its own: each gets a traceback
        self._waiting.clear()


# -- the transport --------------------------------------------------------------------------------


ATTEMPTS_MAX: Final = 3
CONNECTIONS_MAX: Final = 16
ORIGINS_MAX: Final = 1024
TARGETS_MAX: Final = 1024
"""Methods and URLs whose parsed form is cached: there are few, and parsing one takes as long as sending."""
REPORTS_S: Final = 1.0
"""The time for which a retiring connection is kept for the reports of its last streams, in seconds."""
CLIENT_WATCH: Final = WatchConfig(idle_timeout_s=60.0)

Origin = tuple[str, str, int]
"""Scheme, host and port."""


class ClientEndpoint(ConnectionEndpoint):
    """A connection of a pool, ready once the server's SETTINGS have come."""

    def __init__(
        self,
        pool: OriginPool,
        on_load: Callable[[bytes], None],
        *,
        config: ConnectionConfig,
        watch: WatchConfig,
        clock: Clock,
    ) -> None:
        super().__init__(client=True, config=config, watch=watch, clock=clock)
        self._pool = pool
        self._on_load = on_load
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lingers = False
        """True if no stream is open any more and the connection is kept for reports alone."""
        self._pulse = None if watch.pulse is None else Pulse(self.connection, watch.pulse)
        self._beating: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if (config := self._watch_config.pulse) is not None:
            self._beating = self._loop.create_task(self._beat(config.interval_s))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._beating is not None:
            self._beating.cancel()

    @property
    def is_mute(self) -> bool:
        """True if the server has sent nothing in a whole beat after it was asked for a sign of life."""
        return self._pulse is not None and self._pulse.silent_beats > 0

    async def _beat(self, interval_s: float) -> None:
        assert self._pulse is not None
        while self.connection.phase is not ConnectionPhase.CLOSED:
            await self._clock.sleep(interval_s)
            if not self._pulse.beat():
                self._fail("the peer left a PING unanswered")

    def close_if_done(self) -> None:
        """Close a retiring connection after its last stream, and after the reports on its streams, though no
        later than `REPORTS_S`."""
        if not self.connection.awaits_reports:
            super().close_if_done()
        elif self.connection.may_close and not self._lingers:
            self._lingers = True
            self._loop.call_later(REPORTS_S, super().close_if_done)

    async def wait_ready(self) -> None:
        await self._ready
        if self.connection.phase is not ConnectionPhase.OPEN:
            if self.connection.greeted:
                raise Draining("the server is shutting down")
            raise NotHttp2(f"the server does not serve HTTP/2: {self.connection.error}")

    def stream_closed(self, stream: Stream) -> None:
        super().stream_closed(stream)
        if self._pool.waiting:
            self._loop.call_soon(self._pool.changed)

    def load_told(self, payload: bytes) -> None:
        self._on_load(payload)

    def peer_changed(self) -> None:
        super().peer_changed()
        if not self._ready.done():
            self._ready.set_result(None)
        self._loop.call_soon(self._pool.changed)


class ResponseStream:
    """A response whose body is still to be read, and the upload of its request while that runs."""

    __slots__ = ("_stream", "_upload", "headers", "status")

    def __init__(self, head: HeaderList, stream: Stream, upload: asyncio.Task[None] | None) -> None:
        self.status: Final = int(head[0][1])
        self.headers: Final = Headers(head)
        self._stream = stream
        self._upload = upload

    def read(self) -> Awaitable[bytes | None]:
        """All bytes that are queued, at least one. None at the end. Raises StreamFailed."""
        return self._stream.read()

    def pass_on(self, accept: Callable[[bytes], bool], accept_chunk: object = None) -> Awaitable[bool]:
        """Call `accept` as `Stream.pass_on` does. HTTP/2 has no chunks."""
        return self._stream.pass_on(accept)

    async def aclose(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
        self._stream.reset()


class Http2Transport:
    def __init__(
        self,
        *,
        ssl_context: ssl.SSLContext | None = None,
        config: ConnectionConfig | None = None,
        watch: WatchConfig = CLIENT_WATCH,
        clock: Clock = SYSTEM_CLOCK,
        connections_max: int = CONNECTIONS_MAX,
        on_load: Callable[[Origin, bytes], None] = lambda _origin, _payload: None,
    ) -> None:
        """`on_load` is called with every report of a server on its load. It must not raise."""
        self._ssl = ssl_context
        self._config = config or ConnectionConfig()
        self._watch = watch
        self._clock = clock
        self._connections_max = connections_max
        self._on_load = on_load
        self._pools: dict[Origin, OriginPool] = {}

    async def __aenter__(self) -> Http2Transport:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        pools = list(self._pools.values())
        self._pools.clear()
        for pool in pools:
            await pool.close()

    async def exchange(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[bytes, bytes]],
        content: bytes,
        *,
        connect_s: float | None = None,
        connected: Callable[[], None] | None = None,
        report: Report | None = None,
        is_repeated: bool = False,
    ) -> ResponseStream:
        """Send a request, and wait for the response's headers. The caller closes the response. Raises
        HopError, StreamFailed.

        `is_repeated` changes nothing: servers of HTTP/2 say what they did not process.
        `report` takes the server's report on the stream, which comes even when the call is cancelled or the
        response is closed before its end.
        """
        target = _target(method, url)
        try:
            head = header_list(target.head, headers)
        except BadHeader as error:
            raise Unsendable(str(error)) from error
        for attempts_left in reversed(range(ATTEMPTS_MAX)):
            try:
                return await self._attempt(target.origin, head, content, connect_s, connected, report)
            except StreamRefused:
                if not attempts_left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(
        self,
        origin: Origin,
        head: HeaderList,
        content: bytes,
        connect_s: float | None,
        connected: Callable[[], None] | None,
        report: Report | None,
    ) -> ResponseStream:
        pool, end = self._pools.get(origin) or self._new_pool(origin), not content
        stream = pool.open_now(head, end=end) or await pool.open(head, end=end, within_s=connect_s)
        stream.report = report
        upload = None
        try:
            if connected is not None:
                connected()
            if content:
                upload = _upload(stream, content)
            received = await stream.wait_head()
        except BaseException:
            if upload is not None:
                upload.cancel()
            stream.reset()
            raise
        return ResponseStream(received, stream, upload)

    # -- connections --------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """The number of open streams, on all connections."""
        return sum(len(one.connection.streams) for pool in self._pools.values() for one in pool.endpoints)

    def is_mute(self, url: str) -> bool:
        """True if all connections with streams to the URL's server owe a sign of life (`pulse`)."""
        pool = self._pools.get(_target("GET", url).origin)
        busy = () if pool is None else [one for one in pool.endpoints if one.connection.streams]
        return bool(busy) and all(isinstance(one, ClientEndpoint) and one.is_mute for one in busy)

    def _new_pool(self, origin: Origin) -> OriginPool:
        if len(self._pools) >= ORIGINS_MAX:
            self._pools = {origin: pool for origin, pool in self._pools.items() if pool.used}
        if len(self._pools) >= ORIGINS_MAX:
            raise NoConnectionInTime("too many origins")

        async def connect(pool: OriginPool, patience_s: float) -> ConnectionEndpoint:
            return await self._connect(origin, pool, patience_s)

        pool = self._pools[origin] = OriginPool(connect, self._connections_max)
        return pool

    async def _connect(self, origin: Origin, pool: OriginPool, patience_s: float) -> ConnectionEndpoint:
        """Make one connection. Raises NoConnection, NoConnectionInTime."""
        scheme, host, port = origin
        limit_s = max(self._watch.greeting_timeout_s, patience_s)
        watch = replace(self._watch, greeting_timeout_s=limit_s)

        def protocol() -> ClientEndpoint:
            on_load = partial(self._on_load, origin)
            return ClientEndpoint(pool, on_load, config=self._config, watch=watch, clock=self._clock)

        try:
            async with asyncio.timeout(limit_s):
                transport, endpoint = await asyncio.get_running_loop().create_connection(
                    protocol, host, port, ssl=self._tls() if scheme == "https" else None
                )
                try:
                    _check_alpn(transport)
                    await endpoint.wait_ready()
                except BaseException:
                    transport.abort()
                    raise
                return endpoint
        except TimeoutError:
            raise NoConnectionInTime(f"no HTTP/2 connection to {host}:{port} in time") from None
        except (OSError, UnicodeError) as error:  # TLS's and the resolver's errors are OSErrors
            raise NoConnection(f"{host}:{port}: {error}") from error

    def _tls(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        self._ssl.set_alpn_protocols(["h2"])
        return self._ssl


def _check_alpn(transport: asyncio.BaseTransport) -> None:
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    if tls is not None and (chosen := tls.selected_alpn_protocol()) != "h2":
        raise NotHttp2(f"the server chose {chosen or 'no protocol'} by ALPN, and not h2")


@dataclass(frozen=True, slots=True)
class _Target:
    origin: Origin
    head: HeaderList
    """The pseudo-headers `:method`, `:scheme`, `:path` and, last, `:authority`, which a Host header
    replaces."""


@lru_cache(maxsize=TARGETS_MAX)
def _target(method: str, url: str) -> _Target:
    """Parse a method and a URL. Raises Unsendable."""
    parsed, origin = parsed_url(url)
    return _Target(
        origin,
        [
            (b":method", method.encode("ascii")),
            (b":scheme", parsed.scheme.encode("ascii")),
            (b":path", parsed.raw_path_qs.encode("ascii")),
            (b":authority", (parsed.host_port_subcomponent or "").encode("ascii")),
        ],
    )


def parsed_url(url: str) -> tuple[URL, Origin]:
    """A URL, and the origin that it is asked at. Raises Unsendable."""
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or parsed.raw_host is None or parsed.port is None:
        raise Unsendable("the URL is of no server by http or https")
    return parsed, (parsed.scheme, parsed.raw_host, parsed.port)


def _upload(stream: Stream, content: bytes) -> asyncio.Task[None] | None:
    """Send what fits the windows at once, and the rest in a task, if there is any. Raises StreamFailed."""
    if (rest := stream.write_nowait(content, end=True)) is not None:
        return asyncio.create_task(_upload_rest(stream, rest))
    stream.finish()
    return None


async def _upload_rest(stream: Stream, rest: memoryview) -> None:
    with suppress(StreamFailed):  # not an error: the response may be complete without it
        await stream.write(rest)
        stream.finish()
