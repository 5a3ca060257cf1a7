"""Spans of requests, built after a request has ended, and only where somebody wants them.

A span that an SDK keeps while a request runs costs some 3 us even when nobody samples it, and a request has
a dozen stages. The stages' times are known anyway (`shared.telemetry.stages`), so a request costs nothing
here until it has ended; then `TracePolicy` says whether its spans are exported:

1. A caller's `traceparent` decides, where there is one: sampled, or not.
2. Else a ratio of all traces. The decision is taken from the trace's id, so both services agree on it, and
   it is in the `traceparent` of the hop.
3. Every request that failed, and every one that took as long as `slow_s`, whatever the above say. Each
   service goes by its own times there, so a slow request's trace may have the spans of one service alone.

The spans of a request: one of the request itself, and below it one for each visit to a stage that took
`STAGE_S_MIN`. Encoding a span takes the SDK some 40 us, and most of a request's stages are over sooner than
that; the completed line has their times. A visit that repeats an earlier one, such as the connection to a
second replica after the first one failed, has a link to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec import Meta, Struct

from shared.apis.table import OPERATIONS
from shared.process.metrics import Exemplar
from shared.process.settings import Rule, url_parts
from shared.telemetry import genai
from shared.telemetry.stages import Stages, TraceContext
from shared.wire.completed_line import ENGINE_STAGES
from shared.wire.ids import random_bits

Attribute = str | int | float | bool
STAGE_S_MIN: Final = 1e-4
"""The shortest visit to a stage that has a span, in seconds."""
RATIO_BITS: Final = 56
"""The bits of a trace's id that are random (W3C Trace Context, level 2), from the right."""


CollectorUrl = Annotated[str, Meta(min_length=1), Rule("be an http or https URL", url_parts)]
"""A collector's URL. Of another one nobody hears before the first spans are to be sent."""


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Export of spans by OTLP. It needs the extra otel."""

    endpoint: CollectorUrl | None = None
    """URL that takes OTLP over HTTP, such as http://collector:4318/v1/traces. Unset: what
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT say, and no export without them.
    OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none end any export."""
    ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Part of the traces that are exported, where the caller's traceparent does not decide."""
    errors: bool = True
    """Export every request that failed."""
    slow_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None
    """Export every request that took this long. Unset: none for that reason."""


