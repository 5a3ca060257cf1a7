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
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gateway.client.connection import BoundedConnection, Refuse
from gateway.config.edge import LimitsConfig
from gateway.config.timeouts import TimeoutsConfig
from gateway.identity.callers import KnownCallers
from gateway.listen.accepting import FairAccepting
from shared.fairness.fair_turns import FairTurns
from shared.process import logs
from shared.process.accepting import HANDSHAKE_S, HANDSHAKES_MAX, Accepting, Warnings
from shared.process.listening import BACKLOG_LEN, CLOSE_GRACE_S, bound_socket, http1_options
from shared.process.metrics import Counter

SEND_BUFFER_LEN: Final = 64 * 1024
"""SO_SNDBUF of a connection in bytes, which Linux doubles."""
RECEIVE_BUFFER_LEN: Final = 128 * 1024
"""SO_RCVBUF in bytes, which Linux doubles. Left to itself, the kernel lets a connection that sends fast fill
megabytes (tcp_rmem) while its body waits to be read, and a container's limit counts them."""
HOLDING_MAX: Final = 1024
"""Connections with half a head, or with requests sent ahead: together they hold
128 MiB."""
SILENT_S: Final = 1.0
"""The time after which a connection whose client does not speak is missed by nobody, in seconds."""

log = logs.get(__name__)

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
"""Answers a request."""

CONNECTIONS_CUT: Final = Counter(
    "penstock_gateway_connections_cut",
    "Client connections closed because too many were open, or held something.",
)


class ListenFailed(Exception):
    """A listener cannot be opened; the message is for the operator."""


class Listening:
    """An open listener."""

    def __init__(self, accepting: Accepting, server: BoundedServer, port: int) -> None:
        self._accepting: Accepting | None = accepting
        self._server = server
        self.port: Final = port

    async def close(self) -> None:
        """Accept no more connections, and close those without a request; the others are closed after their
        answer. Later calls do nothing."""
        accepting, self._accepting = self._accepting, None
        if accepting is not None:
            await accepting.aclose()
            self._server.pre_shutdown()

    async def aclose(self) -> None:
        """Close the listener, and end the requests that are not answered within `CLOSE_GRACE_S`."""
        await self.close()
        await asyncio.sleep(0)  # what came with the last connections begins
        self._server.pre_shutdown()
        await self._server.shutdown(CLOSE_GRACE_S)


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
    try:
        sock = bound_socket(host, port, SEND_BUFFER_LEN, RECEIVE_BUFFER_LEN, is_shared=is_shared)
    except OSError as error:
        raise ListenFailed(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listening = Listening(server.accept(sock, BACKLOG_LEN, tls), server, sock.getsockname()[1])
    stack.push_async_callback(listening.aclose)
    return listening


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
        request = partial(web.BaseRequest, loop=asyncio.get_running_loop())
        super().__init__(handle, request_factory=request, handler_cancellation=ends_left)
        self._refuse = refuse
        self._is_for_operators = is_for_operators
        self._known = known
        self._accepting: FairAccepting | None = None
        self._holding: dict[BoundedConnection, None] = {}
        """The connections that held something when they last received, the oldest of them first."""
        self._large: dict[BoundedConnection, None] = {}
        """The connections with large buffers of TLS, in the order in which they got them."""
        self._large_max = limits.live_max
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
        self._make_room(cast("BoundedConnection", handler))

    def _make_room(self, new: BoundedConnection | None = None) -> None:
        """Keep to the bound of connections (rule 1), after a connection has been set up, or accepted without
        a first byte (None)."""
        assert self._accepting is not None
        if len(self.connections) + self._accepting.silent_count > self._connections_max:
            self._tell("gateway.connections_full", connections_max=self._connections_max)
            self._close_one(new, is_silent_new=new is None)

    def _close_one(self, new: BoundedConnection | None = None, *, is_silent_new: bool = False) -> bool:
        """Close a connection, the most idle first (rule 1), and return whether there was one. `new` is the
        new one, where it has been set up; `is_silent_new` is true where it is silent."""
        silent = self._accepting
        assert silent is not None
        has_older = silent.silent_count > is_silent_new
        if has_older and silent.longest_s >= SILENT_S:
            silent.close_first_silent()
        elif (one := self._first(new, lambda one: one.is_idle and self._is_strangers(one))) is not None:
            one.abort()
        elif has_older:
            silent.close_first_silent()
        elif (
            one := self._first(new, lambda one: one.is_idle) or self._first(new, _is_unknown) or new
        ) is not None:
            one.abort()
        elif is_silent_new:
            silent.close_first_silent()
        else:
            return False
        return True

    def _first(
        self, new: BoundedConnection | None, is_one: Callable[[BoundedConnection], bool]
    ) -> BoundedConnection | None:
        """The oldest connection that is such, and is neither the new one nor being closed."""
        for one in cast("list[BoundedConnection]", self.connections):
            transport = one.transport
            if one is not new and transport is not None and not transport.is_closing() and is_one(one):
                return one
        return None

    def _is_strangers(self, one: BoundedConnection) -> bool:
        """True if it has half a head, or served nobody who has a key. Monitoring of operators needs none."""
        return one.holds or (_is_unknown(one) and not self._is_for_operators)

    def pre_shutdown(self) -> None:
        """Close the connections without a request, and the others after their answer."""
        for one in cast("list[BoundedConnection]", self.connections):
            one.end()

    def note(self, protocol: BoundedConnection) -> None:
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

    def grew(self, protocol: BoundedConnection) -> None:
        """Keep to the bound of large TLS buffers (rule 5), after a connection's have become large."""
        self._large[protocol] = None
        if len(self._large) > self._large_max:
            idle = next((one for one in self._large if one.is_idle and one is not protocol), None)
            if idle is not None:
                self._tell("gateway.large_connections_full", large_max=self._large_max)
                self.forget(idle)
                idle.abort()

    def forget(self, protocol: BoundedConnection) -> None:
        """Count a connection's buffers no more: it is lost, or will be."""
        self._large.pop(protocol, None)

    def _tell(self, event: str, **bound: int) -> None:
        """Count a connection that is closed to bound them, and log it now and then."""
        CONNECTIONS_CUT.inc()
        self._warnings.warn(event, **bound)

    def __call__(self) -> RequestHandler:
        loop = asyncio.get_running_loop()
        return BoundedConnection(self, self, self._refuse, self._head_s, loop=loop, **self._options)


def _is_unknown(one: BoundedConnection) -> bool:
    """True if no request of a caller with a key has come of it."""
    return not one.tenant
