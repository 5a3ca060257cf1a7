"""The stages of a request and their times, with one name for the log field, the header, the span and the
metric.

`with stages("quota"):` costs about two microseconds, `stages.enter("quota")` a third of that. Spans are
made only when an OpenTelemetry SDK is installed and configured before the first request; without one,
trace ids are still carried on, so that a caller's trace joins the logs of both services.

Stage names are constants of the code, never taken from requests: they label a histogram.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from operator import itemgetter, sub
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
LAYOUTS_MAX: Final = 1024
"""Sequences of stages that are cached: a request that is tried at another replica has one of its own."""

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
    """The body of the answer to a scrape, of the type `METRICS_CONTENT_TYPE`."""
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


class _Layout(Struct, frozen=True):
    """The facts that are the same for all requests that went through the same stages in the same order."""

    names: tuple[str, ...]
    """The names of the stages that are over, each once, in the order of the first entry."""
    at: tuple[int, ...] | None
    """The index in `names` of each visit; None where no stage was entered twice."""
    fields: tuple[str, ...]
    """The stages' names in the completed line."""
    timing: str
    """The `Server-Timing` header, with places for milliseconds."""


@lru_cache(maxsize=LAYOUTS_MAX)
def _layout(visits: tuple[str, ...]) -> _Layout:
    names = tuple(dict.fromkeys(visits))
    at = None if len(names) == len(visits) else tuple(map(names.index, visits))
    timing = ", ".join(f"{name};dur=%.2f" for name in names)
    return _Layout(names, at, tuple(f"{name}_ms" for name in names), timing)


