"""The report on a request: its completed line, whatever its end, and its metrics.

Label values are bounded: models and tenants come from the configuration, replicas are those that there are,
the rest are constants of the code. Tenants beyond `TENANTS_SHOWN_MAX` share one label.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache, partial
from typing import Final

from msgspec import Struct

from gateway.admission.quota import Decision, Settlement
from gateway.relay.stream import Progress
from gateway.relay.ticks import Ticks
from gateway.request.recorder import Recorder
from gateway.routing.policy import RouteReason
from gateway.routing.replicas import Replica
from shared.process import logs
from shared.process.metrics import Counter, Gauge, GaugeFamily, Histogram, Series
from shared.telemetry.stages import Stages
from shared.telemetry.tracing import NO_TRACING, Tracing, has_failed, line_of
from shared.wire.causes import Cause, CauseCode, most_telling
from shared.wire.completed_line import EVENT, GATEWAY_STAGES, GatewayLine
from shared.wire.end_reason import EndReason, end_reason_of
from shared.wire.errors import STATUS_CLIENT_GONE, ApiError
from shared.wire.ids import KeyId, ReplicaId, RequestId, SessionId, TenantId
from shared.wire.sse import Closing

TENANTS_SHOWN_MAX: Final = 100
FAILURES_SHOWN_MAX: Final = 8
SLOW_TOKENIZER_MS: Final = 50.0
"""The time from which on counting tokens is a cause to be told, in milliseconds."""
NONE: Final = "none"
"""The label of a request that ended before it had the value."""


def _reason_of(closing: Closing | None) -> EndReason:
    """The reason of an engine that ended its stream with an error event: its own, where it is known here."""
    try:
        reason = EndReason(closing.end_reason if closing is not None else "")
    except ValueError:
        return EndReason.UPSTREAM_FAILED
    return EndReason.UPSTREAM_FAILED if reason is EndReason.OK else reason


class ExchangeRecord(Struct, eq=False):
    """The facts for the report on a request, filled in as it passes its stages. It holds no text of prompts
    or answers."""

    request_id: RequestId
    method: str
    endpoint: str
    """The route, not the path as it was sent."""
    stage: str = ""
    """The stage in which the request ended. Empty until then."""
    tenant: TenantId | None = None
    key: KeyId | None = None
    model: str | None = None
    stream: bool = False
    status: int = 0
    end_reason: EndReason = EndReason.OK
    error: ApiError | None = None
    replica: ReplicaId | None = None
    attempts: int = 0
    """The number of replicas that were asked."""
    failures: tuple[str, ...] = ()
    """The replicas that failed, and how: the first `FAILURES_SHOWN_MAX`."""
    route: RouteReason | None = None
    """Why the last replica was chosen; None before one was."""
    session: SessionId | None = None
    """The session that the caller names."""
    prompt_tokens: int = 0
    prompt_exact: bool = False
    decision: Decision | None = None
    reserved: int = 0
    """The tokens reserved for the model that was asked last, and those that were charged for others."""
    settled: int = 0
    """The tokens charged, for all models that were asked."""
    events: int = 0
    ticks: Ticks | None = None
    """When they were passed on. None until the answer is over, and without any."""
    body_len: int = 0
    closing: Closing | None = None
    first_byte_s: float | None = None

    def placed(self, route: RouteReason) -> None:
        """Note the choice of a replica."""
        self.attempts += 1
        self.route = route
        ROUTES.inc(route)

    def attempt_failed(self, replica: ReplicaId, code: str) -> None:
        """Note an attempt after which another may follow."""
        UPSTREAM_ATTEMPTS.inc(replica, code)
        if len(self.failures) < FAILURES_SHOWN_MAX:
            self.failures += (f"{replica}={code}",)

    def failed(self, error: ApiError, status: int) -> None:
        """Note the error that ended the request. `status` is the one that its client is sent, or was when the
        answer began."""
        self.error = error
        self.status = status
        self.end_reason = end_reason_of(error)

    def set_progress(self, progress: Progress) -> None:
        """Copy from `progress` how far the answer came."""
        self.events, self.body_len, self.closing = progress.events, progress.body_len, progress.closing
        self.ticks = progress.ticks
        if progress.broken and self.end_reason is EndReason.OK:
            self.end_reason = _reason_of(self.closing)

    def client_left(self) -> None:
        self.status = STATUS_CLIENT_GONE
        self.end_reason = EndReason.CLIENT_CANCEL

    def settlement(self, settlement: Settlement | None) -> None:
        if settlement is not None:
            self.settled += settlement.settled
            _SETTLED.value += settlement.settled
            _RELEASED.value += settlement.released
            _OVERDRAWN.value += settlement.overdrawn


_LABELS: Final = ("endpoint", "model", "tenant", "status", "end_reason")
REQUESTS: Final = Counter("penstock_gateway_requests", "Requests ended.", _LABELS)
IN_FLIGHT: Final = Gauge("penstock_gateway_requests_in_flight", "Requests in progress.")
HELD_BYTES: Final = Gauge("penstock_gateway_held_bytes", "Of request_memory, what requests hold.")
HTTP2_STREAMS: Final = Gauge("penstock_gateway_http2_streams", "Streams to engines that are open.")
TOKENS: Final = Counter(
    "penstock_gateway_tokens",
    "Tokens as the engine counted; of prompt and cached the parts of requests that name a session are told "
    "again as session_prompt and session_cached.",
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

    def __init__(self, tracing: Tracing = NO_TRACING, recorder: Recorder | None = None) -> None:
        self._tracing = tracing
        self._recorder = Recorder(0) if recorder is None else recorder
        self._tenants: set[TenantId] = set()

    def completed(self, record: ExchangeRecord, stages: Stages, seconds: float) -> None:
        failed = has_failed(record.status, record.error is not None)
        exemplar = self._tracing.exemplar(stages, record.request_id, seconds, failed=failed)
        stages.end(exemplar)
        line = _line(record, stages, seconds)
        logged = logs.write_line(line, "info")
        if self._recorder.is_on:
            self._recorder.add(line, stages.stamps(), logged, record.ticks)
        if self._tracing.is_on:
            self._tracing.ended(stages, stages.began_s, seconds, failed=failed, line=partial(line_of, line))
        model, tenant = record.model or NONE, self._tenant_label(record.tenant)
        REQUESTS.inc(record.endpoint, model, tenant, record.status, record.end_reason)
        SECONDS.observe(seconds, model, record.stream, exemplar=exemplar)
        if record.first_byte_s is not None:
            FIRST_BYTE.observe(record.first_byte_s, model, record.stream, exemplar=exemplar)
        if (closing := record.closing) is not None:
            prompt, completion, cached, session_prompt, session_cached = _token_series(model, tenant)
            prompt.value += closing.prompt_tokens
            completion.value += closing.completion_tokens
            cached.value += closing.cached_tokens
            if record.session is not None:
                session_prompt.value += closing.prompt_tokens
                session_cached.value += closing.cached_tokens
            if closing.reasoning_tokens or closing.calls:
                reasoning, calls = _answer_series(model, tenant)
                reasoning.value += closing.reasoning_tokens
                calls.value += closing.calls

    def _tenant_label(self, tenant: TenantId | None) -> str:
        if tenant is None:
            return NONE
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_SHOWN_MAX:
                return "other"
            self._tenants.add(tenant)
        return tenant


def _line(record: ExchangeRecord, stages: Stages, seconds: float) -> GatewayLine:
    """The completed line. It is made of what every line has, and the rest is set: of more names than these in
    one call a dict would be made first, which took as long as all the rest."""
    trace, closing = stages.trace, record.closing
    line = GatewayLine(
        datetime.now(UTC), "info", EVENT, __name__, record.request_id, trace.trace_id, trace.span_id,
        record.method, record.endpoint, record.status, record.end_reason, record.stage, record.stream,
        _ms(seconds), service="gateway", attempts=record.attempts,
        prompt_exact=record.prompt_exact or closing is not None, reserved_tokens=record.reserved,
        settled_tokens=record.settled, events=record.events, body_len=record.body_len,
    )  # fmt: skip
    line.parent_span_id = stages.parent_span_id
    line.tenant, line.key_id, line.model = record.tenant, record.key, record.model
    line.replica, line.session = record.replica, record.session
    line.prompt_tokens = record.prompt_tokens
    if record.route is not None:
        line.route = record.route.value
    if record.first_byte_s is not None:
        line.first_byte_ms = _ms(record.first_byte_s)
    if record.failures:
        line.failed_attempts = ", ".join(record.failures)
    if (error := record.error) is not None:
        line.error_code, line.error_param, line.error_detail = error.code, error.param, error.detail
    if record.decision is not None and (refusal := record.decision.refusal) is not None:
        line.quota_meter, line.quota_scope = refusal.meter.value, refusal.scope.value
    (
        line.edge_ms, line.auth_ms, line.answer_ms, line.seat_ms, line.body_ms, line.validate_ms,
        line.tenant_ms, line.tokenize_ms, line.quota_ms, line.route_ms, line.connect_ms, line.wait_ms,
        line.relay_ms, line.settle_ms,
    ) = stages.milliseconds(GATEWAY_STAGES)  # fmt: skip
    if closing is not None:
        _copy(closing, line)
    line.causes = _causes(closing, line.tokenize_ms)
    return line


def _copy(closing: Closing, line: GatewayLine) -> None:
    """Copy what the engine told."""
    line.prompt_tokens, line.completion_tokens = closing.prompt_tokens, closing.completion_tokens
    line.cached_tokens = closing.cached_tokens
    line.host_tokens, line.disk_tokens = closing.host_tokens, closing.disk_tokens
    line.reasoning_tokens, line.calls = closing.reasoning_tokens, closing.calls
    line.engine_end_reason = closing.end_reason
    line.engine_edge_ms, line.engine_body_ms = closing.edge_ms, closing.body_ms
    line.engine_validate_ms, line.engine_tokenize_ms = closing.validate_ms, closing.tokenize_ms
    line.engine_grammar_ms, line.engine_masks_ms = closing.grammar_ms or None, closing.masks_ms or None
    line.engine_handover_ms, line.engine_first_byte_ms = closing.handover_ms, closing.first_byte_ms or None
    line.engine_queue_ms, line.engine_prefill_ms = closing.queue_ms, closing.prefill_ms
    line.engine_decode_ms, line.engine_preempted_ms = closing.decode_ms, closing.preempted_ms
    line.engine_preemptions, line.engine_swaps = closing.preemptions, closing.swaps
    line.engine_stalled_ms = closing.stalled_ms


def _causes(closing: Closing | None, tokenize_ms: float | None) -> tuple[Cause, ...] | None:
    """The engine's causes, and the tokenizer here if it was slow. None where there is nothing to tell."""
    told = () if closing is None else closing.causes
    if tokenize_ms is not None and tokenize_ms >= SLOW_TOKENIZER_MS:
        told = most_telling((Cause(code=CauseCode.TOKENIZER, ms=tokenize_ms), *told))
    return told or None


def _ms(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1e3
