"""The report on a request: its completed line, whatever its end, and its metrics.

Label values are bounded: models and tenants come from the configuration, replicas are those that there are,
the rest are constants of the code. Tenants beyond `TENANTS_SHOWN_MAX` share one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Final, Self

from gateway.admission.quota import Decision, Refusal, Settlement
from gateway.client.blocked import BlockedSpan
from gateway.relay.stream import Progress
from gateway.request.key_uses import KeyUses
from gateway.request.minutes import Minutes
from gateway.request.recorder import Recorder
from gateway.routing.lost_homes import LostHome
from gateway.routing.policy import RouteReason
from gateway.routing.replicas import Replica
from gateway.routing.sessions import session_id
from gateway.stored.keeping import Kept
from shared.process import logs
from shared.process.metrics import Counter, Gauge, GaugeFamily, Histogram, Series
from shared.telemetry.stages import Stages
from shared.telemetry.tracing import NO_TRACING, Tracing, has_failed, line_of
from shared.wire import engine_words
from shared.wire.completed_line import (
    DETAIL_LEN_MAX,
    EVENT,
    FAILURES_SHOWN_MAX,
    GATEWAY_STAGES,
    BlockedTime,
    FailedAttempt,
    GatewayLine,
)
from shared.wire.end_reason import EndReason, end_reason_of
from shared.wire.errors import STATUS_CLIENT_GONE, ApiError
from shared.wire.ids import ReplicaId, RequestId
from shared.wire.sse import Closing

TENANTS_SHOWN_MAX: Final = 100
RETRY_LEN_MAX: Final = 4
"""Characters of the number of an SDK's retry."""
NONE: Final = "none"
"""The label of a request that ended before it had the value."""
_ROUTES: Final = {route: route.value for route in RouteReason}
"""Their names, which an enum takes two calls to tell."""
_NOT_ENDED: Final = datetime.min.replace(tzinfo=UTC)


def _reason_of(closing: Closing) -> EndReason:
    """The reason of an engine that ended its stream with an error event: its own, where it is known here."""
    try:
        reason = EndReason(closing.end_reason)
    except ValueError:
        return EndReason.UPSTREAM_FAILED
    return EndReason.UPSTREAM_FAILED if reason is EndReason.OK else reason


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)


def _words_of(error: ApiError) -> str | None:
    """What is told of an engine's error: its own words where they are fixed ones, else what the gateway knows
    of it."""
    return error.message if error.message in engine_words.MEANINGS else error.detail