class TracePolicy(Struct, frozen=True):
    """The choice of the requests whose spans are exported. Pure."""

    ratio: float = 0.0
    errors: bool = True
    slow_s: float | None = None

    def samples(self, trace_id: str) -> bool:
        """True if the ratio takes this trace, which its id decides (rule 2)."""
        return int(trace_id[-RATIO_BITS // 4 :], 16) < self.ratio * (1 << RATIO_BITS)

    def wants(self, *, sampled: bool, failed: bool, seconds: float) -> bool:
        """True if the spans of a request that has ended are wanted: it was sampled (rules 1 and 2), or it
        failed or was slow (rule 3)."""
        return sampled or (failed and self.errors) or (self.slow_s is not None and seconds >= self.slow_s)


class Span(Struct, frozen=True):
    """A span as it is exported. Times in nanoseconds since the epoch."""

    name: str
    context: TraceContext
    parent_span_id: str | None
    state: str
    """The W3C `tracestate` of the trace; empty without one."""
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = {}
    is_server: bool = False
    """True for the span of a request, False for that of a stage."""
    error: str | None = None
    """The word for its failure. None for a span that did not fail."""
    linked_span_id: str | None = None
    """The span of the same trace that this one repeats."""


class SpanSink(Protocol):
    """Where spans go."""

    def put(self, spans: Sequence[Span]) -> None:
        """Take the spans, at once and without an error."""
        ...

    def close(self) -> None: ...


class Tracing:
    """A service's handling of spans. Without a sink it does nothing."""

    def __init__(self, policy: TracePolicy = TracePolicy(), sink: SpanSink | None = None) -> None:
        self.policy: Final = policy
        self._sink: Final = sink
        self.is_on: Final = sink is not None
        self.samples: Final = None if sink is None or not policy.ratio else policy.samples
        """Decides by the ratio (rule 2) whether a request's span is sampled, where its caller does not say
        (rule 1). None samples none."""

    def ended(
        self,
        stages: Stages,
        began_s: float,
        seconds: float,
        *,
        failed: bool,
        line: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Export the spans of a request that has ended, if they are wanted. It began at `began_s` on the
        stages' clock and took so long; `line` makes its completed line."""
        if self._sink is not None and self._wants(stages, seconds, failed=failed):
            self._sink.put(spans_of(stages, began_s, seconds, line()))

    def exemplar(self, stages: Stages, request_id: str, seconds: float, *, failed: bool) -> Exemplar | None:
        """The request as an exemplar of metrics, where its trace can be found: its spans are exported from
        here, or its caller's are. It has taken so long by now."""
        if stages.trace.sampled or self._wants(stages, seconds, failed=failed):
            return Exemplar(stages.trace.trace_id, request_id, stages.clock.wall())
        return None

    def _wants(self, stages: Stages, seconds: float, *, failed: bool) -> bool:
        return self._sink is not None and self.policy.wants(
            sampled=stages.trace.sampled, failed=failed, seconds=seconds
        )

    def close(self) -> None:
        """Send what is queued, within a bounded time."""
        if self._sink is not None:
            self._sink.close()


NO_TRACING: Final = Tracing()


def spans_of(stages: Stages, began_s: float, seconds: float, line: Mapping[str, Any]) -> list[Span]:
    """The spans of a request that began at `began_s` and took so long: its own first, then one for each visit
    to a stage."""
    ahead_s = stages.clock.wall() - stages.clock.monotonic()

    def at_ns(moment_s: float) -> int:
        return round((moment_s + ahead_s) * 1e9)

    sampled = TraceContext(stages.trace.trace_id, stages.trace.span_id, True)
    attributes = attributes_of(line)
    error = line.get("error_code") if _has_failed(line) else None
    request = Span(
        name=_name(line),
        context=sampled,
        parent_span_id=stages.parent_span_id,
        state=stages.state,
        start_ns=at_ns(began_s),
        end_ns=at_ns(began_s + seconds),
        attributes=attributes,
        is_server=True,
        error=None if error is None else str(error),
    )
    spans, earlier = [request], dict[str, str]()
    for name, begin_s, took_s in stages.visits(began_s + seconds, ENGINE_STAGES):
        if took_s < STAGE_S_MIN:
            continue
        own = f"{random_bits(64) | 1:016x}"
        spans.append(
            Span(
                name=name,
                context=TraceContext(sampled.trace_id, own, True),
                parent_span_id=sampled.span_id,
                state=stages.state,
                start_ns=at_ns(begin_s),
                end_ns=at_ns(begin_s + took_s),
                linked_span_id=earlier.get(name),
            )
        )
        earlier[name] = own
    return spans


def attributes_of(line: Mapping[str, Any]) -> dict[str, Attribute]:
    """The attributes of a request's span, from its completed line, which holds no text of prompts or
    answers."""
    found: dict[str, Attribute] = {
        attribute: line[name] for name, attribute in genai.ATTRIBUTES.items() if line.get(name) is not None
    }
    found |= {f"penstock.{name}": line[name] for name in genai.OWN if line.get(name) is not None}
    found |= {f"penstock.{name}": value for name, value in line.items() if name.startswith("engine_")}
    if (operation := OPERATIONS.get(line["endpoint"])) is not None:
        found[genai.OPERATION], found[genai.PROVIDER] = operation, genai.PROVIDER_NAME
    return found


def _name(line: Mapping[str, Any]) -> str:
    """`chat demo` as the conventions name a span of a generation, else as they name one of HTTP."""
    operation, model = OPERATIONS.get(line["endpoint"]), line.get("model")
    if operation is not None and model is not None:
        return f"{operation} {model}"
    return f"{line['method'] or 'HTTP'} {line['endpoint']}"


def _has_failed(line: Mapping[str, Any]) -> bool:
    return has_failed(int(line["status"]), line.get("error_code") is not None)


def has_failed(status: int, has_error: bool) -> bool:
    """True for a server's error, and for an error in an answer that had begun. A refusal of the caller's own
    mistake is none, as the conventions have it for a server's span."""
    return status >= 500 or (has_error and status < 400)


def line_of(line: Struct) -> dict[str, Any]:
    """A completed line as a mapping, without the fields that have no value."""
    made: dict[str, Any] = msgspec.to_builtins(line)
    return {name: value for name, value in made.items() if value is not None}
