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
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

import msgspec
from aiohttp import web

from gateway.admission.quota import QuotaStore, ReservationId
from gateway.client.answer import Client
from gateway.client.connection import ReadsInTurn, check_request, close_after, path_of
from gateway.client.deadlines import Watch
from gateway.client.interface import Body, ClientConnection, Sink
from gateway.client.responses import JSON, error_response, probe_response
from gateway.config.whole import GatewayConfig
from gateway.directory.accounts import AccountsReader
from gateway.endpoints.routes import (
    CANCEL_RESPONSE,
    DELETE_RESPONSE,
    DESCRIBE,
    END_REQUESTS,
    LIST_INPUT_ITEMS,
    LIST_MODELS,
    SHOW_MODEL,
    SHOW_RESPONSE,
    Route,
    find,
    missing,
)
from gateway.identity.caller import Principal
from gateway.openapi.public import document
from gateway.relay.engines import Engines
from gateway.relay.stream import Progress
from gateway.request.exchange import Exchange, LiveRequests
from gateway.request.key_uses import KeyUses
from gateway.request.minutes import Minutes
from gateway.request.model_lists import ModelLists
from gateway.request.pace import Pace
from gateway.request.pipeline import Pipeline
from gateway.request.record import ExchangeRecord, Reporter
from gateway.request.recorder import Recorder
from gateway.request.stored_responses import EndsElsewhere, StoredAnswer, StoredResponses, Tells
from gateway.request.told_windows import ToldWindows
from gateway.stored.keeping import KeptResponses
from shared.apis.holding import Holding
from shared.apis.models import VERSION_HEADER, ModelInfo
from shared.apis.requests import AbortResponse
from shared.process import logs
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.lifecycle import Phase
from shared.process.probes import PROBES, Health
from shared.telemetry.stages import Stages
from shared.telemetry.tracing import NO_TRACING, Tracing
from shared.wire.completed_line import UNPARSED
from shared.wire.errors import (
    ApiError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    Overloaded,
    RateLimited,
    RequestAborted,
    forget_frames,
)
from shared.wire.http import ClientGone
from shared.wire.ids import (
    IDEMPOTENCY_HEADER,
    REQUEST_ID_HEADER,
    RETRY_HEADER,
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    RequestId,
    TenantId,
    accept_request_id,
    is_id,
    mint_request_id,
)

DESCRIBING_MAX: Final = 64
"""Callers that are sent the API's description at a time: they have no key, and each may hold it in its
connection's buffers for as long as a slow client may."""

ENDS_PER_S: Final = 32.0
"""Ends of requests that a tenant may ask one worker for each second. Every worker looks for each, among all
of its requests."""
ENDS_AT_ONCE: Final = 1024
"""Those that it may ask for at once, as a client that gives up all that it asked."""

_BAD_REQUEST: Final = int(HTTPStatus.BAD_REQUEST)
"""The first status of an error. Looking it up in its enum costs a call."""

log = logs.get(__name__)