class ExchangeRecord(GatewayLine, eq=False):
    """The completed line of a request, filled in as it passes its stages."""

    @classmethod
    def begun(cls, request_id: RequestId, method: str, endpoint: str, stages: Stages) -> Self:
        """The line of a request that has just come. It is made of what every line has, and the rest is set:
        of more names than these in one call a dict would be made first, which took as long as all the
        rest."""
        trace = stages.trace
        line = cls(
            _NOT_ENDED, "info", EVENT, __name__, request_id, trace.trace_id, trace.span_id,
            method, endpoint, 0, EndReason.OK, "", False, 0.0, service="gateway",
            attempts=0, prompt_exact=False, reserved_tokens=0, settled_tokens=0, events=0, body_len=0,
        )  # fmt: skip
        line.parent_span_id, line.prompt_tokens = stages.parent_span_id, 0
        return line

    def placed(self, route: RouteReason) -> None:
        """Note the choice of a replica."""
        self.attempts += 1
        self.route = _ROUTES[route]
        ROUTES.inc(route)

    def attempt_failed(self, replica: ReplicaId, error: ApiError, stages: Stages) -> None:
        """Note an attempt that ends now, after which another may follow. The first `FAILURES_SHOWN_MAX` are
        told."""
        UPSTREAM_ATTEMPTS.inc(replica, type(error).code)
        told = self.failed_attempts or ()
        if len(told) < FAILURES_SHOWN_MAX:
            now_s, sent_s = stages.clock.monotonic(), stages.last("wait")
            began_s = stages.last("connect") or now_s
            attempt = FailedAttempt(
                replica=replica,
                code=type(error).code,
                detail=(_words_of(error) or "")[:DETAIL_LEN_MAX] or None,
                from_ms=_ms(began_s - stages.began_s),
                takes_ms=_ms(now_s - began_s),
                connect_ms=None if sent_s is None or sent_s < began_s else _ms(sent_s - began_s),
            )
            self.failed_attempts = (*told, attempt)

    def computed_anew(self, history_len: int, lost: LostHome | None, closing: Closing | None) -> None:
        """Note the home that had so many tokens of the prompt, where the engine that answered had less than
        half of them in its cache."""
        if lost is not None and closing is not None and 2 * closing.cached_tokens < history_len:
            self.lost_home, self.lost_reason = lost.replica, lost.reason.value
            self.lost_tokens = history_len - closing.cached_tokens

    def one_of_several(self, retry: str, idempotency: str | None) -> None:
        """Note what the caller tells of its tries: of a request that is a retry, or failed, so that one may
        follow."""
        if retry.isascii() and retry.isdecimal() and len(retry) <= RETRY_LEN_MAX:
            self.retry = int(retry) or None
        if idempotency:
            self.idempotency = session_id(self.tenant or "", idempotency)

    def failed(self, error: ApiError, status: int) -> None:
        """Note the error that ended the request. `status` is the one that its client is sent, or was when the
        answer began."""
        self.status, self.end_reason = status, end_reason_of(error)
        self.error_code, self.error_param, self.error_detail = error.code, error.param, error.detail

    def client_left(self) -> None:
        self.status = STATUS_CLIENT_GONE
        self.end_reason = EndReason.CLIENT_CANCEL

    def keeps(self, kept: Kept) -> None:
        """Note the end of a request's part in responses that are kept."""
        self.stored = kept.outcome
        self.store_ms = round(kept.took_s * 1e3, 3) or None
        kept.close()

    def client_was_behind(self, blocked: Sequence[BlockedSpan], stages: Stages) -> None:
        """Note the times in which nothing could be written."""
        times = [BlockedTime(_ms(one.began_s - stages.began_s), _ms(one.waited_s)) for one in blocked]
        self.blocked, self.blocked_ms = tuple(times), round(sum(one.takes_ms for one in times), 3)

    def settlement(self, settlement: Settlement | None) -> None:
        if settlement is not None:
            settled, more = settlement.settled, settlement.settled - settlement.reserved
            self.settled_tokens += settled
            _SETTLED.value += settled
            if more > 0:
                _OVERDRAWN.value += more
            else:
                _RELEASED.value -= more

    def ended(self, progress: Progress, refusal: Refusal | None, stages: Stages, seconds: float) -> None:
        """Take over how far the answer came, the quota that refused the request, and the times."""
        self.ts, self.total_ms = datetime.now(UTC), int(seconds * 1e6 + 0.5) / 1e3
        self.events, self.body_len = progress.events, progress.body_len
        if refusal is not None:
            self.quota_meter, self.quota_scope = refusal.meter.value, refusal.scope.value
        (
            self.edge_ms, self.auth_ms, self.answer_ms, self.seat_ms, self.body_ms, self.validate_ms,
            self.tenant_ms, self.tokenize_ms, self.quota_ms, self.route_ms, self.connect_ms, self.wait_ms,
            self.relay_ms, self.settle_ms,
        ) = stages.milliseconds(GATEWAY_STAGES)  # fmt: skip
        if (closing := progress.closing) is not None:
            self._take_over(closing)
            if progress.broken and self.end_reason is EndReason.OK:
                self.end_reason = _reason_of(closing)

    def _take_over(self, closing: Closing) -> None:
        """Take over what the engine told."""
        self.prompt_exact = True
        self.prompt_tokens, self.completion_tokens = closing.prompt_tokens, closing.completion_tokens
        self.cached_tokens = closing.cached_tokens
        self.host_tokens, self.disk_tokens = closing.host_tokens, closing.disk_tokens
        self.reasoning_tokens, self.calls = closing.reasoning_tokens, closing.calls
        if closing.drafted_tokens:
            self.drafted_tokens, self.accepted_tokens = closing.drafted_tokens, closing.accepted_tokens
        accepted, rejected = closing.accepted_prediction_tokens, closing.rejected_prediction_tokens
        if accepted or rejected:
            self.accepted_prediction_tokens, self.rejected_prediction_tokens = accepted, rejected
        self.causes = closing.causes or None
        self.engine_end_reason = closing.end_reason
        self.engine_edge_ms, self.engine_body_ms = closing.edge_ms, closing.body_ms
        self.engine_validate_ms, self.engine_tokenize_ms = closing.validate_ms, closing.tokenize_ms
        self.engine_grammar_ms, self.engine_masks_ms = closing.grammar_ms or None, closing.masks_ms or None
        self.engine_handover_ms = closing.handover_ms
        self.engine_first_byte_ms = closing.first_byte_ms or None
        self.engine_queue_ms, self.engine_prefill_ms = closing.queue_ms, closing.prefill_ms
        self.engine_decode_ms, self.engine_preempted_ms = closing.decode_ms, closing.preempted_ms
        self.engine_preemptions, self.engine_swaps = closing.preemptions, closing.swaps
        self.engine_stalled_ms = closing.stalled_ms


