"""THE ORDER of a request's stages. Nobody else knows it, and no stage knows another.

    auth        who calls?                              401
    body        the bytes, bounded in size and time     408 413
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

1. What is reserved is settled, whichever way the request ends, also when the client leaves: usage as
   the engine reports it; failing that (the client left, the engine died) the prompt, once it was
   dispatched, and a token for each event passed on; nothing when the engine refused.
2. Nothing is dispatched twice, except to another replica when no connection was had to the first, or
   when that one refused at its door (503). When it was its queue that was full, no more than
   `ELSEWHERE_MAX` others are asked: a crowd before all doors is not to be multiplied by their number.
"""

from __future__ import annotations

from typing import Final, cast

from gateway.admission.quota import Meter, QuotaStore, Refusal
from gateway.admission.tokens import Count, TokenCounter
from gateway.admission.validate import validate
from gateway.body import read_body
from gateway.config import GatewayConfig, ModelConfig
from gateway.credentials import Credentials
from gateway.directory import Terms
from gateway.exchange import Exchange
from gateway.identity.keys import Principal
from gateway.outbound import outbound
from gateway.record import observe_attempt, observe_decision
from gateway.relay.stream import Progress, Relay
from gateway.relay.upstream import Answer, Outbound, Upstream
from gateway.routing.replicas import Replica, Replicas
from gateway.shield import shielded
from shared.errors import (
    ApiError,
    BudgetExhausted,
    ConnectTimeout,
    FirstTokenTimeout,
    NotReady,
    Overloaded,
    RateLimited,
    RequestExceedsQuota,
    TokensRateLimited,
    UpstreamUnreachable,
)
from shared.ids import TOKENIZER_HEADER, ReplicaId
from shared.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from shared.validation import Parsed

ProxiedRequest = GenerationRequest | TokenizeRequest | DetokenizeRequest
NO_TOKENS = Count(prompt_tokens=0, longest=0, prompts=0, extension=None)

ELSEWHERE_MAX: Final = 1
"""Other replicas that are asked when one's queue is full."""


