"""The gateway as a process: listeners, background work, drain.

SIGTERM or SIGINT: not ready at once, new requests refused, open ones finish within `drain_s` (what is
left then ends with an error of its own), exit. SIGHUP: keys and tenants are read again.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
import ssl
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from gateway.accounts import AccountsReader
from gateway.admission.guarded_store import GuardedStore
from gateway.admission.memory_store import LEASE_TTL_MS, MemoryStore
from gateway.admission.quota import QuotaStore
from gateway.admission.validate import warm
from gateway.background import Background, Work
from gateway.config import GatewayConfig, TlsConfig, timeouts_of
from gateway.edge import PROBES, Edge, Health, error_response, probe_answer
from gateway.endpoints import ENDPOINTS
from gateway.engines import Engines, fetch_profile
from gateway.exchange import LiveRequests
from gateway.hygiene import HEAD_LEN_MAX
from gateway.pipeline import Pipeline
from gateway.record import CONNECTIONS_CUT, HELD_BYTES, HTTP2_STREAMS, IN_FLIGHT
from gateway.relay.credentials import Credentials
from gateway.relay.upstream import Upstream
from gateway.routing.replicas import Replicas
from shared import logs
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import GatewayStopped, RouteNotFound, forget_frames
from shared.fair_share import FairShare
from shared.fair_threads import FairThreads
from shared.http2.sockets import bound_transport
from shared.ids import REQUEST_ID_HEADER, mint_request_id
from shared.lifecycle import Lifecycle, Phase, on_stop_signals
from shared.loops import loop_name, watch_lag
from shared.telemetry import METRICS_CONTENT_TYPE, metrics_text
from shared.tls import HTTP1, server_context

LINE_LEN_MAX: Final = 8190
HEADER_LEN_MAX: Final = 8190
HEADERS_MAX: Final = 64
BACKLOG_LEN: Final = 1024
TELL_EVERY_S: Final = 10.0
"""How often the log says that connections are cut, at most."""
HANDSHAKE_S: Final = 10.0
"""How long a TLS handshake may take."""
LINGER_S: Final = 1.0
"""How long an unread body is still swallowed, so that the client sees our answer and not a reset."""
CLOSE_GRACE_S: Final = 2.0
"""How long the last bytes of the last answers may take after the drain."""
RENEW_S: Final = LEASE_TTL_MS / 1000 / 3
RENEW_AGAIN_S: Final = 1.0
"""While the store does not answer."""
assert RENEW_S * 2 < LEASE_TTL_MS / 1000, "one renewal may fail before a lease expires"

log = logs.get(__name__)


class ListenFailed(Exception):
    """A listener cannot be opened; the message is for the operator."""


class Gateway:
    """`async with Gateway(config) as gateway:` serves until the block is left."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        path: Path | None = None,
        quotas: QuotaStore | None = None,
        env: Mapping[str, str] = os.environ,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`path`: the file to read keys and tenants from again. `env`: where models' keys may be.
        Raises ConfigError when one is not there."""
        credentials = Credentials(config.models, env)
        self.config = config
        self.lifecycle = Lifecycle()
        self.quotas = quotas or MemoryStore(clock)
        self._guarded = None if quotas is None else GuardedStore(quotas)
        store = self._guarded or self.quotas
        self.live = LiveRequests(config.limits.live_max)
        self.accounts = AccountsReader(config, path, clock)
        self.replicas = Replicas(config.models, clock)
        self._upstream = Upstream(config.hop, config.models)
        self._threads = FairThreads(config.limits.tokenizer_threads)
        IN_FLIGHT.set_function(lambda: len(self.live))
        HTTP2_STREAMS.set_function(lambda: self._upstream.streams)
        self.engines = Engines(
            config.models,
            lambda model: fetch_profile(
                self._upstream,
                model,
                timeouts_of(config.timeouts, model).connect_s,
                credentials.headers(model),
            ),
            clock,
        )
        memory = FairShare(config.limits.request_memory)
        HELD_BYTES.set_function(lambda: memory.held)
        pipeline = Pipeline(
            config,
            self.engines,
            store,
            self.replicas,
            self._upstream,
            credentials,
            self.live,
            self._threads,
            memory,
        )
        self._health = Health(self.lifecycle, self._problems)
        self._edge = Edge(
            config, self.accounts, pipeline, self.live, self.engines, store, self._health, clock
        )
        self._clock = clock
        own: dict[str, Work] = {"configuration": self.accounts.watch, "lease renewal": self._renew_leases}
        self._background = Background(own, clock)
        self._tokenizers = Background(self.engines.works(), clock)  # without one, its prompts are estimated
        self._stack = AsyncExitStack()
        self.port = 0
        self.admin_port: int | None = None

    async def __aenter__(self) -> Gateway:
        listen, admin = self.config.listen, self.config.admin
        warm(endpoint.shape for endpoint in ENDPOINTS.values())
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._upstream.aclose)
            stack.callback(self._threads.close)
            await stack.enter_async_context(self._background)
            await stack.enter_async_context(self._tokenizers)
            tls = _public_tls(listen.tls)
            public = _Server(self._edge, self.config)
            self.port = await self._listen(stack, public, listen.host, listen.port, tls)
            if admin.port is not None:
                private = web.Server(self._admin, access_log=None)
                self.admin_port = await self._listen(stack, private, admin.host, admin.port, None)
            self._stack = stack.pop_all()
        self.lifecycle.to(Phase.READY)
        ports = {"port": self.port, "admin_port": self.admin_port}
        log.info("gateway.listening", host=listen.host, **ports, loop=loop_name())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()
        await self._stack.aclose()
        self.lifecycle.to(Phase.STOPPED)

    async def drain(self) -> None:
        """Idempotent."""
        if self.lifecycle.phase is not Phase.READY:
            return
        self.lifecycle.to(Phase.DRAINING)
        log.info("gateway.draining", live=len(self.live))
        clean = await self.live.drain(
            self.config.timeouts.drain_s,
            _stopped,
        )
        log.info("gateway.drained", clean=clean)

    async def _listen(
        self, stack: AsyncExitStack, server: web.Server, host: str, port: int, tls: ssl.SSLContext | None
    ) -> int:
        runner = web.ServerRunner(server, shutdown_timeout=CLOSE_GRACE_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            sock = _bound_socket(host, port, self.config.limits.send_buffer_len)
        except OSError as error:
            raise ListenFailed(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        await _Site(runner, sock, ssl_context=tls, backlog=BACKLOG_LEN).start()
        bound: int = sock.getsockname()[1]
        return bound

    async def _admin(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in PROBES:
            return probe_answer(self._health, request, tells_problems=True)
        if request.path == "/metrics":
            return web.Response(body=metrics_text(), headers={"content-type": METRICS_CONTENT_TYPE})
        return error_response(RouteNotFound("There is /metrics."), {REQUEST_ID_HEADER: mint_request_id()})

    async def _renew_leases(self) -> None:
        while True:
            await self._clock.sleep(RENEW_S if self._store_is_well else RENEW_AGAIN_S)
            await (self._guarded or self.quotas).renew(self.live.reservations())

    @property
    def _store_is_well(self) -> bool:
        return self._guarded is None or self._guarded.is_well

    def _problems(self) -> list[str]:
        """Without which no request can be served as it should."""
        store = [] if self._store_is_well else ["quota store"]
        return [*store, *self._background.down]


class _Server(web.Server):
    """aiohttp's low-level server: no router, no middleware, our limits and error answers."""

    def __init__(self, edge: Edge, config: GatewayConfig) -> None:
        super().__init__(edge.handle, handler_cancellation=True)
        self._edge = edge
        self._write_buffer_len = config.limits.write_buffer_len
        self._connections_max = config.limits.connections_max
        self._told_at_s = -math.inf
        """When the log last said that connections are cut."""
        self._options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": config.timeouts.idle_s,
            "lingering_time": LINGER_S,
            "max_line_size": LINE_LEN_MAX,
            "max_field_size": HEADER_LEN_MAX,
            "max_headers": HEADERS_MAX,
        }

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Above the bound, the oldest connection without a request gives way: idle connections keep no probe
        and no caller out. Where all have one, the newcomer goes."""
        super().connection_made(handler, transport)
        if len(self._connections) <= self._connections_max:
            return
        first = next((one for one in self._connections if _is_idle(one) and one is not handler), handler)
        CONNECTIONS_CUT.inc()
        now_s = self._loop.time()
        if now_s - self._told_at_s >= TELL_EVERY_S:
            self._told_at_s = now_s
            log.warning("gateway.connections_full", connections_max=self._connections_max)
        self._connections[first].abort()

    def __call__(self) -> RequestHandler:
        return _Protocol(self, self._edge, self._write_buffer_len, loop=self._loop, **self._options)


def _is_idle(handler: RequestHandler) -> bool:
    return handler._current_request is None


class _Site(web.SockSite):
    """With a bound on TLS handshakes, which have no request yet whose deadline could end them."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            server,
            sock=self._sock,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=None if self._ssl_context is None else HANDSHAKE_S,
        )


