"""THE ORDER of a request's stages. Nobody else knows it, and no stage knows another.

    auth        who calls?                              401
    seat        may they have one more request?         429 503; from the headers alone
    body        the bytes, bounded in size and time     408 413 503
    validate    what do they ask for?                   400, naming the field
    tenant      may they use that model?                404
    tokenize    how much is it?                         400 when it cannot fit the context
    quota       may they have so much now?              429; reserves everything or nothing
    route       which replica has the least to do?
    connect     a connection to it, or to another one   502 504
    wait        until the first token                   504, or what the engine says
    relay       bytes through, until the last
    settle      the reservation, with what was used

Rules:

1. No work before its reservation. The seat is taken before the body is read; the body's bytes, and what is
   made of them, are reserved as they come; tokens are counted no further than the context goes, and reserved
   before an engine hears of them. What a request holds of its body is given back once it is answered.
2. What is reserved is settled, whichever way the request ends, also when the client leaves: with what the
   engine reports, which comes even of answers that were cut off. Where it cannot be learnt (the engine is
   gone, or another's), what was reserved is charged; nothing when nothing was dispatched, or when the engine
   refused.
3. Nothing is dispatched twice, except to another replica when no connection was had to the first, when that
   one refused at its door (503), or when its connection broke before it answered. A 503 that reports tokens
   is an end and no refusal: to compute them again would cost more than was reserved. When it was its queue
   that was full, or when it had been dispatched, no more than `ELSEWHERE_MAX` others are asked: a crowd
   before all doors is not to be multiplied by their number.
4. What may be generated is what was reserved: a request that states no maximum, from a caller whose tokens
   are limited, is given one.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Final

from msgspec import Struct

from gateway.accounts import Terms
from gateway.admission.quota import Decision, Meter, QuotaStore, Refusal
from gateway.admission.tokens import Count, check_fits, count_tokens, span
from gateway.admission.validate import validate
from gateway.client.body import read_body
from gateway.client.deadlines import Watch
from gateway.config import GatewayConfig, ModelConfig
from gateway.endpoints import Dialect, Endpoint, ProxiedRequest
from gateway.engines import Engines
from gateway.exchange import Exchange, LiveRequests
from gateway.identity.caller import Caller, Principal
from gateway.outbound import outbound
from gateway.record import observe_attempt, observe_decision
from gateway.relay.credentials import Credentials
from gateway.relay.stream import Progress, Relay
from gateway.relay.upstream import Answer, Outbound, Upstream
from gateway.routing.replicas import Outcome, Replica, Replicas
from gateway.shield import Done, shielded
from shared.errors import (
    ApiError,
    BudgetExhausted,
    ConnectTimeout,
    EngineFailed,
    FirstTokenTimeout,
    IdentityUnavailable,
    InterTokenTimeout,
    NotReady,
    Overloaded,
    RateLimited,
    RequestExceedsQuota,
    TokensRateLimited,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnreachable,
    forget_frames,
)
from shared.fair_share import FairShare
from shared.fair_threads import FairThreads
from shared.holding import Holding, weigh, weigh_long
from shared.ids import TOKENIZER_HEADER, ReplicaId
from shared.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from shared.sse import Closing
from shared.validation import INLINE_LEN_MAX, Parsed

NO_TOKENS = Count(prompt_tokens=0, longest=0, prompts=0, extension=None)

IDENTITY_S: Final = 5.0
"""How long it may take to say who calls, where somebody else is asked."""
ELSEWHERE_MAX: Final = 1
"""Other replicas that are asked when one's queue is full, or when it broke off."""
ELSEWHERE: Final = (ConnectTimeout, UpstreamUnreachable, NotReady, Overloaded, UpstreamLost)
"""The failures of one replica after which another may be asked."""
FAILURES: Final = (
    ConnectTimeout,
    UpstreamUnreachable,
    NotReady,
    UpstreamFailed,
    EngineFailed,
    FirstTokenTimeout,
    InterTokenTimeout,
)
"""The errors that tell of a replica that does not work."""
REPORT_S: Final = 0.25
"""How long an engine may take to report what an answer that was cut off has cost."""


class Prepared(Struct, frozen=True):
    """A request that may be dispatched."""

    model: ModelConfig
    outbound: Outbound
    tokens: int
    """Reserved: its load on a replica."""