class Pipeline:
    def __init__(
        self,
        config: GatewayConfig,
        tokens: TokenCounter,
        quotas: QuotaStore,
        replicas: Replicas,
        upstream: Upstream,
        credentials: Credentials,
    ) -> None:
        self._config = config
        self._tokens = tokens
        self._quotas = quotas
        self._replicas = replicas
        self._upstream = upstream
        self._credentials = credentials

    async def run(self, exchange: Exchange) -> None:
        """Answer one request. Raises ApiError, ClientGone or CancelledError; by then all is settled."""
        principal = self.authenticate(exchange)
        parsed = await self._read(exchange)
        terms = self._resolve(exchange, principal, parsed.request)
        count = await self._count(exchange, terms.model, parsed.request)
        try:
            tokens = await self._reserve(exchange, terms, parsed.request, count)
            request = self._outbound(exchange, terms, parsed, count)
            replica, answer = await self._send(exchange, terms.model, request, tokens)
            try:
                await self._relay(exchange, terms.model, answer)
            finally:
                self._replicas.give_back(replica, tokens)
                await answer.aclose()  # tells the engine to stop, if there is more
        finally:
            await self._settle(exchange, count.prompt_tokens)

    def authenticate(self, exchange: Exchange) -> Principal:
        exchange.stages.enter("auth")
        authorization = exchange.request.headers.get("authorization")
        principal = exchange.directory.keys.authenticate(authorization, exchange.clock.wall())
        exchange.principal = principal
        exchange.record.key, exchange.record.tenant = principal.key, principal.tenant
        return principal

    async def _read(self, exchange: Exchange) -> Parsed[ProxiedRequest]:
        exchange.stages.enter("body")
        body = await read_body(
            exchange.request, exchange.watch, self._config.limits.body_len_max, self._config.timeouts.body_s
        )
        exchange.stages.enter("validate")
        parsed = validate(body, exchange.shape, self._config.admission.unknown_fields)
        assert isinstance(parsed.request, ProxiedRequest)
        exchange.ignored_fields = parsed.ignored_header
        exchange.record.stream = isinstance(parsed.request, GenerationRequest) and bool(parsed.request.stream)
        return cast("Parsed[ProxiedRequest]", parsed)  # Parsed is invariant

    def _resolve(self, exchange: Exchange, principal: Principal, request: ProxiedRequest) -> Terms:
        exchange.stages.enter("tenant")
        terms = exchange.directory.terms(principal, request.model)
        exchange.record.model = terms.model.name
        exchange.bound_by(terms.timeouts)
        return terms

    async def _count(self, exchange: Exchange, model: ModelConfig, request: ProxiedRequest) -> Count:
        exchange.stages.enter("tokenize")
        if not isinstance(request, ChatRequest | CompletionRequest):
            return NO_TOKENS
        count = await self._tokens.count(model, request)
        exchange.record.prompt_tokens, exchange.record.prompt_exact = count.prompt_tokens, count.is_exact
        self._tokens.check_fits(model, request, count)
        return count

    async def _reserve(self, exchange: Exchange, terms: Terms, request: ProxiedRequest, count: Count) -> int:
        """The reserved tokens."""
        exchange.stages.enter("quota")
        tokens = 0
        if isinstance(request, ChatRequest | CompletionRequest):
            most = self._config.admission.completion_estimate
            tokens = self._tokens.reservation(terms.model, request, count, most, terms.tokens_per_min)
        decision = await self._quotas.reserve(exchange.reservation, terms.subjects, tokens)
        exchange.windows, exchange.record.decision = decision.windows, decision
        observe_decision(decision, tokens)
        if decision.refusal is not None:
            raise _refused(decision.refusal, tokens)
        exchange.record.reserved = tokens
        return tokens

    async def _settle(self, exchange: Exchange, prompt_tokens: int) -> None:
        """Whatever was reserved, and whether or not anybody heard that it was."""
        exchange.settling()
        used = used_tokens(exchange.progress, prompt_tokens, exchange.record.reserved)
        await shielded(self._quotas.settle(exchange.reservation, used), exchange.record.settlement)

    def _outbound(
        self,
        exchange: Exchange,
        terms: Terms,
        parsed: Parsed[ProxiedRequest],
        count: Count,
    ) -> Outbound:
        ours = not self._tokens.is_foreign(terms.model)
        credentials = self._credentials.headers(terms.model)
        return outbound(exchange, terms, parsed, count, ours=ours, credentials=credentials)

    async def _send(
        self, exchange: Exchange, model: ModelConfig, request: Outbound, tokens: int
    ) -> tuple[Replica, Answer]:
        """Rule 2."""
        failure: ApiError | None = None
        tried: set[ReplicaId] = set()
        full = 0
        while True:
            exchange.stages.enter("route")
            enough = full > ELSEWHERE_MAX
            replica = None if enough else self._replicas.take(model.name, tokens, tried)
            if replica is None:
                raise failure or UpstreamUnreachable("No engine serves this model.")
            exchange.record.attempts += 1
            try:
                return replica, await self._connect(exchange, replica, request)
            except (ConnectTimeout, UpstreamUnreachable, NotReady, Overloaded) as error:
                failure = error
                tried.add(replica.id)
                full += isinstance(error, Overloaded)
                exchange.progress.dispatched = exchange.progress.refused = False  # nothing was done there
                self._replicas.give_back(replica, tokens)
                observe_attempt(replica.id, error.code)
            except BaseException:
                self._replicas.give_back(replica, tokens)
                raise

    async def _connect(self, exchange: Exchange, replica: Replica, request: Outbound) -> Answer:
        exchange.stages.enter("connect")
        exchange.record.replica = replica.id
        if exchange.record.stream:
            within_s = exchange.timeouts.first_token_s
            exchange.watch.expect(within_s, FirstTokenTimeout, "The engine produced no token in time.")

        def connected() -> None:
            exchange.progress.dispatched = True
            exchange.stages.enter("wait")

        connect_s = exchange.timeouts.connect_s
        answer = await self._upstream.send(replica.protocol, replica.url, request, connect_s, connected)
        observe_attempt(replica.id, "connected")
        if answer.status == NotReady.status:  # over HTTP/2 the connection may have said so: both are NotReady
            exchange.progress.refused = True
            try:
                raise await answer.error()
            finally:
                await answer.aclose()
        return answer

    async def _relay(self, exchange: Exchange, model: ModelConfig, answer: Answer) -> None:
        self._tokens.observe(model, answer.headers.get(TOKENIZER_HEADER))
        exchange.take_engine_timing(answer.headers.get("server-timing", ""))
        relay = Relay(
            exchange.client,
            exchange.watch,
            exchange.timeouts,
            exchange.progress,
            exchange.begin_answer,
        )
        await relay.run(answer)


def used_tokens(progress: Progress, prompt_tokens: int, reserved: int) -> int:
    """What a request is charged in the end; rule 1."""
    if progress.refused or not progress.dispatched:
        return 0
    if (closing := progress.closing) is not None:
        return closing.prompt_tokens + closing.completion_tokens
    if progress.complete and not progress.events:  # a foreign engine's unary answer: nobody counted
        return reserved
    return prompt_tokens + progress.events


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
        case Meter.BUDGET:
            return BudgetExhausted(f"This {refusal.scope}'s budget of {refusal.limit} tokens is spent.")
