"""The report on a request: its completed line, whatever its end, and its metrics.

Label values are bounded: models and tenants come from the configuration, replicas are those that there are,
the rest are constants of the code. Tenants beyond `TENANTS_SHOWN_MAX` share one label.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from msgspec import Struct

from gateway.admission.quota import Decision, Settlement
from gateway.recorder import Recorder
from gateway.relay.stream import Progress
from gateway.routing.policy import Route
from gateway.routing.replicas import Replica
from gateway.ticks import Ticks
from shared import logs
from shared.causes import Cause, CauseCode, most_telling
from shared.completed_line import EVENT, GATEWAY_STAGES, GatewayLine
from shared.end_reason import EndReason, end_reason_of
from shared.errors import STATUS_CLIENT_GONE, ApiError
from shared.ids import KeyId, ReplicaId, RequestId, TenantId
from shared.metrics import Counter, Gauge, GaugeFamily, Histogram
from shared.sse import Closing
from shared.telemetry import Stages
from shared.tracing import NO_TRACING, Tracing, has_failed, line_of

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


class RequestRecord(Struct, eq=False):
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
    route: Route | None = None
    """Why the last replica was chosen; None before one was."""
    prompt_tokens: int = 0
    prompt_exact: bool = False
    decision: Decision | None = None
    reserved: int = 0
    settled: int = 0
    events: int = 0
    ticks: Ticks | None = None
    """When they were passed on. None until the answer is over, and without any."""
    body_len: int = 0
    closing: Closing | None = None
    first_byte_s: float | None = None

    def placed(self, route: Route) -> None:
        """Note the choice of a replica."""
        self.attempts += 1
        self.route = route
        ROUTES.inc(route)

    def attempt_failed(self, replica: ReplicaId, code: str) -> None:
        """Note an attempt after which another may follow."""
        UPSTREAM_ATTEMPTS.inc(replica, code)
        if len(self.failures) < FAILURES_SHOWN_MAX:
            self.failures += (f"{replica}={code}",)

    def failed(self, error: ApiError, sent_status: int | None) -> None:
        """Note the error that ended the request. `sent_status` is the status that the client was
        already sent, when the answer had begun."""
        self.error = error
        self.status = sent_status or int(error.status)
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
            self.settled = settlement.settled
            _SETTLED.value += settlement.settled
            _RELEASED.value += settlement.released
            _OVERDRAWN.value += settlement.overdrawn


_LABELS: Final = ("endpoint", "model", "tenant", "status", "end_reason")
REQUESTS: Final = Counter("penstock_gateway_requests", "Requests ended.", _LABELS)
IN_FLIGHT: Final = Gauge("penstock_gateway_requests_in_flight", "Requests in progress.")
HELD_BYTES: Final = Gauge("penstock_gateway_held_bytes", "Of request_memory, what requests hold.")
HTTP2_STREAMS: Final = Gauge("penstock_gateway_http2_streams", "Streams to engines that are open.")
CONNECTIONS_CUT: Final = Counter(
    "penstock_gateway_connections_cut",
    "Client connections closed because too many were open, or held something.",
)
TOKENS: Final = Counter(
    "penstock_gateway_tokens", "Tokens as the engine counted.", ("model", "tenant", "kind")
)
FIRST_BYTE: Final = Histogram(
    "penstock_gateway_first_byte_seconds",
    "From a request's arrival to the first byte of its answer's body.",
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

    def completed(self, record: RequestRecord, stages: Stages, seconds: float) -> None:
        failed = has_failed(record.status, record.error is not None)
        exemplar = self._tracing.exemplar(stages, record.request_id, seconds, failed=failed)
        stages.end(exemplar)
        line = _line(record, stages, seconds)
        logged = logs.write_line(line, "info")
        if self._recorder.is_on:
            self._recorder.add(line, stages.stamps(), logged, record.ticks)
        self._tracing.ended(stages, stages.began_s, seconds, failed=failed, line=lambda: line_of(line))
        model, tenant = record.model or NONE, self._tenant_label(record.tenant)
        REQUESTS.inc(record.endpoint, model, tenant, record.status, record.end_reason.value)
        SECONDS.observe(seconds, model, record.stream, exemplar=exemplar)
        if record.first_byte_s is not None:
            FIRST_BYTE.observe(record.first_byte_s, model, record.stream, exemplar=exemplar)
        if (closing := record.closing) is not None:
            TOKENS.inc(model, tenant, "prompt", by=closing.prompt_tokens)
            TOKENS.inc(model, tenant, "completion", by=closing.completion_tokens)
            TOKENS.inc(model, tenant, "cached", by=closing.cached_tokens)

    def _tenant_label(self, tenant: TenantId | None) -> str:
        if tenant is None:
            return NONE
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_SHOWN_MAX:
                return "other"
            self._tenants.add(tenant)
        return tenant


def _line(record: RequestRecord, stages: Stages, seconds: float) -> GatewayLine:
    """The completed line. Its fields are named here in their order, and without `**`, which would make a dict
    of them first: that took as long as all the rest."""
    error, closing, decision, trace = record.error, record.closing, record.decision, stages.trace
    refusal = None if decision is None else decision.refusal
    edge, auth, answer, seat, body, validate, tenant, tokenize, quota, route, connect, wait, relay, settle = (
        stages.milliseconds(GATEWAY_STAGES)
    )
    return GatewayLine(
        ts=datetime.now(UTC), level="info", event=EVENT, logger=__name__,
        request_id=record.request_id,
        trace_id=trace.trace_id, span_id=trace.span_id, parent_span_id=stages.parent_span_id,
        method=record.method, endpoint=record.endpoint, status=record.status,
        end_reason=record.end_reason, stage=record.stage, stream=record.stream, total_ms=_ms(seconds),
        tenant=record.tenant, model=record.model,
        error_code=None if error is None else error.code,
        error_param=None if error is None else error.param,
        error_detail=None if error is None else error.detail,
        prompt_tokens=record.prompt_tokens if closing is None else closing.prompt_tokens,
        completion_tokens=None if closing is None else closing.completion_tokens,
        cached_tokens=None if closing is None else closing.cached_tokens,
        host_tokens=None if closing is None else closing.host_tokens,
        disk_tokens=None if closing is None else closing.disk_tokens,
        causes=_causes(closing, tokenize),
        body_ms=body, validate_ms=validate, tokenize_ms=tokenize,
        service="gateway", key_id=record.key, replica=record.replica, attempts=record.attempts,
        failed_attempts=", ".join(record.failures) or None,
        route=None if record.route is None else record.route.value,
        prompt_exact=record.prompt_exact or closing is not None,
        reserved_tokens=record.reserved, settled_tokens=record.settled, events=record.events,
        body_len=record.body_len, engine_swaps=None if closing is None else closing.swaps,
        first_byte_ms=None if record.first_byte_s is None else _ms(record.first_byte_s),
        quota_meter=None if refusal is None else refusal.meter.value,
        quota_scope=None if refusal is None else refusal.scope.value,
        engine_end_reason=None if closing is None else closing.end_reason,
        engine_edge_ms=None if closing is None else closing.edge_ms,
        engine_body_ms=None if closing is None else closing.body_ms,
        engine_validate_ms=None if closing is None else closing.validate_ms,
        engine_tokenize_ms=None if closing is None else closing.tokenize_ms,
        engine_handover_ms=None if closing is None else closing.handover_ms,
        engine_first_byte_ms=None if closing is None else closing.first_byte_ms or None,
        engine_queue_ms=None if closing is None else closing.queue_ms,
        engine_prefill_ms=None if closing is None else closing.prefill_ms,
        engine_decode_ms=None if closing is None else closing.decode_ms,
        engine_preempted_ms=None if closing is None else closing.preempted_ms,
        engine_preemptions=None if closing is None else closing.preemptions,
        engine_stalled_ms=None if closing is None else closing.stalled_ms,
        edge_ms=edge, auth_ms=auth, answer_ms=answer, seat_ms=seat, tenant_ms=tenant, quota_ms=quota,
        route_ms=route, connect_ms=connect, wait_ms=wait, relay_ms=relay, settle_ms=settle,
    )  # fmt: skip


def _causes(closing: Closing | None, tokenize_ms: float | None) -> tuple[Cause, ...] | None:
    """The engine's causes, and the tokenizer here if it was slow. None where there is nothing to tell."""
    told = () if closing is None else closing.causes
    if tokenize_ms is not None and tokenize_ms >= SLOW_TOKENIZER_MS:
        told = most_telling((Cause(code=CauseCode.TOKENIZER, ms=tokenize_ms), *told))
    return told or None


def _ms(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1e3
