"""Every request of the public listener, from its headers to its completed line.

Rules:

1. Default deny, by the path that routes: without a valid key there is no answer but 401, except from the
   three probes and the API's description.
2. Every answer carries the request's id, and every error OpenAI's envelope, also those that aiohttp finds by
   itself before there is a request.
3. Every request has one completed line, whatever happens.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gateway.accounts import AccountsReader
from gateway.admin import probe_response
from gateway.admission.quota import QuotaStore, ReservationId
from gateway.client.answer import Client
from gateway.client.deadlines import Watch
from gateway.client.reading import serves
from gateway.client.responses import JSON, error_response
from gateway.config import GatewayConfig
from gateway.endpoints.dialect import CHUNKS
from gateway.endpoints.table import ENDPOINTS, MODELS, REQUESTS
from gateway.engines import Engines
from gateway.exchange import Exchange, LiveRequests
from gateway.hygiene import check, path_of
from gateway.identity.caller import Principal
from gateway.model_lists import ModelLists
from gateway.openapi import PATH, document
from gateway.pace import Pace
from gateway.pipeline import Pipeline
from gateway.record import Reporter, RequestRecord
from gateway.recorder import Recorder
from gateway.relay.stream import Progress
from gateway.told_windows import ToldWindows
from shared import logs
from shared.apis.requests import AbortResponse
from shared.clock import SYSTEM_CLOCK, Clock
from shared.completed_line import UNPARSED
from shared.errors import (
    ApiError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    Overloaded,
    RateLimited,
    RequestAborted,
    RouteNotFound,
    forget_frames,
)
from shared.http import ClientGone
from shared.ids import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    RequestId,
    TenantId,
    accept_request_id,
    is_id,
    mint_request_id,
)
from shared.lifecycle import Phase
from shared.paths import no_such_path
from shared.probes import PROBES, Health
from shared.telemetry import Stages
from shared.tracing import NO_TRACING, Tracing

UNKNOWN: Final = "unknown"
DESCRIBING_MAX: Final = 64
"""Callers that are sent the API's description at a time: they have no key, and each may hold it in its
connection's buffers for as long as a slow client may."""

ENDS_PER_S: Final = 32.0
"""Ends of requests that a tenant may ask one worker for each second. Every worker looks for each, among all
of its requests."""
ENDS_AT_ONCE: Final = 1024
"""Those that it may ask for at once, as a client that gives up all that it asked."""

log = logs.get(__name__)