class Stages:
    """The stage times of one request in one service, under one span.

    `trace` is this request's own span; its `traceparent` goes into the headers of the next hop. Call `end`
    once, when the request has ended.
    """

    __slots__ = (
        *(
            "_began_s",
            "_clock",
            "_measured_s",
            "_final",
            "_monotonic",
            "_over",
            "_service",
            "_span",
            "_tracer",
        ),
        *("now", "parent_span_id", "trace"),
    )

    def __init__(self, service: str, clock: Clock = SYSTEM_CLOCK, *, traceparent: str | None = None) -> None:
        self._service = service
        self._clock = clock
        self._monotonic = clock.monotonic
        self._over: list[str] = []
        """The visits to stages that are over, in order; those that `enter` began come first."""
        self._began_s: list[float] = []
        """The start of each of them, and of the one that is not over, in seconds on the clock."""
        self._measured_s: dict[str, float] = {}
        """The times of stages that were measured elsewhere, in seconds."""
        self._final: tuple[_Layout, list[float]] | None = None
        """The stages' times as they were at `end`. None before."""
        self.now = ""
        """The stage that `enter` began last."""
        parent = parse_traceparent(traceparent) if traceparent is not None else None
        self.parent_span_id = None if parent is None else parent.span_id
        """The span that `traceparent` named. None where there was none."""
        self._tracer = _tracer()
        self._span = None if self._tracer is None else self._tracer.start_span(service, _otel_context(parent))
        if self._span is not None:
            context = self._span.get_span_context()
            self.trace = TraceContext(
                f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled
            )
        else:
            ids = f"{random_bits(192) | 1 << 64 | 1:048x}"  # neither id may be zero
            trace_id = parent.trace_id if parent else ids[:32]
            self.trace = TraceContext(trace_id, ids[32:], parent is not None and parent.sampled)

    def __call__(self, stage: str) -> _Stage:
        """`with stages("quota"): ...` measures. A stage that is entered again adds up."""
        return _Stage(self, stage)

    def enter(self, stage: str) -> float:
        """End the stage that runs, and begin this one. Returns the time on the clock, in seconds.

        For a request that is in one stage at every moment, so that the stages' times add up to its own.
        """
        now_s = self._monotonic()
        began_s = self._began_s
        if began_s:
            self._over.append(self.now)
            if self._span is not None:
                self._add_span(self.now, now_s - began_s[-1])
        began_s.append(now_s)
        self.now = stage
        return now_s

    def record(self, stage: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere, and ended now."""
        self._measured_s[stage] = self._measured_s.get(stage, 0.0) + seconds
        if self._span is not None:
            self._add_span(stage, seconds)

    def carve(self, stage: str, parts: Mapping[str, float]) -> None:
        """Give parts of a stage that is over names of their own: they were measured elsewhere, in seconds.
        The stage keeps the rest, and no part takes more than is left of it: so the sum stays the same."""
        names, seconds = self._taken()
        left = whole = seconds[names.names.index(stage)]
        for part, asked in parts.items():
            taken = max(0.0, min(asked, left))
            self.record(part, taken)
            left -= taken
        self._measured_s[stage] = self._measured_s.get(stage, 0.0) + left - whole

    def _add_span(self, stage: str, seconds: float) -> None:
        assert self._tracer is not None
        assert self._span is not None
        end_ns = int(self._clock.wall() * 1e9)
        parent = trace.set_span_in_context(self._span)
        self._tracer.start_span(stage, parent, start_time=end_ns - int(seconds * 1e9)).end(end_ns)

    def _taken(self) -> tuple[_Layout, list[float]]:
        """The stages that are over, and the seconds that each took."""
        if self._final is not None:
            return self._final
        visits, began_s = tuple(self._over), self._began_s
        seconds = list(map(sub, began_s[1:], began_s))
        if self._measured_s:
            visits, seconds = (*visits, *self._measured_s), [*seconds, *self._measured_s.values()]
        layout = _layout(visits)
        if layout.at is None:
            return layout, seconds
        sums = [0.0] * len(layout.names)
        for at, more in zip(layout.at, seconds, strict=True):
            sums[at] += more
        return layout, sums

    def server_timing(self) -> str:
        """The `Server-Timing` header, in milliseconds, in the order of entry."""
        layout, seconds = self._taken()
        return layout.timing % tuple(map(_MS.__mul__, seconds))

    def log_fields(self) -> dict[str, float]:
        """The times for the completed line, such as `{"quota_ms": 0.031}`."""
        layout, seconds = self._taken()
        return dict(zip(layout.fields, _milliseconds(seconds), strict=True))

    def milliseconds(self, names: tuple[str, ...]) -> tuple[float | None, ...]:
        """The time of each of these stages; None for one that is not over or was never entered."""
        layout, seconds = self._taken()
        return _picker(layout.names, names)([*_milliseconds(seconds), None])

    def end(self, **attributes: str | int | float | bool) -> None:
        """Observe the time of each stage, and end the span of the request. `attributes` never hold prompt
        text."""
        layout, seconds = self._final = self._taken()
        _STAGE_SECONDS.observe_all(layout.names, seconds, self._service)
        if self._span is not None:
            self._span.set_attributes(attributes)
            self._span.end()


_MS: Final = 1e3
_Values = list[float | None]


def _milliseconds(seconds: list[float]) -> list[float]:
    """Rounded to whole microseconds."""
    return [(s * 1e6 + 0.5) // 1.0 / 1e3 for s in seconds]


@lru_cache(maxsize=LAYOUTS_MAX)
def _picker(
    given: tuple[str, ...], wanted: tuple[str, ...]
) -> Callable[[list[float | None]], tuple[float | None, ...]]:
    """Picks values for the wanted names from those of the given ones, and one more for all others."""
    assert len(wanted) > 1
    return itemgetter(*(given.index(name) if name in given else len(given) for name in wanted))


class _Stage:
    __slots__ = ("_name", "_stages", "_started_s")

    def __init__(self, stages: Stages, name: str) -> None:
        self._stages = stages
        self._name = name
        self._started_s = 0.0

    def __enter__(self) -> None:
        self._started_s = self._stages._monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stages.record(self._name, self._stages._monotonic() - self._started_s)


@cache
def _tracer() -> trace.Tracer | None:
    """The tracer; None without an SDK. Cached, as the library looks into the environment each time."""
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
