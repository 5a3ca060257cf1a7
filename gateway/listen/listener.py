"""The gateway's listeners: aiohttp's low-level server, with our bounds and our error answers.

No router and no middleware: a request goes to one handler, `gateway.request.edge` on the public listener and
`gateway.operators.server` on the other (`gateway.operators.listener`).

Rules of both:

1. Connections are bounded. Above the bound, the oldest of which nothing has come for `SILENT_S` is closed;
   where there is none, the oldest with half a head, or of a caller who has shown no key; then the oldest of
   which nothing has come, the oldest without a request, the oldest whose request has no key, and the new one.
   Where no descriptor is left for a new one, another is closed in the same order.
2. A request's head is bounded in bytes and in time, and nothing is read after something malformed. So are the
   requests that a connection sends ahead of their answers, and the connections that hold either: above the
   bound, the one that has done so for longest is closed.
3. A TLS handshake, before which there is no request whose deadline could end it, has a time limit of its own,
   and their number is bounded (`shared.process.accepting`).
4. A client that speaks HTTP/2 alone, as its ALPN says, is told in HTTP/2 that HTTP/1.1 is required. Python's
   TLS cannot refuse it by the alert `no_application_protocol`: without a protocol in common it goes on.
5. TLS keeps buffers as large as what it received at once, and as many connections keep large ones as requests
   may be live: above that, the oldest of them without a request is closed.
6. Connections are set up (`gateway.listen.accepting`), and the requests of callers who have left are ended,
   in turns: a few in each turn of the loop, tenants one after another.
7. An answer that is not read holds its connection for `slow_client_s` at most, whoever writes it
   (`gateway.client.connection`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from gateway.client.connection import EndsUnread
from gateway.client.heads import (
    AHEAD_MAX,
    HEAD_END,
    HEAD_LEN_MAX,
    Received,
    cut_behind_heads,
    is_one_request,
    open_len,
)
from gateway.config.edge import LimitsConfig
from gateway.config.timeouts import TimeoutsConfig
from gateway.identity.callers import KnownCallers
from gateway.listen.accepting import FairAccepting
from shared.fairness.fair_turns import FairTurns
from shared.http2 import frames
from shared.http2.connection_errors import ErrorCode
from shared.process import logs
from shared.process.accepting import HANDSHAKE_S, Accepting, Warnings
from shared.process.listening import BACKLOG_LEN, CLOSE_GRACE_S, LINGER_S, bound_socket, http1_options
from shared.process.memory import HANDSHAKES_MAX
from shared.process.metrics import Counter
from shared.process.sockets import bound_transport
from shared.process.tls import HTTP2
from shared.wire.errors import forget_frames

SEND_BUFFER_LEN: Final = 64 * 1024
"""SO_SNDBUF of a connection in bytes, which Linux doubles."""
RECEIVE_BUFFER_LEN: Final = 128 * 1024
"""SO_RCVBUF in bytes, which Linux doubles. Left to itself, the kernel lets a connection that sends fast fill
megabytes (tcp_rmem) while its body waits to be read, and a container's limit counts them."""
LARGE_LEN: Final = 16 * 1024
"""Bytes received at once, above which a connection's TLS has large buffers. One record has as many."""
CHUNK_LEN_MIN: Final = 8
"""The fewest bytes of a chunked body for each line end in it, on average over what is received at a time."""
CRLFS_LOOKED_AT: Final = 4096
"""The number of bytes at the beginning of what is received in which line ends are not counted."""
HOLDING_MAX: Final = 1024
"""Connections with half a head, or with requests sent ahead: together they hold
`shared.process.memory.HOLDING`."""
HEAD_PARSED_MAX: Final = 2 * HEAD_LEN_MAX
"""The most bytes of a head that are parsed: of one that is a little too long it can be said what is wrong."""
SILENT_S: Final = 1.0
"""The time after which a connection whose client does not speak is missed by nobody, in seconds."""
_MALFORMED: Final = b"\0" * 2 * CHUNK_LEN_MIN
"""Bytes that cannot occur in a head, nor in a chunk of less than their number."""
_HTTP1_REQUIRED: Final = frames.settings({}) + frames.goaway(0, ErrorCode.HTTP_1_1_REQUIRED)