class Dispatched(Struct, frozen=True):
    """A request that a replica has begun to answer."""

    model: ModelConfig
    replica: Replica
    tokens: int
    answer: Answer
    hides_usage: bool


class Pipeline:
    def __init__(
        self,
        config: GatewayConfig,
        engines: Engines,
        quotas: QuotaStore,
        replicas: Replicas,
        upstream: Upstream,
        credentials: Credentials,
        live: LiveRequests,
        threads: FairThreads,
        memory: FairShare,
    ) -> None:
        """`memory`: the bytes of which requests hold a part until they are answered."""
        self._live = live
        self._threads = threads
        self._memory = memory
        self._config = config
        self._engines = engines
        self._quotas = quotas
        self._replicas = replicas
        self._upstream = upstream
        self._credentials = credentials

    async def run(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Answer one request. Raises ApiError, ClientGone or CancelledError; by then all is settled."""
        principal = await self.authenticate(exchange)
        try:
            await self._take_seat(exchange, principal, endpoint)
            dispatched = await self._dispatch(exchange, principal, endpoint)
            try:
                await self._relay(exchange, dispatched, endpoint.dialect)
            finally:
                outcome = outcome_of(sys.exception(), exchange.watch)
                self._replicas.give_back(dispatched.replica, dispatched.tokens, outcome)
                await dispatched.answer.aclose()  # tells the engine to stop, if there is more
        finally:
            await self._settle(exchange)

    async def _dispatch(self, exchange: Exchange, principal: Principal, endpoint: Endpoint) -> Dispatched:
        """All that holds the request's body is in here, and is gone when this returns."""
        with Holding(self._memory, principal.tenant) as holding:
            parsed = await self._read(exchange, principal, endpoint, holding)
            terms = self._resolve(exchange, principal, parsed)
            count = await self._count(exchange, terms, parsed.request)
            maximum = await self._reserve(exchange, terms, parsed.request, count)
            request = self._outbound(exchange, terms, parsed, count, maximum)
            del parsed, count  # what is held from here on is the request as it is sent
            holding.shrink(len(request.content))
            return await self._send(exchange, Prepared(terms.model, request, exchange.reserved))

    async def authenticate(self, exchange: Exchange) -> Principal:
        exchange.stages.enter("auth")
        request = exchange.request
        caller = Caller(request.headers.get("authorization"), request.transport)
        found = exchange.accounts.identity.identify(caller, exchange.clock.wall())
        if isinstance(found, Done):  # there was nothing to wait for
            principal: Principal = found.result
        else:
            exchange.watch.expect(IDENTITY_S, IdentityUnavailable, "Callers cannot be told at the moment.")
            principal = await found
            exchange.watch.relax()
        exchange.principal = principal
        exchange.record.key, exchange.record.tenant = principal.key, principal.tenant
        return principal

    async def _take_seat(self, exchange: Exchange, principal: Principal, endpoint: Endpoint) -> None:
        exchange.stages.enter("seat")
        self._live.claim(exchange, principal.tenant)
        exchange.is_seated = True
        subjects = exchange.accounts.subjects(principal)
        generates = endpoint.generates
        decision = await self._quotas.enter(exchange.reservation, subjects, needs_tokens=generates)
        self._heed(exchange, decision, 1 if generates else 0)

    async def _read(
        self, exchange: Exchange, principal: Principal, endpoint: Endpoint, holding: Holding
    ) -> Parsed[ProxiedRequest]:
        exchange.stages.enter("body")
        limits, timeouts = self._config.limits, self._config.timeouts
        body = await read_body(
            exchange.request, exchange.watch, holding, limits.body_len_max, timeouts.body_s
        )
        exchange.stages.enter("validate")
        refuses_unknown = self._config.admission.unknown_fields
        if len(body) <= INLINE_LEN_MAX:
            parsed = validate(body, endpoint.shape, refuses_unknown, weigh(body, holding))
        else:
            census = await weigh_long(body, holding, self._threads, principal.tenant)
            work = partial(validate, body, endpoint.shape, refuses_unknown, census)
            parsed = await self._threads.call(principal.tenant, work)
        assert isinstance(parsed.request, ProxiedRequest)
        exchange.ignored_fields = parsed.ignored_header
        exchange.streams = isinstance(parsed.request, GenerationRequest) and bool(parsed.request.stream)
        return parsed

    def _resolve(self, exchange: Exchange, principal: Principal, parsed: Parsed[ProxiedRequest]) -> Terms:
        exchange.stages.enter("tenant")
        terms = exchange.accounts.terms(principal, parsed.request.model)
        exchange.record.model = terms.model.name
        exchange.bound_by(terms.timeouts)
        if not self._engines.of(terms.model).is_foreign:  # which may do what ours cannot
            parsed.require_supported()
        return terms

    async def _count(self, exchange: Exchange, terms: Terms, request: ProxiedRequest) -> Count:
        exchange.stages.enter("tokenize")
        if not isinstance(request, ChatRequest | CompletionRequest):
            return NO_TOKENS
        engine = self._engines.of(terms.model)
        context_len = engine.max_model_len
        count = await count_tokens(request, engine.tokenizer, context_len, self._threads, terms.tenant.id)
        exchange.record.prompt_tokens, exchange.record.prompt_exact = count.prompt_tokens, count.is_exact
        check_fits(request, count, context_len)
        return count

    async def _reserve(
        self, exchange: Exchange, terms: Terms, request: ProxiedRequest, count: Count
    ) -> int | None:
        """Reserve the request's tokens. Returns what each choice may generate at most, None where the request
        says so itself or nothing limits it."""
        exchange.stages.enter("quota")
        if not isinstance(request, ChatRequest | CompletionRequest):
            exchange.windows = await self._quotas.windows(terms.subjects)
            return None
        context_len = self._engines.of(terms.model).max_model_len
        asked = span(
            request, count, context_len, self._config.admission.completion_estimate, terms.tokens_max
        )
        decision = await self._quotas.reserve(exchange.reservation, terms.subjects, asked.least, asked.most)
        self._heed(exchange, decision, asked.least)
        exchange.reserved = decision.granted
        return asked.maximum_each(decision.granted) if asked.is_open else None

    def _heed(self, exchange: Exchange, decision: Decision, tokens: int) -> None:
        """Raises what a refusal means. `tokens`: the least that was asked for."""
        exchange.windows, exchange.decision = decision.windows, decision
        observe_decision(decision)
        if decision.refusal is not None:
            raise _refused(decision.refusal, tokens)

    async def _settle(self, exchange: Exchange) -> None:
        """Whatever was reserved, and whether or not anybody heard that it was."""
        exchange.record.stage = exchange.stages.now
        exchange.stages.enter("settle")
        progress = exchange.progress
        try:
            if progress.awaits_report:
                await shielded(progress.report.wait(REPORT_S))
        finally:
            used = used_tokens(progress, exchange.reserved)
            await shielded(self._quotas.settle(exchange.reservation, used), exchange.record.settlement)

    def _outbound(
        self,
        exchange: Exchange,
        terms: Terms,
        parsed: Parsed[ProxiedRequest],
        count: Count,
        maximum: int | None,
    ) -> Outbound:
        ours = not self._engines.of(terms.model).is_foreign
        credentials = self._credentials.headers(terms.model)
        return outbound(exchange, terms, parsed, count, maximum=maximum, ours=ours, credentials=credentials)

    async def _send(self, exchange: Exchange, prepared: Prepared) -> Dispatched:
        """Rule 3."""
        exchange.stages.enter("route")
        turn = self._replicas.next_turn()
        failure: ApiError | None = None
        tried: set[ReplicaId] = set()
        elsewhere = 0
        try:
            while True:
                replica = None
                if elsewhere <= ELSEWHERE_MAX:
                    replica = self._replicas.take(prepared.model.name, prepared.tokens, turn, tried)
                if replica is None:
                    raise failure or UpstreamUnreachable("No engine serves this model.")
                exchange.record.attempts += 1
                try:
                    answer = await self._connect(exchange, replica, prepared.outbound)
                    hides_usage = prepared.outbound.asks_for_usage
                    return Dispatched(prepared.model, replica, prepared.tokens, answer, hides_usage)
                except ELSEWHERE as error:
                    forget_frames(error)  # some refer to the error, and all to the request
                    failure = error
                    tried.add(replica.id)
                    elsewhere += isinstance(error, Overloaded | UpstreamLost)
                    exchange.progress.begin_anew(lost=isinstance(error, UpstreamLost))
                    self._replicas.give_back(replica, prepared.tokens, outcome_of(error, exchange.watch))
                    observe_attempt(replica.id, error.code)
                    exchange.stages.enter("route")
                except BaseException as error:
                    self._replicas.give_back(replica, prepared.tokens, outcome_of(error, exchange.watch))
                    raise
        finally:
            del failure  # it refers to this frame, which would keep both, and the body

    async def _connect(self, exchange: Exchange, replica: Replica, request: Outbound) -> Answer:
        exchange.stages.enter("connect")
        exchange.record.replica = replica.id
        if exchange.streams:
            within_s = exchange.timeouts.first_token_s
            exchange.watch.expect(within_s, FirstTokenTimeout, "The engine produced no token in time.")

        def connected() -> None:
            exchange.progress.dispatched = True
            exchange.stages.enter("wait")

        answer = await self._upstream.send(
            replica.protocol,
            replica.url,
            request,
            exchange.timeouts.connect_s,
            connected,
            exchange.progress.report,
        )
        observe_attempt(replica.id, "connected")
        if answer.status == NotReady.status and not _tokens_of(answer.closing):
            # a refusal, which over HTTP/2 the connection may have told instead: both are NotReady
            try:
                raise await answer.error()
            finally:
                await answer.aclose()
        return answer

    async def _relay(self, exchange: Exchange, dispatched: Dispatched, dialect: Dialect) -> None:
        answer = dispatched.answer

        def first_byte() -> dict[str, str]:
            """It is here: the stage, and the headers that the gateway adds."""
            exchange.record.first_byte_s = exchange.stages.enter("relay") - exchange.arrived_s
            return exchange.headers()

        self._engines.of(dispatched.model).observe(answer.headers.get(TOKENIZER_HEADER))
        exchange.take_engine_timing(answer.headers.get("server-timing", ""))
        relay = Relay(
            exchange.client,
            exchange.watch,
            exchange.timeouts,
            exchange.progress,
            first_byte,
            dialect,
            dispatched.hides_usage,
        )
        await relay.run(answer)


def used_tokens(progress: Progress, reserved: int) -> int:
    """What a request is charged in the end; rule 2."""
    if (closing := progress.closing) is not None:
        return _tokens_of(closing)
    if progress.refused or not progress.dispatched:
        return reserved if progress.lost else 0
    return reserved


def _tokens_of(closing: Closing | None) -> int:
    """What the engine reports as computed; 0 when it reports nothing."""
    return 0 if closing is None else closing.prompt_tokens + closing.completion_tokens


def outcome_of(error: BaseException | None, watch: Watch) -> Outcome:
    """What a dispatch that ended so tells about its replica."""
    if error is None:
        return Outcome.WORKED
    told = watch.reason if isinstance(error, asyncio.CancelledError) else error
    return Outcome.FAILED if isinstance(told, FAILURES) else Outcome.NEUTRAL


def _refused(refusal: Refusal, tokens: int) -> ApiError:
    whose = f"This {refusal.scope}'s limit of {refusal.limit}"
    after_s = None if refusal.retry_after_ms is None else refusal.retry_after_ms / 1000
    match refusal.meter:
        case Meter.REQUESTS:
            return RateLimited(f"{whose} requests per minute is reached.", retry_after_s=after_s)
        case Meter.CONCURRENCY:
            return RateLimited(f"{whose} concurrent requests is reached.", retry_after_s=after_s)
        case Meter.TOKENS if after_s is None:
            return RequestExceedsQuota(f"{whose} tokens per minute is less than this request's {tokens}.")
        case Meter.TOKENS:
            message = f"{whose} tokens per minute is reached; this request may take {tokens}."
            return TokensRateLimited(message, retry_after_s=after_s)
        case Meter.BUDGET if refusal.remaining and tokens > 1:
            left = f"has {refusal.remaining} left; this request may take {tokens}, and fewer with max_tokens"
            return BudgetExhausted(f"This {refusal.scope}'s budget of {refusal.limit} tokens {left}.")
        case Meter.BUDGET:
            return BudgetExhausted(f"This {refusal.scope}'s budget of {refusal.limit} tokens is spent.")
