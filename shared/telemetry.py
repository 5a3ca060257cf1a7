"""Where the time of a request went: one name for the log field, the header, the span and the metric.

`with stages("quota"):` costs about two microseconds, `stages.enter("quota")` a third of that. Spans are
made only when an OpenTelemetry SDK is installed and configured before the first request; without one,
trace ids are still carried on, so that a caller's trace joins the logs of both services.

Stage names are constants of the code, never taken from requests: they label a histogram.
"""

from __future__ import annotations

import re
from functools import cache
from types import TracebackType
from typing import Final

from msgspec import Struct
from opentelemetry import trace
from opentelemetry.context import Context
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shared.clock import SYSTEM_CLOCK, Clock
from shared.ids import random_bits
from shared.metrics import REGISTRY, Histogram

METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_STAGE_SECONDS: Final = Histogram(
    "penstock_stage_seconds",
    "Time that a request spent in one stage, all its visits together.",
    ("service", "stage"),
    buckets=(
        1e-4,
        2.5e-4,
        5e-4,
        1e-3,
        2.5e-3,
        5e-3,
        0.01,
        0.025,
        0.05,
        0.1,
        0.25,
        0.5,
        1,
        2.5,
        5,
        10,
        30,
        60,
        300,
    ),
)


def metrics_text(registry: CollectorRegistry = REGISTRY) -> bytes:
    """What a scrape answers, of the type `METRICS_CONTENT_TYPE`."""
    return generate_latest(registry)


# -- trace context --------------------------------------------------------------------------------

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class TraceContext(Struct, frozen=True):
    """A span of a W3C trace. `trace_id` has 32 and `span_id` 16 lowercase hex digits, not all zero."""

    trace_id: str
    span_id: str
    sampled: bool = False

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def parse_traceparent(value: str | None) -> TraceContext | None:
    """The header's context, or None when it is not well formed."""
    match = _TRACEPARENT.fullmatch(value) if value is not None and len(value) <= 512 else None
    if match is None or (value is not None and value.startswith("00-") and len(value) != 55):
        return None
    trace_id, span_id, flags = match.groups()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


# -- stages ---------------------------------------------------------------------------------------


class _Fields(dict[str, str]):
    """A stage's name in the completed line, kept as one object: most lines name the same stages."""

    def __missing__(self, stage: str) -> str:
        name = self[stage] = f"{stage}_ms"
        return name


_field: Final = _Fields()


class Stages:
    """The stage times of one request in one service, under one span.

    `trace` is this request's own span; its `traceparent` goes into the headers of the next hop.
    Call `end` once, when the request has ended.
    """

    __slots__ = ("_clock", "_seconds", "_service", "_span", "_tracer", "at_s", "now", "trace")

    def __init__(self, service: str, clock: Clock = SYSTEM_CLOCK, *, traceparent: str | None = None) -> None:
        self._service = service
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self.now = ""
        """The stage that `enter` began last, and when it did."""
        self.at_s = 0.0
        parent = parse_traceparent(traceparent) if traceparent is not None else None
        self._tracer = _tracer()
        self._span = None if self._tracer is None else self._tracer.start_span(service, _otel_context(parent))
        if self._span is not None:
            context = self._span.get_span_context()
            self.trace = TraceContext(
                f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled
            )
        else:
            ids = f"{random_bits(192) | 1 << 64 | 1:048x}"  # neither may be zero
            trace_id = parent.trace_id if parent else ids[:32]
            self.trace = TraceContext(trace_id, ids[32:], parent is not None and parent.sampled)

    def __call__(self, stage: str) -> _Stage:
        """`with stages("quota"): ...` measures. A stage that is entered again adds up."""
        return _Stage(self, stage)

    def enter(self, stage: str) -> float:
        """For requests that are in one stage at every moment, so that their times add up to the request's:
        the last one is over, this one begins. Returns when, on the clock's own scale."""
        now_s = self._clock.monotonic()
        if last := self.now:
            seconds = now_s - self.at_s
            self._seconds[last] = self._seconds.get(last, 0.0) + seconds
            if self._span is not None:
                self._add_span(last, seconds)
        self.now, self.at_s = stage, now_s
        return now_s

    def record(self, stage: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere, and ended now."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        if self._span is not None:
            self._add_span(stage, seconds)

    def _add_span(self, stage: str, seconds: float) -> None:
        assert self._tracer is not None
        assert self._span is not None
        end_ns = int(self._clock.wall() * 1e9)
        parent = trace.set_span_in_context(self._span)
        self._tracer.start_span(stage, parent, start_time=end_ns - int(seconds * 1e9)).end(end_ns)

    def server_timing(self) -> str:
        """The `Server-Timing` header, in milliseconds, in the order of entry."""
        return ", ".join([f"{stage};dur={seconds * 1e3:.2f}" for stage, seconds in self._seconds.items()])

    def log_fields(self) -> dict[str, float]:
        """`{"quota_ms": 0.031, ...}` for the completed line."""
        return {_field[stage]: int(seconds * 1e6 + 0.5) / 1e3 for stage, seconds in self._seconds.items()}

    def end(self, **attributes: str | int | float | bool) -> None:
        """Observe what each stage took, and close the span of the request. `attributes` never hold prompt
        text."""
        _STAGE_SECONDS.observe_all(self._seconds, self._service)
        if self._span is not None:
            self._span.set_attributes(attributes)
            self._span.end()


class _Stage:
    __slots__ = ("_name", "_stages", "_started_s")

    def __init__(self, stages: Stages, name: str) -> None:
        self._stages = stages
        self._name = name
        self._started_s = 0.0

    def __enter__(self) -> None:
        self._started_s = self._stages._clock.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stages.record(self._name, self._stages._clock.monotonic() - self._started_s)


@cache
def _tracer() -> trace.Tracer | None:
    """None without an SDK. Asked once: the library looks into the environment each time."""
    no_sdk = isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    return None if no_sdk else trace.get_tracer("penstock")


def _otel_context(parent: TraceContext | None) -> Context | None:
    if parent is None:
        return None
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT)
    remote = trace.SpanContext(
        int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=flags
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(remote))