class Edge:
    def __init__(
        self,
        config: GatewayConfig,
        accounts: AccountsReader,
        pipeline: Pipeline,
        live: LiveRequests,
        engines: Engines,
        quotas: QuotaStore,
        health: Health,
        clock: Clock = SYSTEM_CLOCK,
        tracing: Tracing = NO_TRACING,
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._tracing = tracing
        self._accounts = accounts
        self._pipeline = pipeline
        self._live = live
        self._windows = ToldWindows(quotas, clock)
        self._ends = Pace(ENDS_PER_S, ENDS_AT_ONCE)
        self._health = health
        self._clock = clock
        timeouts = config.timeouts
        self._soonest_s = min(
            timeouts.body_s, timeouts.first_token_s, timeouts.inter_token_s, timeouts.slow_client_s
        )
        self._lists = ModelLists(engines, int(clock.wall()))
        self._reporter = Reporter(tracing, recorder)
        self._name = secrets.token_hex(8)
        """A name of this process in the ids of its reservations, which makes them differ from other
        gateways'."""
        self._count = itertools.count()
        self.end_elsewhere: Callable[[TenantId, RequestId], Awaitable[int]] = _nowhere
        """Ends a tenant's requests of an id that other workers have, and returns how many."""
        self._describing = 0
        """The number of callers that are being sent the API's description."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = path_of(request)
        if self._health.lifecycle.phase is Phase.DRAINING:  # its connection is closed after the answer
            request._message = request._message._replace(should_close=True)
        if path in PROBES:
            return self._probe(request)
        exchange = self._open(request, path)
        logs.REQUEST_ID.set(exchange.request_id)
        try:
            return await self._answer(exchange)
        except (ClientGone, asyncio.CancelledError) as error:
            _client_left(exchange)
            if isinstance(error, ClientGone):
                raise ConnectionResetError("the client left") from None
            raise
        finally:
            self._complete(exchange)
            forget_frames(exchange.record.error)
            forget_frames(exchange.watch.reason)

    def _probe(self, request: web.BaseRequest) -> web.Response:
        try:
            check(request)
        except InvalidRequest as error:
            response = error_response(error, {REQUEST_ID_HEADER: mint_request_id()})
            response.force_close()
            return response
        return probe_response(self._health, request)

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        try:
            self._live.enter(exchange)
            try:
                with exchange.watch:
                    return await self._serve(exchange)
            finally:
                self._live.leave(exchange)
        except ApiError as error:
            return await self._fail(exchange, error)
        except ClientGone:
            raise
        except Exception:
            log.exception("request.crashed")
            return await self._fail(exchange, InternalError("The gateway failed. It is not your fault."))

    async def _serve(self, exchange: Exchange) -> web.StreamResponse:
        """Answer by path and method. Authentication comes before any answer that depends on the path."""
        check(exchange.request)
        method, path = exchange.request.method, exchange.path
        endpoint = exchange.endpoint
        if path == PATH:
            _allow(exchange, "GET")
            return await self._describe(exchange)
        if endpoint is not None and method == "POST":
            await self._pipeline.run(exchange, endpoint)
            assert exchange.client.response is not None
            exchange.record.status = exchange.client.response.status
            return exchange.client.response
        principal = await self._pipeline.begin(exchange)
        exchange.stages.enter("answer")
        if endpoint is not None:
            raise MethodNotAllowed(f"{path} takes POST, not {method[:16]}.", allow="POST")
        if path == MODELS or _is_below(f"{MODELS}/", path):
            _allow(exchange, "GET")
            name = unquote(path.removeprefix(MODELS)[1:])  # SDKs escape the slash of org/model
            return await self._send(exchange, self._models(exchange, principal, name))
        if _is_below(REQUESTS, path):
            _allow(exchange, "DELETE")
            request_id = RequestId(path.removeprefix(REQUESTS))
            if (wait_s := self._ends.wait_s(principal.tenant, self._clock.monotonic())) > 0:
                raise RateLimited("Too many requests are ended one by one.", retry_after_s=wait_s)
            ended = self._live.end(principal.tenant, request_id, aborted, exchange)
            if is_id(request_id):  # no request has another, and the other workers are asked in few words
                ended += await self.end_elsewhere(principal.tenant, request_id)
            return await self._send(exchange, msgspec.json.encode(AbortResponse(request_id, ended)))
        raise RouteNotFound(no_such_path(path, lambda other: _endpoint(other) != UNKNOWN))

    async def _describe(self, exchange: Exchange) -> web.StreamResponse:
        """Send the API's description. It is for everybody, so those who read it slowly are bounded."""
        if self._describing >= DESCRIBING_MAX:
            raise Overloaded("Too many callers read this at the moment.", retry_after_s=1.0)
        self._describing += 1
        try:
            exchange.stages.enter("answer")
            return await self._write(exchange, document(), {"cache-control": "public, max-age=3600"})
        finally:
            self._describing -= 1

    def _models(self, exchange: Exchange, principal: Principal, name: str) -> bytes:
        tenants = exchange.accounts.tenants
        if name:
            return msgspec.json.encode(self._lists.one(name, tenants.resolve(principal, name)))
        self._live.claim(exchange, principal.tenant)  # who reads a long list slowly holds a part of it
        return self._lists.all(tenants, principal)

    # -- answers ----------------------------------------------------------------------------------

    async def _send(self, exchange: Exchange, body: bytes) -> web.StreamResponse:
        await self._look_up_windows(exchange)
        return await self._write(exchange, body, {})

    async def _write(self, exchange: Exchange, body: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
        """Write a whole answer as fast as its client reads it."""
        client = exchange.client
        await client.begin(
            HTTPStatus.OK, {**exchange.headers(), "content-type": JSON, **headers}, body, whole=True
        )
        await client.drain()
        await client.finish()
        assert client.response is not None
        exchange.record.status = int(HTTPStatus.OK)
        return client.response

    async def _fail(self, exchange: Exchange, error: ApiError) -> web.StreamResponse:
        """Answer with an error, or end an answer that has begun with it."""
        begun = exchange.client.response
        if begun is not None and exchange.client.finished:
            exchange.record.status = begun.status  # its whole answer was sent already
            return begun
        exchange.record.failed(error, begun.status if begun else None)
        dialect = CHUNKS if exchange.endpoint is None else exchange.endpoint.dialect
        if begun is not None:
            at_boundary = exchange.progress.scanner.at_boundary
            await exchange.client.fail(error, dialect.error_event(error) if at_boundary else None)
            return begun
        await self._look_up_windows(exchange)
        response = error_response(error, exchange.headers(), dialect)
        if exchange.stages.now == "edge" or not exchange.request.content.is_eof():
            response.force_close()  # its head was refused, or the rest of its body is dropped
            serves(exchange.request, exchange.record.tenant or "")
        return response

    async def _look_up_windows(self, exchange: Exchange) -> None:
        """Look up the caller's quotas for the `x-ratelimit-*` headers, where no reservation did."""
        if exchange.principal is not None and exchange.windows is None:
            exchange.windows = await self._windows.of(exchange.accounts.subjects(exchange.principal))

    # -- the life of a request --------------------------------------------------------------------

    def _open(self, request: web.BaseRequest, path: str) -> Exchange:
        headers = request.headers
        stages = self._tracing.stages(
            "gateway",
            self._clock,
            traceparent=headers.get(TRACEPARENT_HEADER),
            tracestate=headers.get(TRACESTATE_HEADER),
        )
        watch = Watch(self._config.timeouts.total_s, self._soonest_s)
        request_id = accept_request_id(headers.get(REQUEST_ID_HEADER))
        endpoint = ENDPOINTS.get(path)
        dialect = CHUNKS if endpoint is None else endpoint.dialect
        return Exchange(
            request=request,
            path=path,
            endpoint=endpoint,
            request_id=request_id,
            record=RequestRecord(request_id, request.method[:16], _endpoint(path)),
            stages=stages,
            watch=watch,
            client=Client(request, watch, self._config.timeouts.slow_client_s),
            accounts=self._accounts.now,
            timeouts=self._config.timeouts,
            clock=self._clock,
            reservation=ReservationId(f"{self._name}-{next(self._count)}"),
            arrived_s=stages.enter("edge"),
            progress=Progress(dialect.scanner(dialect.done)),
        )

    def _complete(self, exchange: Exchange) -> None:
        record, stages = exchange.record, exchange.stages
        record.stage = record.stage or stages.now
        record.stream = exchange.streams
        record.reserved += exchange.reserved
        record.decision = exchange.decision
        record.set_progress(exchange.progress)
        self._reporter.completed(record, stages, stages.enter(stages.now) - exchange.arrived_s)

    def refuse_unparsed(self, cause: str) -> web.Response:
        """The answer to a request that is not well-formed HTTP, or whose head is too large. Its completed
        line is written here."""
        message = "The request is not well-formed HTTP, or its headers are too large."
        error = InvalidRequest(message, detail=cause)
        record = RequestRecord(mint_request_id(), "", UNPARSED, stage="parse")
        record.failed(error, None)
        self._reporter.completed(record, Stages("gateway", self._clock), 0.0)
        response = error_response(error, {REQUEST_ID_HEADER: record.request_id})
        response.force_close()
        return response


async def _nowhere(_: TenantId, __: RequestId) -> int:
    return 0


def aborted() -> ApiError:
    """The error of a request that its caller ended."""
    return RequestAborted("It was aborted.")


def _client_left(exchange: Exchange) -> None:
    response = exchange.client.response
    if response is not None and exchange.progress.delivered:
        exchange.record.status = response.status  # the whole answer was sent
    else:
        exchange.record.client_left()


def _endpoint(path: str) -> str:
    """The route of a path, for logs and metrics: one of a few constants, whatever the path."""
    if path in ENDPOINTS or path in (MODELS, PATH):
        return path
    if _is_below(f"{MODELS}/", path):
        return f"{MODELS}/{{id}}"
    return f"{REQUESTS}{{id}}" if _is_below(REQUESTS, path) else UNKNOWN


def _is_below(prefix: str, path: str) -> bool:
    """True if an id follows the prefix. A slash at the end makes it another path, which is not served."""
    return path.startswith(prefix) and path != prefix


def _allow(exchange: Exchange, method: str) -> None:
    if exchange.request.method != method and (exchange.request.method, method) != ("HEAD", "GET"):
        allow = "GET, HEAD" if method == "GET" else method
        raise MethodNotAllowed(f"This takes {method}, not {exchange.request.method[:16]}.", allow=allow)