log = logs.get(__name__)

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Answers a request."""
Refuse = Callable[[str], web.StreamResponse]
"""The answer to what is no well-formed request, given the name of what is wrong with it."""


CONNECTIONS_CUT: Final = Counter(
    "penstock_gateway_connections_cut",
    "Client connections closed because too many were open, or held something.",
)


class BrokenBody(web.RequestPayloadError, TimeoutError):
    """A request's body broke off within something malformed. It is a TimeoutError too because aiohttp, which
    reads what a handler left of a body, expects no other error there: it would log one as a crash."""


class ListenFailed(Exception):
    """A listener cannot be opened; the message is for the operator."""


class Listening:
    """An open listener."""

    def __init__(self, site: web.SockSite, server: BoundedServer, port: int) -> None:
        self._site: web.SockSite | None = site
        self._server = server
        self.port: Final = port

    async def close(self) -> None:
        """Accept no more connections, and close those without a request; the others are closed after their
        answer. Later calls do nothing."""
        site, self._site = self._site, None
        if site is not None:
            await site.stop()
            self._server.pre_shutdown()


async def listen(
    stack: AsyncExitStack,
    server: BoundedServer,
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    is_shared: bool = False,
) -> Listening:
    """Serve on an address until `stack` is closed. `is_shared` is true if other workers listen on it, too.
    Raises ListenFailed."""
    runner = web.ServerRunner(server, shutdown_timeout=CLOSE_GRACE_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        sock = bound_socket(host, port, SEND_BUFFER_LEN, RECEIVE_BUFFER_LEN, is_shared=is_shared)
    except OSError as error:
        raise ListenFailed(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    site = _Site(runner, sock, ssl_context=tls, backlog=BACKLOG_LEN)
    await site.start()
    return Listening(site, server, sock.getsockname()[1])


class BoundedServer(web.Server):
    """The server of a listener."""

    def __init__(
        self,
        handle: Handle,
        refuse: Refuse,
        limits: LimitsConfig,
        timeouts: TimeoutsConfig,
        known: KnownCallers,
        turns: FairTurns,
        *,
        ends_left: bool = True,
        times_readers: bool = True,
        is_for_operators: bool = False,
    ) -> None:
        """`known` are the callers whose connections are set up in their tenants' turns. `turns` are those in
        which requests begin, and end when their callers leave: who leaves and comes again has the seat that
        it left. `ends_left` is true if requests end with that. `times_readers` is true if `handle` limits the
        time in which the client of a request that it answers may read nothing. `is_for_operators` is true if
        the descriptors that are reserved are for its connections."""
        super().__init__(handle, handler_cancellation=ends_left)
        self._refuse = refuse
        self._is_for_operators = is_for_operators
        self._known = known
        self._accepting: FairAccepting | None = None
        self._holding: dict[_Protocol, None] = {}
        """The connections that held something when they last received, the oldest of them first."""
        self._large: dict[_Protocol, None] = {}
        """The connections with large buffers of TLS, in the order in which they got them."""
        self._large_max = limits.live_max
        self._write_buffer_len = limits.write_buffer_len
        self._connections_max = limits.connections_max
        self._warnings = Warnings(log)
        self._head_s = timeouts.head_s
        self._idle_s = timeouts.idle_s
        self._options = {
            "unread_s": timeouts.slow_client_s,
            "are_handlers_timed": times_readers,
            **http1_options(self._idle_s),
        }
        self.turns: Final = FairTurns()
        """The turns in which bodies are read."""
        self.ends: Final = turns

    def accept(self, sock: socket.socket, backlog: int, tls: ssl.SSLContext | None) -> FairAccepting:
        """Accept connections of a bound socket from now on. To be called once."""
        times = HANDSHAKE_S, self._idle_s if tls is None else HANDSHAKE_S
        bounds = self._make_room, min(HANDSHAKES_MAX, self._connections_max)
        self._accepting = FairAccepting(
            *(sock, backlog, self, self._known, tls, *times, *bounds),
            displace=self._close_one,
            is_reserved_for=self._is_for_operators,
        )
        return self._accepting

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._make_room(handler)

    def _make_room(self, new: RequestHandler | None = None) -> None:
        """Keep to the bound of connections (rule 1), after a connection has been set up, or accepted without
        a first byte (None)."""
        assert self._accepting is not None
        if len(self._connections) + self._accepting.silent_count > self._connections_max:
            self._tell("gateway.connections_full", connections_max=self._connections_max)
            self._close_one(new, is_silent_new=new is None)

    def _close_one(self, new: RequestHandler | None = None, *, is_silent_new: bool = False) -> bool:
        """Close a connection, the most idle first (rule 1), and return whether there was one. `new` is the
        new one, where it has been set up; `is_silent_new` is true where it is silent."""
        silent = self._accepting
        assert silent is not None
        has_older = silent.silent_count > is_silent_new
        if has_older and silent.longest_s >= SILENT_S:
            silent.close_first_silent()
        elif (one := self._first(new, lambda one: _is_idle(one) and self._is_strangers(one))) is not None:
            self._connections[one].abort()
        elif has_older:
            silent.close_first_silent()
        elif (one := self._first(new, _is_idle) or self._first(new, _is_unknown) or new) is not None:
            self._connections[one].abort()
        elif is_silent_new:
            silent.close_first_silent()
        else:
            return False
        return True

    def _first(
        self, new: RequestHandler | None, is_one: Callable[[_Protocol], bool]
    ) -> RequestHandler | None:
        """The oldest connection that is such, and is neither the new one nor being closed."""
        for one, transport in self._connections.items():
            if one is not new and not transport.is_closing() and is_one(cast("_Protocol", one)):
                return one
        return None

    def _is_strangers(self, one: _Protocol) -> bool:
        """True if it has half a head, or served nobody who has a key. Monitoring of operators needs none."""
        return one.holds or (_is_unknown(one) and not self._is_for_operators)

    def pre_shutdown(self) -> None:
        """Close the connections without a request, and the others after their answer.

        aiohttp's `close` leaves the transport of an idle connection open, and drops what comes. It would do
        so to one that was accepted a moment ago, too, whose task has not begun: that one is left, and its
        request is refused like any other while the gateway drains.
        """
        for protocol, transport in list(self._connections.items()):
            is_idle = protocol._waiter is not None and not protocol._waiter.done()
            if protocol._waiter is not None or protocol._current_request is not None:
                protocol.close()
            if is_idle:
                transport.close()

    def note(self, protocol: _Protocol) -> None:
        """Keep to the bound of half heads and of requests sent ahead (rule 2), after a connection has
        received something or is lost."""
        if not protocol.holds:
            self._holding.pop(protocol, None)
            return
        self._holding[protocol] = None
        while len(self._holding) > HOLDING_MAX:
            first = next(iter(self._holding))
            del self._holding[first]
            if first.holds:
                self._tell("gateway.heads_full", heads_max=HOLDING_MAX)
                first.force_close()

    def grew(self, protocol: _Protocol) -> None:
        """Keep to the bound of large TLS buffers (rule 5), after a connection's have become large."""
        self._large[protocol] = None
        if len(self._large) > self._large_max:
            idle = next((one for one in self._large if _is_idle(one) and one is not protocol), None)
            if idle is not None:
                self._tell("gateway.large_connections_full", large_max=self._large_max)
                self.forget(idle)
                self._connections[idle].abort()

    def forget(self, protocol: _Protocol) -> None:
        """Count a connection's buffers no more: it is lost, or will be."""
        self._large.pop(protocol, None)

    def _tell(self, event: str, **bound: int) -> None:
        """Count a connection that is closed to bound them, and log it now and then."""
        CONNECTIONS_CUT.inc()
        self._warnings.warn(event, **bound)

    def __call__(self) -> RequestHandler:
        bounds = self._write_buffer_len, self._head_s
        return _Protocol(self, self._refuse, *bounds, loop=self._loop, **self._options)