_LABELS: Final = ("endpoint", "model", "tenant", "status", "end_reason")
REQUESTS: Final = Counter("penstock_gateway_requests", "Requests ended.", _LABELS)
IN_FLIGHT: Final = Gauge("penstock_gateway_requests_in_flight", "Requests in progress.")
HELD_BYTES: Final = Gauge("penstock_gateway_held_bytes", "Of request_memory, what requests hold.")
HTTP2_STREAMS: Final = Gauge("penstock_gateway_http2_streams", "Streams to engines that are open.")
TOKENS: Final = Counter(
    "penstock_gateway_tokens",
    "Tokens as the engine counted; of prompt and cached the parts of requests that name a session are told "
    "again as session_prompt and session_cached; of completion those that were tried from a caller's "
    "prediction, as predicted where they are in the answer, else as mispredicted.",
    ("model", "tenant", "kind"),
)
CALLS: Final = Counter("penstock_gateway_calls", "Calls of functions in answers.", ("model", "tenant"))
FIRST_BYTE: Final = Histogram(
    "penstock_gateway_first_byte_seconds",
    "From a request's arrival to the first byte of its answer's body that tells of the answer.",
    ("model", "stream"),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
SECONDS: Final = Histogram(
    "penstock_gateway_request_seconds",
    "From a request's arrival to its end.",
    ("model", "stream"),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
QUOTA: Final = Counter(
    "penstock_gateway_quota_decisions",
    "Requests whose tokens were granted, and those refused, by which meter of whom.",
    ("decision", "meter", "scope"),
)
QUOTA_TOKENS: Final = Counter(
    "penstock_gateway_quota_tokens",
    "reserved + overdrawn = settled + released + what is outstanding.",
    ("kind",),
)
_RESERVED: Final = QUOTA_TOKENS.series("reserved")
_SETTLED: Final = QUOTA_TOKENS.series("settled")
_RELEASED: Final = QUOTA_TOKENS.series("released")
_OVERDRAWN: Final = QUOTA_TOKENS.series("overdrawn")
_GRANTED: Final = QUOTA.series("granted", "tokens", NONE)
UPSTREAM_ATTEMPTS: Final = Counter(
    "penstock_gateway_upstream_attempts",
    "Dispatches to replicas, by whether a connection was had.",
    ("replica", "outcome"),
)


RETRIES: Final = Counter(
    "penstock_gateway_retries",
    "Further attempts: unsent (the one before was sent nothing), repeated, and those that were refused.",
    ("kind",),
)
ROUTES: Final = Counter("penstock_gateway_routes", "Choices of a replica, by their reason.", ("route",))


MEMBERS: Final = GaugeFamily(
    "penstock_gateway_members", "Members of pools by what becomes of them.", ("model", "phase")
)


def forget_replica(replica: Replica) -> None:
    """Drop the series of a replica that is gone, or their number would grow with every one that comes."""
    UPSTREAM_ATTEMPTS.forget(replica.id)


@cache
def _token_series(model: str, tenant: str) -> tuple[Series, ...]:
    """The numbers of a model's and a tenant's tokens: of prompts, of answers, and those that were cached; and
    of prompts and cached ones the parts of requests that name a session."""
    kinds = ("prompt", "completion", "cached", "session_prompt", "session_cached")
    return tuple(TOKENS.series(model, tenant, kind) for kind in kinds)


@cache
def _answer_series(model: str, tenant: str) -> tuple[Series, Series]:
    """The numbers of a model's and a tenant's tokens of reasoning, and of their calls."""
    return TOKENS.series(model, tenant, "reasoning"), CALLS.series(model, tenant)


def observe_attempt(replica: ReplicaId) -> None:
    UPSTREAM_ATTEMPTS.inc(replica, "connected")


def observe_decision(decision: Decision) -> None:
    refusal = decision.refusal
    if refusal is None and decision.granted:
        _GRANTED.value += 1
        _RESERVED.value += decision.granted
    elif refusal is not None:
        QUOTA.inc("refused", refusal.meter.value, refusal.scope.value)


class Reporter:
    """Writes completed lines and counts requests, each once."""

    def __init__(
        self,
        tracing: Tracing = NO_TRACING,
        recorder: Recorder | None = None,
        minutes: Minutes | None = None,
        key_uses: KeyUses | None = None,
    ) -> None:
        self._tracing = tracing
        self._recorder = Recorder(0) if recorder is None else recorder
        self._minutes = minutes
        self._key_uses = key_uses
        self._tenants: set[str] = set()

    def completed(
        self,
        record: ExchangeRecord,
        progress: Progress,
        refusal: Refusal | None,
        stages: Stages,
        seconds: float,
    ) -> None:
        """Report on a request that has ended after so many seconds. `refusal` is that of the quotas, if they
        refused it."""
        failed, exemplar = False, None
        if self._tracing.is_on or stages.trace.sampled:
            failed = has_failed(record.status, record.error_code is not None)
            exemplar = self._tracing.exemplar(stages, record.request_id, seconds, failed=failed)
        stages.end(exemplar)
        record.ended(progress, refusal, stages, seconds)
        logged = logs.write_line(record, "info")
        if self._recorder.is_on:
            self._recorder.add(record, stages.stamps(), logged, progress.ticks)
        if self._minutes is not None:
            self._minutes.note(record)
        if self._key_uses is not None and record.key_id is not None:
            self._key_uses.note(record.key_id, record.tenant, record.ts)
        if self._tracing.is_on:
            self._tracing.ended(stages, stages.began_s, seconds, failed=failed, line=partial(line_of, record))
        model, tenant = record.model or NONE, self._tenant_label(record.tenant)
        REQUESTS.inc(record.endpoint, model, tenant, record.status, record.end_reason)
        SECONDS.observe(seconds, model, record.stream, exemplar=exemplar)
        if record.first_byte_ms is not None:
            FIRST_BYTE.observe(record.first_byte_ms / 1e3, model, record.stream, exemplar=exemplar)
        if record.engine_end_reason is not None:
            _count_tokens(record, model, tenant)

    def _tenant_label(self, tenant: str | None) -> str:
        if tenant is None:
            return NONE
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_SHOWN_MAX:
                return "other"
            self._tenants.add(tenant)
        return tenant


def _count_tokens(record: ExchangeRecord, model: str, tenant: str) -> None:
    """Count the tokens that the engine told."""
    prompt, completion, cached, session_prompt, session_cached = _token_series(model, tenant)
    prompt.value += record.prompt_tokens or 0
    completion.value += record.completion_tokens or 0
    cached.value += record.cached_tokens or 0
    if record.session is not None:
        session_prompt.value += record.prompt_tokens or 0
        session_cached.value += record.cached_tokens or 0
    if record.reasoning_tokens or record.calls:
        reasoning, calls = _answer_series(model, tenant)
        reasoning.value += record.reasoning_tokens or 0
        calls.value += record.calls or 0
    if record.rejected_prediction_tokens is not None:
        TOKENS.inc(model, tenant, "predicted", by=record.accepted_prediction_tokens or 0)
        TOKENS.inc(model, tenant, "mispredicted", by=record.rejected_prediction_tokens)
