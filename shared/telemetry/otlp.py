"""Spans by OTLP over HTTP, with OpenTelemetry's SDK: the one module that imports it, and only when spans are
exported.

What the environment says counts, as for every user of the SDK: `OTEL_EXPORTER_OTLP_HEADERS`, `_CERTIFICATE`,
`_COMPRESSION`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`. Platforms set such variables for all that
they run, so nothing there keeps a service from its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from shared.process import logs
from shared.process.build import DISTRIBUTION
from shared.process.setting_values import ConfigError
from shared.telemetry.span_queue import Send, SpanQueue
from shared.telemetry.tracing import NO_TRACING, Span, TracePolicy, Tracing, TracingConfig

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SEND_S: Final = 10.0
"""The longest time that a batch takes, with the exporter's own repetitions."""
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)

log = logs.get(__name__)


def tracing_of(config: TracingConfig, service: str, env: Mapping[str, str]) -> Tracing:
    """The export that the configuration or the environment asks for. Raises ConfigError where the
    configuration does, and the extra is not installed."""
    if _is_off(env) or (config.endpoint is None and not _first(ENDPOINT_VARIABLES, env)):
        return NO_TRACING
    try:
        if config.endpoint is None and _first(PROTOCOL_VARIABLES, env).lower() == "grpc":
            raise ConfigError(
                [
                    "spans are sent over HTTP, and the environment names a collector's port for gRPC: set "
                    f"{PROTOCOL_VARIABLES[0]}=http/protobuf, and {ENDPOINT_VARIABLES[0]} to its URL for "
                    "HTTP, such as http://collector:4318/v1/traces"
                ]
            )
        send = _exporter(config.endpoint, service)
    except ConfigError as error:
        if config.endpoint is not None:
            raise
        log.warning("spans.not_exported", problems=list(error.problems))
        return NO_TRACING
    return Tracing(TracePolicy(config.ratio, config.errors, config.slow_s), SpanQueue(send))


def _is_off(env: Mapping[str, str]) -> bool:
    """True where the environment wants no export, as OpenTelemetry's specification has it."""
    is_disabled = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return is_disabled or env.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"


def _first(names: Sequence[str], env: Mapping[str, str]) -> str:
    """The value of the first of some variables that has one. Empty without any."""
    return next(filter(None, (env.get(name, "").strip() for name in names)), "")


def _exporter(endpoint: str | None, service: str) -> Send:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    except ImportError as error:
        raise ConfigError(
            [f"spans are exported with the extra otel: pip install '{DISTRIBUTION}[otel]' ({error})"]
        ) from None
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)
    resource = Resource({SERVICE_NAME: service}).merge(Resource.create())
    if resource.attributes.get(SERVICE_NAME, "").__str__().startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    scope = InstrumentationScope("penstock")

    def readable(span: Span) -> ReadableSpan:
        state = TraceState.from_header([span.state]) if span.state else None
        parent = None if span.parent_span_id is None else _context(span.context.trace_id, span.parent_span_id)
        linked = span.linked_span_id
        return ReadableSpan(
            name=span.name,
            context=_context(span.context.trace_id, span.context.span_id, state),
            parent=parent,
            resource=resource,
            attributes=span.attributes,
            links=() if linked is None else (Link(_context(span.context.trace_id, linked)),),
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    def send(spans: Sequence[Span]) -> bool:
        return exporter.export([readable(span) for span in spans]) is SpanExportResult.SUCCESS

    return send


def _context(trace_id: str, span_id: str, state: TraceState | None = None) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), False, _SAMPLED, state)
