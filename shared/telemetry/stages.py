"""The stages of a request and their times, with one name for the log field, the header, the span and the
metric.

`with stages("quota"):` costs about two microseconds, `stages.enter("quota")` a third of that. Trace ids are
carried on, so that a caller's trace joins the logs of both services; spans are made of the stages after the
request, where they are wanted (`shared.telemetry.tracing`).

Stage names are constants of the code, never taken from requests: they label a histogram.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from operator import itemgetter, sub
from types import TracebackType
from typing import Any, Final

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from shared.process.build import version
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.metrics import REGISTRY, Exemplar, GaugeFamily, Histogram
from shared.wire.ids import random_bits

ACCEPT_LEN_MAX: Final = 4096
"""Characters of a scraper's `Accept` that are read."""
_OPENMETRICS: Final = "application/openmetrics-text"
BUILD: Final = GaugeFamily("penstock_build_info", "1, with the version of the code.", ("version",))
BUILD.set_function(lambda: {(version(),): 1.0})
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


class Exposition(Struct, frozen=True):
    """The answer to a scrape."""

    body: bytes
    content_type: str


def exposition(accept: str | None = None, registry: CollectorRegistry = REGISTRY) -> Exposition:
    """The metrics, in OpenMetrics where `accept` prefers it, since that format alone has exemplars, and else
    in Prometheus' own format."""
    if not _prefers_openmetrics(accept or ""):
        return Exposition(generate_latest(registry), CONTENT_TYPE_LATEST)
    # By default the library writes the colon of `vllm:` names as an underscore in this format.
    body: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return Exposition(body, openmetrics.CONTENT_TYPE_LATEST)


def _prefers_openmetrics(accept: str) -> bool:
    """True where the header names the format, and no text before it."""
    wanted: dict[str, float] = {}
    for part in accept[:ACCEPT_LEN_MAX].lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        quality = next((piece[2:] for piece in parameters if piece.startswith("q=")), "1")
        weight = float(quality) if _QUALITY.fullmatch(quality) else 0.0
        wanted[name] = max(weight, wanted.get(name, 0.0))
    weight = wanted.get(_OPENMETRICS, 0.0)
    return weight > 0.0 and weight >= wanted.get("text/plain", 0.0)


_QUALITY: Final = re.compile(r"[01](?:\.[0-9]{0,3})?")


# -- trace context --------------------------------------------------------------------------------