CHUNK_LEN_MIN: Final = 8
"""Bytes, on average over what comes at a time, to each line end of a chunked body."""
CRLFS_LOOKED_AT: Final = 4096
"""Bytes at the beginning of what comes at a time that may be of any kind."""
_MALFORMED: Final = b"\0" * 2 * CHUNK_LEN_MIN
"""What neither a head nor a chunk of less than its length can hold."""


class _Protocol(RequestHandler):
    __slots__ = ("_edge", "_head_len", "_is_refused", "_write_buffer_len")

    def __init__(self, server: web.Server, edge: Edge, write_buffer_len: int, **options: Any) -> None:
        super().__init__(server, **options)
        self._edge = edge
        self._write_buffer_len = write_buffer_len
        self._head_len = 0
        """Bytes that have come of a head that is not whole yet."""
        self._is_refused = False

    def data_received(self, data: bytes) -> None:
        """aiohttp bounds a head's lines and their number, and not the head: here it is. And what follows
        something malformed is not read: aiohttp would keep each piece of it, with an error of its own. A body
        in chunks of a few bytes is malformed, too: each chunk takes some microseconds, a packet of them would
        hold up the loop."""
        if self._is_refused:
            return
        if data.count(b"\r\n", CRLFS_LOOKED_AT) * CHUNK_LEN_MIN > len(data) and self._is_chunked(data):
            self._is_refused = True
            data = _MALFORMED
        super().data_received(data)
        if self._messages:
            self._head_len = 0
            self._is_refused = not isinstance(self._messages[-1][0], RawRequestMessage)
        elif self._waiter is None or self._waiter.done():  # what came was of a body
            self._head_len = 0
        else:
            self._head_len += len(data)
        if self._head_len > HEAD_LEN_MAX:
            self._is_refused = True
            super().data_received(_MALFORMED)

    def _is_chunked(self, data: bytes) -> bool:
        request = self._current_request
        return b"hunked" in data if request is None else "transfer-encoding" in request.headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None  # uvloop's is no subclass of asyncio's
        bound_transport(self.transport, self._write_buffer_len)

    def connection_lost(self, exc: BaseException | None) -> None:
        forget_frames(exc)  # of the write that failed, which aiohttp keeps with the request that wrote
        super().connection_lost(exc)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """A body's reader has room, as it says after every read. Without a pause there is nothing to resume;
        aiohttp would run its parser once more over nothing."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp refuses by itself: bad request lines, headers, framing. The edge lets no other
        error through."""
        forget_frames(exc)  # the one that read it holds what it read
        if request.writer.output_size > 0 or self.transport is None:
            raise ConnectionResetError("an answer has begun, or nobody is there to have one")
        return self._edge.refuse_unparsed(type(exc).__name__)


def _bound_socket(host: str, port: int, send_buffer_len: int) -> socket.socket:
    """Connections inherit the bound of the kernel's send buffer; without it a client that stopped
    reading would be noticed megabytes later."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_len)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _public_tls(tls: TlsConfig | None) -> ssl.SSLContext | None:
    return server_context(tls.cert, tls.key, protocols=[HTTP1]) if tls is not None else None


def _stopped() -> GatewayStopped:
    return GatewayStopped("The gateway was stopped before the answer's end.")


async def serve(config: GatewayConfig, path: Path) -> None:
    """Until a stop signal; a second one ends the drain."""
    stop, now = asyncio.Event(), asyncio.Event()
    on_stop_signals(lambda _: now.set() if stop.is_set() else stop.set())
    watch_lag()
    async with Gateway(config, path=path) as gateway:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.accounts.reload)
        gc.collect()
        gc.freeze()  # modules live for ever: looking through them would stop every stream for 15 ms
        await stop.wait()
        draining = asyncio.create_task(gateway.drain())
        impatient = asyncio.create_task(now.wait())
        await asyncio.wait((draining, impatient), return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        if not draining.done():
            gateway.live.end_all(_stopped)
        await draining