Handler = Callable[[Exchange, str], Awaitable[None]]
"""Answers a request, by the id in its path; empty where it has none."""


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
        kept: KeptResponses,
        clock: Clock = SYSTEM_CLOCK,
        tracing: Tracing = NO_TRACING,
        recorder: Recorder | None = None,
        minutes: Minutes | None = None,
        key_uses: KeyUses | None = None,
    ) -> None:
        self._config = config
        self._tracing = tracing
        self._accounts = accounts
        self._pipeline = pipeline
        self._live = live
        self._windows = ToldWindows(quotas, clock)
        self._ends = Pace(ENDS_PER_S, ENDS_AT_ONCE)
        self._health = health
        self._stored = StoredResponses(kept)
        self._clock = clock
        timeouts = config.timeouts
        self._soonest_s = min(
            timeouts.body_s, timeouts.first_token_s, timeouts.inter_token_s, timeouts.slow_client_s
        )
        self._lists = ModelLists(engines, int(clock.wall()))
        self._reporter = Reporter(tracing, recorder, minutes, key_uses)
        self._name = secrets.token_hex(8)
        """A name of this process in the ids of its reservations, which makes them differ from other
        gateways'."""
        self._count = itertools.count()
        self.end_elsewhere: EndsElsewhere = _nowhere
        """Ends a tenant's requests of an id that other workers have, and returns how many."""
        self.end_at_others: EndsElsewhere = _nowhere
        """Ends those that other gateways have."""
        self._describing = 0
        """The number of callers that are being sent the API's description."""
        self._handlers: Final = self._table()
        """The handlers of the routes that need no engine."""

    def _table(self) -> Mapping[Route, Handler]:
        stored = self._stored
        return {
            LIST_MODELS: self._list_models,
            SHOW_MODEL: self._show_model,
            END_REQUESTS: self._end_requests,
            DESCRIBE: self._describe,
            SHOW_RESPONSE: partial(self._tell, stored.show),
            LIST_INPUT_ITEMS: partial(self._tell, stored.list_items),
            DELETE_RESPONSE: partial(self._tell, stored.delete),
            CANCEL_RESPONSE: partial(self._tell, self._cancel),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of the public listener."""
        path = path_of(request)
        if self._health.lifecycle.phase is Phase.DRAINING:  # its connection is closed after the answer
            close_after(request)
        if path in PROBES:
            return self._probe(request)
        timeouts, connection = self._config.timeouts, request.protocol
        assert isinstance(connection, ReadsInTurn)
        watch = Watch(timeouts.total_s, self._soonest_s)
        client = Client(request, watch, timeouts.slow_client_s, self._clock.monotonic)
        sent = request.method, path, request.headers, request.content
        try:
            await self.answer(self.open(*sent, connection, client, watch), request)
        except ClientGone:
            raise ConnectionResetError("the client left") from None
        assert client.response is not None
        return client.response

    def _probe(self, request: web.BaseRequest) -> web.Response:
        try:
            check_request(request)
        except InvalidRequest as error:
            response = error_response(error, {REQUEST_ID_HEADER: mint_request_id()})
            response.force_close()
            return response
        return probe_response(self._health, request)

    async def answer(self, exchange: Exchange, request: web.BaseRequest | None = None) -> None:
        """Answer a request, and write its completed line. `request` is what came by HTTP, whose head is
        checked; None where the caller has no socket. Raises ClientGone."""
        logs.REQUEST_ID.set(exchange.request_id)
        try:
            await self._answer(exchange, request)
        except (ClientGone, asyncio.CancelledError):
            _client_left(exchange)
            raise
        finally:
            self._complete(exchange)
            if (reason := exchange.watch.reason) is not None:
                forget_frames(reason)

    async def _answer(self, exchange: Exchange, request: web.BaseRequest | None) -> None:
        try:
            self._live.enter(exchange)
            try:
                with exchange.watch:
                    await self._serve(exchange, request)
            finally:
                self._live.leave(exchange)
            assert exchange.client.status is not None
            exchange.record.status = exchange.client.status
        except ApiError as error:
            await self._fail(exchange, error)
        except ClientGone:
            raise
        except Exception:
            log.exception("request.crashed")
            await self._fail(exchange, InternalError("The gateway failed. It is not your fault."))

    def _serve(self, exchange: Exchange, request: web.BaseRequest | None) -> Awaitable[None]:
        """Answer by path and method."""
        if request is not None:
            check_request(request)
        route = exchange.resource.routes.get(exchange.method)
        if route is None or route.endpoint is None:
            if request is not None:
                exchange.query = request.rel_url.raw_query_string
            return self._answer_here(exchange, route)
        return self._pipeline.run(exchange, route.endpoint)

    async def _answer_here(self, exchange: Exchange, route: Route | None) -> None:
        """Answer without an engine. Authentication comes before any answer that depends on the path. `route`
        is None where nothing is served."""
        resource, path = exchange.resource, exchange.path
        if not resource.is_open:
            await self._pipeline.begin(exchange)
            exchange.mark(("answer", exchange.clock.monotonic()))
        if not resource.routes:
            raise missing(path)
        if route is None:
            raise _not_allowed(exchange)
        await self._handlers[route](exchange, resource.id_of(path))

    # -- the routes that need no engine -----------------------------------------------------------

    async def _list_models(self, exchange: Exchange, _: str) -> None:
        principal = _principal_of(exchange)
        self._live.claim(exchange, principal.tenant)  # who reads a long list slowly holds a part of it
        is_anthropics = VERSION_HEADER in exchange.headers
        listed = self._lists.all(exchange.accounts.tenants, principal, is_anthropics)
        await self._send(exchange, listed)

    async def _show_model(self, exchange: Exchange, id_: str) -> None:
        name = unquote(id_)  # SDKs escape the slash of org/model
        model = exchange.accounts.tenants.resolve(_principal_of(exchange), name)
        card = self._lists.one(name, model)
        told = ModelInfo.of(card) if VERSION_HEADER in exchange.headers else card
        await self._send(exchange, msgspec.json.encode(told))

    async def _end_requests(self, exchange: Exchange, id_: str) -> None:
        ended = await self._end(exchange, id_)
        await self._send(exchange, msgspec.json.encode(AbortResponse(id_, ended)))

    async def _end(self, exchange: Exchange, id_: str) -> int:
        """End the caller's requests of an id, also those that other workers have. Returns how many."""
        tenant, request_id = _principal_of(exchange).tenant, RequestId(id_)
        if (wait_s := self._ends.wait_s(tenant, self._clock.monotonic())) > 0:
            raise RateLimited("Too many requests are ended one by one.", retry_after_s=wait_s)
        ended = self._live.end(tenant, request_id, aborted, exchange)
        if is_id(request_id):  # no request has another, and the other workers are asked in few words
            ended += await self.end_elsewhere(tenant, request_id)
        return ended

    async def _tell(self, tells: Tells, exchange: Exchange, id_: str) -> None:
        """Answer what is asked of a response that is kept."""
        self._live.claim(exchange, _principal_of(exchange).tenant)
        with self._stored.holding(exchange) as holding:
            told = await tells(exchange, id_, holding)
            await self._look_up_windows(exchange)
            await self._write(exchange, told.body, {"content-type": told.content_type})

    async def _cancel(self, exchange: Exchange, id_: str, holding: Holding) -> StoredAnswer:
        ended = await self._end(exchange, id_)
        return await self._stored.cancelled(exchange, id_, holding, ended, self.end_at_others)

    async def _describe(self, exchange: Exchange, _: str) -> None:
        """Send the API's description. It is for everybody, so those who read it slowly are bounded."""
        if self._describing >= DESCRIBING_MAX:
            raise Overloaded("Too many callers read this at the moment.", retry_after_s=1.0)
        self._describing += 1
        try:
            exchange.mark(("answer", exchange.clock.monotonic()))
            await self._write(exchange, document(), {"cache-control": "public, max-age=3600"})
        finally:
            self._describing -= 1

    # -- answers ----------------------------------------------------------------------------------

    async def _send(self, exchange: Exchange, body: bytes) -> None:
        await self._look_up_windows(exchange)
        await self._write(exchange, body, {})

    async def _write(self, exchange: Exchange, body: bytes, headers: Mapping[str, str]) -> None:
        """Write a whole answer as fast as its client reads it."""
        client, all_headers = exchange.client, {**exchange.answer_headers(), "content-type": JSON, **headers}
        await client.begin(int(HTTPStatus.OK), all_headers, body, whole=True)
        await client.drain()
        await client.finish()

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        """Answer with an error, or end an answer that has begun with it."""
        forget_frames(error)
        client = exchange.client
        if (begun := client.status) is not None and client.finished:
            exchange.record.status = begun  # its whole answer was sent already
            return
        dialect = exchange.resource.dialect
        exchange.record.failed(error, begun or dialect.error_status(type(error)))
        if begun is not None:
            event = dialect.failing(error, exchange.request_id, exchange.progress.events)
            at_boundary = exchange.progress.scanner.at_boundary
            if exchange.kept is not None and exchange.kept.is_within_event:
                at_boundary = False
            await client.fail(error, event if at_boundary else None)
            return
        await self._look_up_windows(exchange)
        closes = exchange.stages.now == "edge" or not exchange.body.is_eof()
        client.refuse(error, exchange.answer_headers(), dialect, closes=closes)
        if closes:  # its head was refused, or the rest of its body is dropped
            exchange.connection.tenant = exchange.record.tenant or ""

    async def _look_up_windows(self, exchange: Exchange) -> None:
        """Look up the caller's quotas for the `x-ratelimit-*` headers, where no reservation did."""
        if exchange.principal is not None and exchange.windows is None:
            exchange.windows = await self._windows.of(exchange.accounts.subjects(exchange.principal))

    # -- the life of a request --------------------------------------------------------------------

    def open(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Body,
        connection: ClientConnection,
        client: Sink,
        watch: Watch,
    ) -> Exchange:
        """The exchange of a request. `headers` are looked up by small letters."""
        stages = Stages(
            "gateway",
            self._clock,
            traceparent=headers.get(TRACEPARENT_HEADER),
            tracestate=headers.get(TRACESTATE_HEADER),
            samples=self._tracing.samples,
        )
        request_id = accept_request_id(headers.get(REQUEST_ID_HEADER))
        resource = find(path)
        if resource.anthropics is not None and VERSION_HEADER in headers:
            resource = resource.anthropics
        dialect = resource.dialect
        return Exchange(
            method=method,
            path=path,
            resource=resource,
            headers=headers,
            body=body,
            connection=connection,
            request_id=request_id,
            record=ExchangeRecord.begun(request_id, method[:16], resource.path, stages),
            stages=stages,
            mark=stages.mark,
            watch=watch,
            client=client,
            accounts=self._accounts.now,
            timeouts=self._config.timeouts,
            clock=self._clock,
            reservation=ReservationId(f"{self._name}-{next(self._count)}"),
            arrived_s=stages.enter("edge"),
            progress=Progress(dialect.scanner(dialect.done)),
        )

    def _complete(self, exchange: Exchange) -> None:
        record, stages, decision = exchange.record, exchange.stages, exchange.decision
        record.stage = record.stage or stages.now
        record.stream, record.session = exchange.streams, exchange.session
        record.reserved_tokens += exchange.reserved
        retry = exchange.headers.get(RETRY_HEADER)
        if (retry is not None and retry != "0") or record.status >= _BAD_REQUEST:
            record.one_of_several(retry or "", exchange.headers.get(IDEMPOTENCY_HEADER))
        if blocked := exchange.client.blocked:
            record.client_was_behind(blocked, stages)
        refusal = None if decision is None else decision.refusal
        took_s = stages.enter(stages.now) - exchange.arrived_s
        self._reporter.completed(record, exchange.progress, refusal, stages, took_s)

    def refuse_unparsed(self, cause: str) -> web.Response:
        """The answer to a request that is not well-formed HTTP, or whose head is too large. Its completed
        line is written here."""
        message = "The request is not well-formed HTTP, or its headers are too large."
        error = InvalidRequest(message, detail=cause)
        stages = Stages("gateway", self._clock)
        record = ExchangeRecord.begun(mint_request_id(), "", UNPARSED, stages)
        record.stage = "parse"
        record.failed(error, int(error.status))
        self._reporter.completed(record, Progress(), None, stages, 0.0)
        response = error_response(error, {REQUEST_ID_HEADER: record.request_id})
        response.force_close()
        return response


async def _nowhere(_: TenantId, __: RequestId) -> int:
    return 0


def aborted() -> ApiError:
    """The error of a request that its caller ended."""
    return RequestAborted("It was aborted.")


def _principal_of(exchange: Exchange) -> Principal:
    """The caller of a route that is not open."""
    assert exchange.principal is not None
    return exchange.principal


def _client_left(exchange: Exchange) -> None:
    if (status := exchange.client.status) is not None and exchange.progress.delivered:
        exchange.record.status = status  # the whole answer was sent
    else:
        exchange.record.client_left()


def _not_allowed(exchange: Exchange) -> MethodNotAllowed:
    routes = exchange.resource.routes
    methods = " or ".join(dict.fromkeys(route.method for route in routes.values()))
    what = "This" if exchange.resource.endpoint is None else exchange.path
    message = f"{what} takes {methods}, not {exchange.method[:16]}."
    return MethodNotAllowed(message, allow=", ".join(routes))