STATE_LEN_MAX: Final = 512
"""The longest `tracestate` that is carried on, which every party must carry (W3C Trace Context)."""
STATE_MEMBERS_MAX: Final = 32
_MEMBER: Final = re.compile(
    r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
"""A member of a `tracestate`: `vendor=opaque`, or `tenant@vendor=opaque`."""
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


def carried_state(value: str | None) -> str:
    """The `tracestate` header as it is carried on; empty where it is none, or longer than must be carried.

    It is read strictly (W3C Trace Context, level 1): libraries put what they do not take into their logs.
    """
    if value is None or len(value) > STATE_LEN_MAX:
        return ""
    members = [member for part in value.split(",") if (member := part.strip(" \t"))]
    names = {member.partition("=")[0] for member in members}
    is_state = len(names) == len(members) <= STATE_MEMBERS_MAX and all(map(_MEMBER.fullmatch, members))
    return value if is_state and members else ""


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


class Stamps(Struct, frozen=True, gc=False):
    """The visits to stages, and when each began, with the end of the last, in seconds on the clock."""

    names: tuple[str, ...]
    began_s: tuple[float, ...]

    def visits(self) -> list[tuple[str, float, float]]:
        """Each visit with milliseconds: since the first began, and taken."""
        starts_s = [at - self.began_s[0] for at in self.began_s]
        starts = _milliseconds(starts_s)
        takes = _milliseconds(list(map(sub, starts_s[1:], starts_s)))
        return list(zip(self.names, starts, takes, strict=False))


class Stages:
    """The stage times of one request in one service, under one span.

    `trace` is this request's own span; its `traceparent` goes into the headers of the next hop. Call `end`
    once, when the request has ended.
    """

    __slots__ = (
        *("_carved", "_ended_s", "_final", "_marks", "_measured_s", "_monotonic", "_service"),
        *("clock", "mark", "parent_span_id", "state", "trace"),
    )

    def __init__(
        self,
        service: str,
        clock: Clock = SYSTEM_CLOCK,
        *,
        traceparent: str | None = None,
        tracestate: str | None = None,
        samples: Callable[[str], bool] | None = None,
    ) -> None:
        """`samples` decides by its id whether a new trace is sampled; without it none is."""
        self._service = service
        self.clock = clock
        self._monotonic = clock.monotonic
        self._marks: list[Any] = []
        """The visits to stages, in order: by turns the name of each, and its start in seconds on the clock.
        All but the last are over."""
        self.mark: Final[Callable[[tuple[str, float]], None]] = self._marks.extend
        """`mark((stage, now_s))` ends the stage that runs, and begins this one: for a request that is in one
        stage at every moment, so that the stages' times add up to its own."""
        self._measured_s: dict[str, float] = {}
        """The times of stages that were measured elsewhere, in seconds."""
        self._ended_s: dict[str, float] = {}
        """The last end of each of those stages that `with` measured, in seconds on the clock."""
        self._carved: dict[str, dict[str, float]] = {}
        """The parts of stages that `carve` named, and the seconds of each."""
        self._final: tuple[_Layout, list[float]] | None = None
        """The stages' times as they were at `end`. None before."""
        parent = parse_traceparent(traceparent) if traceparent is not None else None
        self.parent_span_id = None if parent is None else parent.span_id
        """The span that `traceparent` named. None where there was none."""
        self.state = "" if parent is None or tracestate is None else carried_state(tracestate)
        """The caller's `tracestate`, which goes with its `traceparent`. Empty without one."""
        ids = f"{random_bits(192) | 1 << 64 | 1:048x}"  # neither id may be zero
        if parent is not None:
            self.trace = TraceContext(parent.trace_id, ids[32:], parent.sampled)
        else:
            trace_id = ids[:32]
            self.trace = TraceContext(trace_id, ids[32:], samples is not None and samples(trace_id))

    def __call__(self, stage: str) -> _Stage:
        """`with stages("quota"): ...` measures. A stage that is entered again adds up."""
        return _Stage(self, stage)

    def enter(self, stage: str) -> float:
        """Begin this stage now, as `mark` does. Returns the time on the clock, in seconds."""
        monotonic = self._monotonic  # what a slot holds is slow to call as a method
        now_s = monotonic()
        self._marks += stage, now_s
        return now_s

    @property
    def now(self) -> str:
        """The stage that began last; empty before the first."""
        return self._marks[-2] if self._marks else ""

    def last(self, stage: str) -> float | None:
        """When this stage was entered last, in seconds on the clock. None where it never was."""
        marks = reversed(self._marks)
        return next((at_s for at_s, name in zip(marks, marks, strict=True) if name == stage), None)

    @property
    def began_s(self) -> float:
        """When the first stage was entered, in seconds on the clock; now, before that."""
        return self._marks[1] if self._marks else self._monotonic()

    def record(self, stage: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere."""
        self._measured_s[stage] = self._measured_s.get(stage, 0.0) + seconds

    def carve(self, stage: str, parts: Mapping[str, float]) -> None:
        """Give parts of a stage that is over names of their own: they were measured elsewhere, in seconds.
        The stage keeps the rest, and no part takes more than is left of it: so the sum stays the same."""
        names, seconds = self._taken()
        left = whole = seconds[names.names.index(stage)]
        carved: dict[str, float] = {}
        for part, asked in parts.items():
            carved[part] = max(0.0, min(asked, left))
            self.record(part, carved[part])
            left -= carved[part]
        self.record(stage, left - whole)
        self._carved[stage] = carved

    def visits(self, end_s: float, order: Sequence[str] = ()) -> Iterator[tuple[str, float, float]]:
        """The visits to stages up to `end_s`, the request's end: name, begin and duration, in seconds on the
        clock. Of the parts of a stage the time is known and not the place: they follow each other in it, as
        in `order`."""
        names, began_s = self._marks[:-2:2], self._marks[1::2]
        for name, (begin_s, next_s) in zip(names, pairwise(began_s), strict=True):
            at_s = begin_s
            carved = self._carved.get(name, {})
            for part in sorted(carved, key=order.index if order else None):
                took_s = min(carved[part], next_s - at_s)
                yield part, at_s, took_s
                at_s += took_s
            yield name, at_s, next_s - at_s
        parts = {*self._carved, *chain.from_iterable(self._carved.values())}
        for name, took_s in self._measured_s.items():
            if name not in parts:
                yield name, self._ended_s.get(name, end_s) - took_s, took_s

    def entered(self, *, is_over: bool = True) -> list[tuple[str, float, float]]:
        """The visits that were marked: the stage, and milliseconds since the first began and taken. Unless
        the request `is_over`, the stage that runs is the last of them, until now."""
        stamps = self.stamps()
        if not is_over:
            stamps = Stamps((*stamps.names, self.now), (*stamps.began_s, self._monotonic()))
        return stamps.visits()

    def stamps(self) -> Stamps:
        """The visits that are over, as they were noted."""
        return Stamps(tuple(self._marks[:-2:2]), tuple(self._marks[1::2]))

    def _taken(self) -> tuple[_Layout, list[float]]:
        """The stages that are over, and the seconds that each took."""
        if self._final is not None:
            return self._final
        visits, began_s = tuple(self._marks[:-2:2]), self._marks[1::2]
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
        return layout.timing % tuple(map((1e3).__mul__, seconds))

    def log_fields(self) -> dict[str, float]:
        """The times for the completed line, such as `{"quota_ms": 0.031}`."""
        layout, seconds = self._taken()
        return dict(zip(layout.fields, _milliseconds(seconds), strict=True))

    def milliseconds(self, names: tuple[str, ...]) -> tuple[float | None, ...]:
        """The time of each of these stages; None for one that is not over or was never entered."""
        layout, seconds = self._taken()
        return _picker(layout.names, names)([*_milliseconds(seconds), None])

    def end(self, exemplar: Exemplar | None = None) -> None:
        """Observe the time of each stage."""
        layout, seconds = self._final = self._taken()
        _STAGE_SECONDS.observe_all(layout.names, seconds, self._service, exemplar=exemplar)


_WHOLE: Final = 1.5 * 2**52
"""Added to a number and taken away again, it leaves the nearest whole one: so large a sum has no fraction."""
_Values = list[float | None]


def _milliseconds(seconds: list[float]) -> list[float]:
    """Rounded to whole microseconds."""
    return [(s * 1e6 + _WHOLE - _WHOLE) / 1e3 for s in seconds]


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
        stages, now_s = self._stages, self._stages._monotonic()
        stages.record(self._name, now_s - self._started_s)
        stages._ended_s[self._name] = now_s
