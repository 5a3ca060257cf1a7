"""THE ORDER of a request's stages. No other module knows it, and no stage knows another.

    auth        find the caller by its key              401
    seat        take one of the concurrent requests     429 503; from the headers alone
    body        read it, bounded in size and time       408 413 503
    validate    parse and check it                      400, naming the field
    tenant      resolve the model and its terms         404
    tokenize    count the prompt's tokens               400 when it cannot fit the context
    quota       reserve tokens, of all subjects or none 429
    route       choose the least loaded replica
    connect     get a connection to it, or to another   502 504
    wait        wait for the first token                504, or the engine's own error
    relay       pass the answer's bytes on
    settle      charge what was used

Rules:

1. No work before its reservation. The seat is taken before the body is read; the body's bytes, and what is
   made of them, are reserved as they come; tokens are counted no further than the context goes, and reserved
   before the request is sent to an engine. The memory of a request's body is released when a replica
   has begun to answer, with a stream's first event: until then it may be sent to another.
2. What is reserved is settled, whichever way the request ends, also when the client leaves: with what the
   engine reports, also for answers that were cut off. Where there is no report (the engine is gone, or of
   another make), the estimate of all that was sent and of the longest answer is charged; nothing when nothing
   was dispatched, or when the engine refused.
3. Nothing is dispatched twice, except as `gateway.request.dispatch` says.
4. What may be generated is what was reserved: a request that states no maximum, from a caller whose tokens
   are limited, is given one. What an engine is sent is chosen first, and all of it is counted. A budget is
   passed by one request at most, and by no more than its bound (`gateway.admission.tokens`).
5. Where a model's engines cannot answer, its `fallback` models are asked, those that the caller may use. Each
   has a reservation of its own, under its own limits and by its own count: what was reserved for the one
   before is given back, or charged where a replica was lost with the request (as rule 2 settles it), so that
   tokens are charged where they were used. So a request that falls back counts as several in limits on
   requests per minute, in usage, and in billing lines.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Final

from gateway.admission.quota import Decision, Meter, QuotaStore, Refusal, ReservationId, Scope
from gateway.admission.tokens import TokenCount, check_fits, count_tokens, estimate_slices, span
from gateway.admission.usage import NOTHING, Used
from gateway.billing.lines import Billing
from gateway.client.body import read_body, validate, validate_slices
from gateway.config.whole import ALL_ENDPOINTS, GatewayConfig, ModelConfig
from gateway.directory.accounts import Terms
from gateway.endpoints.endpoint import Asked, Endpoint
from gateway.identity.caller import Caller, Principal, authorization_of
from gateway.identity.callers import KnownCallers
from gateway.identity.tenant import check_endpoint
from gateway.relay.engines import Engines, Known
from gateway.relay.stream import Progress, Relay
from gateway.relay.upstream import Credentials, Outbound, Upstream
from gateway.request.dispatch import REPEATED, Dispatched, Dispatcher, Prepared
from gateway.request.exchange import Exchange, LiveRequests
from gateway.request.outbound import OutboundFields, chosen_fields, outbound
from gateway.request.record import observe_decision
from gateway.request.salts import salt_of
from gateway.routing.affinity import TIER_NAMES, affinity_of, class_of
from gateway.routing.policy import Affinity, nowhere
from gateway.routing.replicas import Replicas
from gateway.routing.sessions import session_of
from gateway.stored.keeping import KeptResponses
from shared.apis.generation import GenerationRequest
from shared.apis.holding import Holding, weigh, weigh_long
from shared.apis.validation import INLINE_LEN_MAX
from shared.fairness.fair_share import FairShare
from shared.fairness.fair_threads import FairThreads, Slices, at_once
from shared.fairness.fair_turns import FairTurns
from shared.process.shield import Done, shielded
from shared.text.known_pieces import KnownPieces
from shared.wire.errors import (
    ApiError,
    BudgetExhausted,
    IdentityUnavailable,
    NothingAllowed,
    Overloaded,
    PermissionDenied,
    RateLimited,
    RequestExceedsQuota,
    TokensRateLimited,
    Unauthenticated,
    forget_frames,
)
from shared.wire.ids import IGNORED_FIELDS_HEADER
from shared.wire.request_body import check_page

_WHOSE: Final = {
    Scope.KEY: "This key's limit",
    Scope.TENANT: "This tenant's limit",
    Scope.KEY_MODEL: "This key's limit for this model",
    Scope.TENANT_MODEL: "This tenant's limit for this model",
    Scope.MODEL: "This model's limit for all callers together",
}
_PERIODS: Final = {Meter.BUDGET: " in all", Meter.DAY_BUDGET: " a day", Meter.MONTH_BUDGET: " a month"}
NO_TOKENS = TokenCount(prompt_tokens=0, longest=0, prompts=0, extension=None, bound=0)

IDENTITY_S: Final = 5.0
"""The time within which the caller must be identified, in seconds, where another service is asked."""
REPORT_S: Final = 0.25
"""The time to wait for an engine's report about an answer that was cut off, in seconds."""


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
        billing: Billing,
        known: KnownCallers,
        turns: FairTurns,
        salts: bytes,
        kept: KeptResponses,
    ) -> None:
        """`memory` is the share of bytes that requests hold until they are answered. `known` learns who was
        let in. `turns` are those in which requests begin. `salts` is the secret of cached prefixes' salts.
        `kept` are the responses that are kept."""
        self._salts = salts
        self._kept = kept
        self._known = known
        self._billing = billing
        self._live = live
        self._threads = threads
        self._turns = turns
        self._memory = memory
        self._pieces = KnownPieces()
        self._config = config
        self._engines = engines
        self._quotas = quotas
        self._replicas = replicas
        self._dispatcher = Dispatcher(replicas, upstream)
        self._credentials = credentials

    async def run(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Answer one request. Raises ApiError, ClientGone or CancelledError; by then all is settled."""
        principal = await self.begin(exchange)
        try:
            await self._take_seat(exchange, principal, endpoint)
            dispatched = await self._dispatch(exchange, principal, endpoint)
            try:
                await self._relay(exchange, dispatched)
            finally:
                self._dispatcher.end(exchange, dispatched, sys.exception())
                await dispatched.opened.answer.aclose()  # tells the engine to stop, if there is more
        finally:
            if exchange.kept is not None:
                exchange.record.keeps(exchange.kept)
            await self._settle(exchange)

    async def _dispatch(self, exchange: Exchange, principal: Principal, endpoint: Endpoint) -> Dispatched:
        """Read, check, count, reserve and send the request. All that holds its body is gone when this
        returns."""
        with Holding(self._memory, principal.tenant) as holding:
            asked = await self._read(exchange, principal, endpoint, holding)
            terms, engine = self._resolve(exchange, principal, asked, asked.parsed.request.model)
            prepared = await self._prepare(exchange, terms, engine, asked)
            if terms.model.fallback:
                return await self._send_or_fall_back(exchange, principal, asked, prepared)
            del asked  # from here on the outbound request alone is held
            holding.shrink(len(prepared.outbound.content))
            return await self._dispatcher.send(exchange, prepared)

    async def _prepare(
        self,
        exchange: Exchange,
        terms: Terms,
        engine: Known,
        asked: Asked,
        counted: tuple[OutboundFields, TokenCount] | None = None,
    ) -> Prepared:
        """Count the request's tokens unless they are `counted`, reserve them, and make of it what is sent."""
        chosen, count = counted or await self._count(exchange, terms, engine, asked)
        maximum = await self._reserve(exchange, terms, engine, asked.generation, count)
        request = self._outbound(exchange, terms, engine, asked, chosen, count, maximum)
        affinity = self._affinity(exchange, terms, asked.generation, count)
        return Prepared(
            terms.model,
            request,
            affinity,
            asked.endpoint.dialect,
            is_fallback=bool(exchange.fallback),
            is_optional=asked.endpoint.is_optional,
        )

    async def _send_or_fall_back(
        self, exchange: Exchange, principal: Principal, asked: Asked, prepared: Prepared
    ) -> Dispatched:
        """Dispatch the request, or the same to another model where its own cannot answer (rule 5: its
        fallbacks). Raises the first failure when none can."""
        own, names, ignored = prepared.model, list(prepared.model.fallback), exchange.ignored_fields
        first: ApiError | None = None
        try:
            while True:
                try:
                    return await self._dispatcher.send(exchange, prepared)
                except ApiError as error:
                    forget_frames(error)
                    first = first or error
                    begins = _falls_back(prepared, error) and self._dispatcher.begins_anew(exchange, prepared)
                    if not begins:
                        raise
                other = await self._next_fallback(exchange, principal, asked, names)
                if other is None:
                    exchange.fallback, exchange.record.model = "", own.name
                    exchange.ignored_fields = ignored
                    raise first
                prepared = other
        finally:
            del first  # its traceback refers to this frame

    async def _next_fallback(
        self,
        exchange: Exchange,
        principal: Principal,
        asked: Asked,
        names: list[str],
    ) -> Prepared | None:
        """The request for the first of the models that the caller may use, that can take it, and that its
        quotas admit. Takes what it tried from `names`. None when there is none."""
        while names:
            try:
                terms, engine = self._resolve(exchange, principal, asked, names.pop(0))
                counted = await self._count(exchange, terms, engine, asked)
                await self._reserve_anew(exchange, principal, terms, asked.endpoint)
                exchange.ignored_fields = (
                    asked.parsed.ignored_header
                )  # of an engine of ours, if the other was not
                return await self._prepare(exchange, terms, engine, asked, counted)
            except ApiError as error:
                forget_frames(error)
        return None

    async def _reserve_anew(
        self, exchange: Exchange, principal: Principal, terms: Terms, endpoint: Endpoint
    ) -> None:
        """Settle what was reserved for one model, and take a seat for another."""
        before, used = exchange.reservation, used_tokens(exchange.progress, exchange.estimated)
        self._note_line(exchange, used)
        exchange.begin_fallback(terms.model.name, ReservationId(f"{before}-f"), used.tokens)
        await shielded(self._quotas.settle(before, used), exchange.record.settlement)
        exchange.mark(("quota", exchange.clock.monotonic()))
        subjects = exchange.accounts.subjects(principal)
        generates = endpoint.generates
        decision = await self._quotas.enter(exchange.reservation, subjects, needs_tokens=generates)
        self._apply_decision(exchange, decision, 1 if generates else 0)

    async def begin(self, exchange: Exchange) -> Principal:
        """Authenticate the caller, wait for its tenant's turn, and return who it is. Raises Unauthenticated,
        IdentityUnavailable, and PermissionDenied where it may not use what it asks for."""
        exchange.mark(("auth", exchange.clock.monotonic()))
        headers, connection = exchange.headers, exchange.connection
        shown = headers.get("authorization") or authorization_of(headers)
        caller = Caller(shown, connection.transport, connection.tenant)
        try:
            found = exchange.accounts.identity.identify(caller, exchange.clock.wall())
        except Unauthenticated:
            if exchange.accounts.operators.has(caller.authorization):
                raise PermissionDenied(
                    "This key is an operator's: it opens the admin listener alone."
                ) from None
            raise
        if isinstance(found, Done):  # the identity is known without waiting
            principal: Principal = found.result
        else:
            exchange.watch.expect(IDENTITY_S, IdentityUnavailable, "Callers cannot be told at the moment.")
            principal = await found
            exchange.watch.relax()
        if principal.tenant not in exchange.accounts.tenants.ids:
            raise Unauthenticated("The tenant of this API key does not exist any more.")
        exchange.principal = principal
        exchange.record.key_id, exchange.record.tenant = principal.key, principal.tenant
        connection.tenant = principal.tenant
        if caller.authorization is not None:
            self._known.note(caller.authorization, principal.tenant)
        elif exchange.resource.endpoint is not None:  # a browser shows its certificate for any site's page
            check_page(headers)
        if principal.endpoints != ALL_ENDPOINTS:
            check_endpoint(principal, exchange.path)
        if (turn := self._turns.ask(principal.tenant)) is not None:
            await turn
        return principal

    async def _take_seat(self, exchange: Exchange, principal: Principal, endpoint: Endpoint) -> None:
        exchange.mark(("seat", exchange.clock.monotonic()))
        self._live.claim(exchange, principal.tenant)
        exchange.is_seated = True
        subjects = exchange.accounts.subjects(principal)
        generates = endpoint.generates
        decision = await self._quotas.enter(exchange.reservation, subjects, needs_tokens=generates)
        self._apply_decision(exchange, decision, 1 if generates else 0)

    async def _read(
        self, exchange: Exchange, principal: Principal, endpoint: Endpoint, holding: Holding
    ) -> Asked:
        exchange.mark(("body", exchange.clock.monotonic()))
        limits, timeouts = self._config.limits, self._config.timeouts
        sent = exchange.headers, exchange.body, exchange.client
        body = await read_body(*sent, exchange.watch, holding, limits.body_len_max, timeouts.body_s)
        exchange.mark(("validate", exchange.clock.monotonic()))
        refuses_unknown = self._config.admission.unknown_fields
        if len(body) <= INLINE_LEN_MAX:
            parsed = validate(body, endpoint.shape, refuses_unknown, weigh(body, holding))
        else:
            await weigh_long(body, holding, self._threads, principal.tenant)
            work = validate_slices(body, endpoint.shape, refuses_unknown)
            parsed = await self._threads.run(principal.tenant, work, holds=True)
        if parsed.ignored:
            exchange.ignored_fields = parsed.ignored_header
        if endpoint.refers and (kept := self._kept.asked(parsed.request, principal.tenant)) is not None:
            exchange.kept = kept
            parsed = await kept.read(parsed, holding)
        exchange.is_plain = parsed.is_plain
        generation = parsed.request if isinstance(parsed.request, GenerationRequest) else None
        if generation is not None:
            exchange.streams = bool(generation.stream)
            exchange.session = session_of(exchange.headers, generation, principal.tenant)
        return Asked(endpoint, parsed, generation)

    def _resolve(
        self, exchange: Exchange, principal: Principal, asked: Asked, name: str | None
    ) -> tuple[Terms, Known]:
        """The terms on which the model is used, and what is known of its engines."""
        exchange.mark(("tenant", exchange.clock.monotonic()))
        terms = exchange.accounts.terms(principal, name)
        exchange.record.model = terms.model.name
        exchange.bound_by(terms.timeouts)
        engine = self._engines.of(terms.model)
        if engine.is_ours:  # another make may support the field, and ours refuses it
            asked.parsed.require_supported()
            if asked.generation is not None:
                engine.check(asked.generation)
        return terms, engine

    async def _count(
        self, exchange: Exchange, terms: Terms, engine: Known, asked: Asked
    ) -> tuple[OutboundFields, TokenCount]:
        """Choose what goes out, and count its tokens."""
        exchange.mark(("tokenize", exchange.clock.monotonic()))
        request, tenant = asked.generation, terms.tenant.id
        if engine.tokenizer is not None and request is not None:
            chosen = chosen_fields(asked, terms.model, engine)
            parts = engine.tokenizer, engine.room, self._threads, tenant, self._pieces
            count = await count_tokens(request, *parts)
        else:
            work = _estimated(asked, terms.model, engine)
            if sum(map(len, asked.parsed.fields.values())) <= INLINE_LEN_MAX:
                chosen, count = at_once(work)
            else:
                chosen, count = await self._threads.run(tenant, work, holds=True)
        if request is not None:
            exchange.record.prompt_tokens, exchange.record.prompt_exact = count.prompt_tokens, count.is_exact
            check_fits(request, count, engine.room)
        return chosen, count

    async def _reserve(
        self,
        exchange: Exchange,
        terms: Terms,
        engine: Known,
        request: GenerationRequest | None,
        count: TokenCount,
    ) -> int | None:
        """Reserve the request's tokens. Returns the most that each choice may have; None where the request
        states it and there is room for it, or nothing limits it."""
        exchange.mark(("quota", exchange.clock.monotonic()))
        if request is None:
            decision = await self._quotas.reserve(exchange.reservation, terms.subjects, 0, 0, terms.payer)
            self._apply_decision(exchange, decision, 0)
            exchange.admit(terms.payer, 0, 0)
            return None
        room, guess = engine.room, self._config.admission.completion_estimate
        asked = span(request, count, room, guess, terms.tokens_max, is_budgeted=terms.is_budgeted)
        least = asked.least
        decision = await self._quotas.reserve(
            exchange.reservation, terms.subjects, least, asked.most, terms.payer, wanted=asked.wanted
        )
        self._apply_decision(exchange, decision, least)
        exchange.admit(terms.payer, decision.granted, asked.estimated(decision.granted))
        return asked.maximum_each(decision.granted) if asked.is_open or asked.is_cut else None

    def _apply_decision(self, exchange: Exchange, decision: Decision, tokens: int) -> None:
        """Note a decision of the quotas, and raise the error of a refusal. `tokens` is the least that was
        asked for."""
        exchange.windows, exchange.decision = decision.windows, decision
        observe_decision(decision)
        if decision.refusal is not None:
            raise _refused(decision.refusal, tokens)

    async def _settle(self, exchange: Exchange) -> None:
        """Settle the reservation, also one whose grant the request did not live to see."""
        exchange.record.stage = exchange.stages.now
        exchange.mark(("settle", exchange.clock.monotonic()))
        progress = exchange.progress
        try:
            if exchange.reserved and progress.awaits_report:  # no report comes on what computes no token
                await shielded(progress.report.wait(REPORT_S))
        finally:
            used = used_tokens(progress, exchange.estimated)
            self._note_line(exchange, used)
            await shielded(self._quotas.settle(exchange.reservation, used), exchange.record.settlement)

    def _note_line(self, exchange: Exchange, used: Used) -> None:
        """Note the billing line of a reservation that was granted: there is one where usage counts one."""
        if exchange.payer is not None and self._billing.spool is not None:
            facts = exchange.reservation, exchange.request_id, exchange.payer
            self._billing.note(*facts, used, exchange.reserved_s)

    def _outbound(
        self,
        exchange: Exchange,
        terms: Terms,
        engine: Known,
        asked: Asked,
        chosen: OutboundFields,
        count: TokenCount,
        maximum: int | None,
    ) -> Outbound:
        salt = None
        if asked.generation is not None and not engine.is_ours:
            own = asked.generation.cache_salt
            if own is not None if chosen.ours else engine.takes_salt:  # it may turn out to be none of ours
                salt = salt_of(self._salts, terms.tenant.id, own)
        credentials = self._credentials.headers(terms.model)
        parts = exchange, terms, asked, chosen, count
        return outbound(*parts, maximum=maximum, salt=salt, credentials=credentials)

    def _affinity(
        self, exchange: Exchange, terms: Terms, request: GenerationRequest | None, count: TokenCount
    ) -> Affinity:
        tier = terms.tenant.service_tier
        if request is not None and (request.service_tier is not None or request.priority or tier == "flex"):
            exchange.record.service_tier = TIER_NAMES[class_of(request, tier)]
        if not self._replicas.has_choice(terms.model.name):
            return nowhere(terms.tenant.id)
        model, tenant, turn = terms.model.name, terms.tenant.id, self._replicas.next_turn()
        return affinity_of(request, model, tenant, count.prompt_tokens, turn, exchange.session, tier)

    def _relay(self, exchange: Exchange, dispatched: Dispatched) -> Awaitable[None]:
        """Pass the answer on."""
        answer = dispatched.opened.answer

        def first_byte() -> None:
            """Enter the stage `relay`."""
            took_s = exchange.stages.enter("relay") - exchange.arrived_s
            exchange.record.first_byte_ms = int(took_s * 1e6 + 0.5) / 1e3
            if dispatched.opened.is_opening:
                self._dispatcher.told(dispatched)

        engine = self._engines.of(dispatched.model)
        engine.observe(answer.tokenizer)
        if not exchange.is_plain and engine.is_ours:
            exchange.add_ignored(answer.headers.get(IGNORED_FIELDS_HEADER, ""))
        if timing := answer.headers.get("server-timing"):  # a stream's head comes before there are times
            exchange.set_engine_timing(timing)
        kept, client = exchange.kept, exchange.client
        relay = Relay(
            client if kept is None else kept.outlet(client, exchange.watch),
            exchange.watch,
            exchange.timeouts,
            exchange.progress,
            exchange.resource.dialect,
            first_byte,
            exchange.answer_headers,
            exchange.clock.monotonic,
        )
        return relay.run(dispatched.opened)


def _estimated(asked: Asked, model: ModelConfig, engine: Known) -> Slices[tuple[OutboundFields, TokenCount]]:
    """What goes out to an engine without a tokenizer, and the estimate of it."""
    chosen = chosen_fields(asked, model, engine)
    if asked.generation is None:
        return chosen, NO_TOKENS
    yield
    return chosen, (yield from estimate_slices(asked.generation, chosen.fields, model.image_tokens))


def used_tokens(progress: Progress, estimated: int) -> Used:
    """The tokens that a request is charged in the end: what the engine reports, else the estimate (rule
    2)."""
    if (closing := progress.closing) is not None:
        return Used(
            closing.prompt_tokens,
            closing.cached_tokens,
            closing.completion_tokens,
            predicted=closing.accepted_prediction_tokens,
            mispredicted=closing.rejected_prediction_tokens,
        )
    if (progress.refused or not progress.dispatched) and not progress.lost:
        return NOTHING
    return Used(estimated=estimated)


def _falls_back(prepared: Prepared, failure: ApiError) -> bool:
    """True if another model may be asked after this failure. A fallback that refuses the request is passed
    over as well: its engines may take less than those of the model that was asked for."""
    if prepared.is_fallback:
        return isinstance(failure, REPEATED) or failure.status < HTTPStatus.INTERNAL_SERVER_ERROR
    reason = "full" if isinstance(failure, Overloaded) else "unavailable"
    return isinstance(failure, REPEATED) and reason in prepared.model.fallback_on


def _refused(refusal: Refusal, tokens: int) -> ApiError:
    whose = f"{_WHOSE[refusal.scope]} of {refusal.limit}"
    after_s = None if refusal.retry_after_ms is None else refusal.retry_after_ms / 1000
    limited = NothingAllowed if refusal.limit == 0 else RateLimited
    match refusal.meter:
        case Meter.REQUESTS:
            return limited(f"{whose} requests per minute is reached.", retry_after_s=after_s)
        case Meter.CONCURRENCY:
            return limited(f"{whose} concurrent requests is reached.", retry_after_s=after_s)
        case Meter.TOKENS if after_s is None:
            return RequestExceedsQuota(f"{whose} tokens per minute is less than this request's {tokens}.")
        case Meter.TOKENS:
            message = f"{whose} tokens per minute is reached; this request may take {tokens}."
            return TokensRateLimited(message, retry_after_s=after_s)
        case Meter.BUDGET | Meter.DAY_BUDGET | Meter.MONTH_BUDGET:
            return _over_budget(refusal, whose, tokens, after_s)


def _over_budget(refusal: Refusal, whose: str, tokens: int, after_s: float | None) -> ApiError:
    """The error of a budget. A retry of the same request can help when a period ends, which is longer than an
    SDK waits: `Retry-After` says when, and `x-should-retry` that it is not to be tried until then."""
    text = f"{whose} tokens{_PERIODS[refusal.meter]}"
    if refusal.meter is not Meter.BUDGET and tokens > refusal.limit:
        return RequestExceedsQuota(f"{text} is less than this request's {tokens}.")
    left = refusal.remaining
    if left and tokens > 1:
        text += f" has {left} left; this request may take {tokens}, and fewer with max_tokens."
    else:
        text += " is spent."
    return BudgetExhausted(text, retry_after_s=after_s)