def _is_idle(one: RequestHandler) -> bool:
    return one._current_request is None


def _is_unknown(one: _Protocol) -> bool:
    """True if no request of a caller with a key has come of it."""
    return not one.tenant


class _Site(web.SockSite):
    """A listener's socket, whose connections are not accepted by the loop."""

    _accepting: Accepting | None = None

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server = self._runner.server
        assert isinstance(server, BoundedServer)
        self._accepting = server.accept(self._sock, self._backlog, self._ssl_context)

    async def stop(self) -> None:
        if self._accepting is not None:
            await self._accepting.aclose()
        await super().stop()


class _Protocol(EndsUnread):
    """The protocol of one connection."""

    __slots__ = (
        "_head_end",
        "_head_len",
        "_head_s",
        "_head_timer",
        "_held",
        "_is_refused",
        "_large_len",
        "_received",
        "_refuse",
        "_server",
        "_write_buffer_len",
    )

    def __init__(
        self,
        server: BoundedServer,
        refuse: Refuse,
        write_buffer_len: int,
        head_s: float,
        **options: Any,
    ) -> None:
        super().__init__(server, server.turns, **options)
        self._server = server
        self._refuse = refuse
        self._write_buffer_len = write_buffer_len
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None
        """Closes the connection. None while no head is incomplete: most come whole, and need none. Nor while
        no HTTP/2 is refused."""
        self._head_len = 0
        """The number of bytes received of a head that is not complete yet."""
        self._head_end = b""
        """The last of them, as many as may belong to the empty line that completes it."""
        self._received: Received | None = None
        """The request of which the body is being received. None while what comes is part of a head, or begins
        one."""
        self._held = False
        """True if `holds` was true when something was last received."""
        self._is_refused = False
        """True if something malformed was received, so that nothing more is read."""
        self._large_len = sys.maxsize
        """Bytes received at once, above which its buffers become large: of TLS, which have not yet."""

    def data_received(self, data: bytes) -> None:
        """Parse what was received, a head within its bounds and nothing after what is malformed (rule 2).

        aiohttp bounds the lines of a head and their number, but not the head; and of what follows something
        malformed it would keep every piece, each with an error of its own. A body in chunks of a few bytes
        counts as malformed: parsing each takes microseconds, so that one packet of them would hold up the
        loop. So does the beginning of a head that is too long, which takes as much.

        Requests that came whole before something malformed are answered before it is refused.

        The usual packet, one whole request of a client that waits for its answer, is parsed without a look
        for all this: nothing of it can be too long, malformed behind a request, or left over.
        """
        if len(data) > self._large_len:
            self._large_len = sys.maxsize
            self._server.grew(self)
        if self._is_refused:
            return
        before = self._received
        is_one = not (before or self._messages or self._held or self._head_len) and is_one_request(data)
        if not is_one and (self._begins_long_head(data) or self._has_small_chunks(data)):
            self._is_refused = True
            data = _MALFORMED
        count, received_len = self._request_count, before[1].total_bytes if before is not None else 0
        for piece in (data,) if is_one else cut_behind_heads(data):
            super().data_received(piece)
            if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
                self._is_refused = True
                break
        else:
            if is_one and self._messages and self._messages[-1][1].is_eof():
                return
            self._follow(data, self._request_count - count, received_len)
        if self._head_len > HEAD_LEN_MAX:
            self._is_refused = True
            super().data_received(_MALFORMED)
        if self._is_refused:
            self._end_head()
            self._break_off_body()
        if len(self._messages) > AHEAD_MAX:
            self._messages.clear()
            self.force_close()
        if self.holds or self._held:
            self._held = self.holds
            self._server.note(self)

    def _follow(self, data: bytes, count: int, received_len: int) -> None:
        """See what is incomplete behind what was received, with which the heads of `count` requests ended.
        Of the body that was being received `received_len` bytes were there before."""
        before = self._received
        requests = cast("list[Received]", [self._messages[i] for i in range(-count, 0)])
        last = requests[-1] if requests else before
        self._received = None if last is None or last[1].is_eof() else last
        if self._received is not None:
            self._end_head()
        elif last is None:
            self._begin_head(self._head_len + len(data), data)
        else:
            data = self._head_end + data
            at = 0 if before is None else None if before[0].chunked else before[1].total_bytes - received_len
            self._end_head()
            if half_len := open_len(data, at, requests):
                self._begin_head(half_len, data)

    def _begin_head(self, head_len: int, data: bytes) -> None:
        """There is half a head of so many bytes, the last of them at the end of `data`."""
        self._head_len = head_len
        self._head_end = (self._head_end + data)[-len(HEAD_END) + 1 :]
        if self._head_timer is None and head_len:
            self._head_timer = self._loop.call_later(self._head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        """Close the connection, or look again later where an answer is due first."""
        self._head_timer = None
        if self._current_request is None and not self._messages:
            self.force_close()
        else:
            self._begin_head(self._head_len, b"")

    @property
    def holds(self) -> bool:
        """True if there is half a head, or requests that were sent ahead of an answer."""
        return self._head_len > 0 or len(self._messages) > 1

    def _end_head(self) -> None:
        self._head_len, self._head_end = 0, b""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _break_off_body(self) -> None:
        """Fail the body that is being received, of which nothing more is read. aiohttp's parser forgets a
        body within which it meets something malformed, and its reader would wait until its time limit."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            request.content.set_exception(BrokenBody("what follows is malformed"))
        elif len(self._messages) > 1 and not self._messages[-2][1].is_eof():
            del self._messages[-2]  # what is malformed lies within this request, and is the answer to it

    def _begins_long_head(self, data: bytes) -> bool:
        most = HEAD_PARSED_MAX
        return len(data) > most and self._received is None and data.find(HEAD_END, 0, most) < 0

    def _has_small_chunks(self, data: bytes) -> bool:
        request = self._received
        if request is not None and not request[0].chunked:
            return False
        if data.count(b"\r\n", CRLFS_LOOKED_AT) * CHUNK_LEN_MIN <= len(data):
            return False
        return request is not None or b"hunked" in data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None  # uvloop's transport is no subclass of asyncio's
        bound_transport(self.transport, self._write_buffer_len)
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        if tls is not None:
            self._large_len = LARGE_LEN
        if tls is not None and tls.selected_alpn_protocol() == HTTP2:
            self._is_refused = True
            self.transport.write(_HTTP1_REQUIRED)
            self._head_timer = self._loop.call_later(LINGER_S, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_head()
        self._received = None
        self._messages.clear()
        self._server.forget(self)
        if self._held:
            self._server.note(self)
        forget_frames(exc)  # aiohttp keeps the error of a failed write, and its frames keep the request
        if self._current_request is None or (turn := self._server.ends.ask(self.tenant)) is None:
            super().connection_lost(exc)
        else:
            turn.add_done_callback(lambda _: EndsUnread.connection_lost(self, exc))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp refuses by itself: malformed request lines, headers and framing. No other error
        comes here, because the edge answers them all."""
        forget_frames(exc)  # its frames hold the bytes that were read
        if request.writer.output_size > 0 or self.transport is None:
            raise ConnectionResetError("an answer has begun, or the client has left")
        return self._refuse(type(exc).__name__)
