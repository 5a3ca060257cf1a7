from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import ProxyTracerProvider, Span, SpanContext, TraceFlags, TracerProvider

from shared import telemetry
from shared.metrics import REGISTRY
from shared.telemetry import Stages, TraceContext, parse_traceparent
from tests.fakes import VirtualClock

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"


def observed(service: str, stage: str) -> tuple[float, float]:
    labels = {"service": service, "stage": stage}
    count = REGISTRY.get_sample_value("penstock_stage_seconds_count", labels) or 0.0
    return count, REGISTRY.get_sample_value("penstock_stage_seconds_sum", labels) or 0.0


def test_one_name_for_header_log_and_metric() -> None:
    clock = VirtualClock()
    stages = Stages("svc", clock)
    with stages("auth"):
        clock.advance(0.00012)
    stages.record("quota", 0.5)
    assert stages.server_timing() == "auth;dur=0.12, quota;dur=500.00"
    assert stages.log_fields() == {"auth_ms": 0.12, "quota_ms": 500.0}
    assert observed("svc", "quota") == (0, 0)
    stages.end()
    assert observed("svc", "quota") == (1, 0.5)
    text = telemetry.metrics_text().decode()
    assert 'penstock_stage_seconds_bucket{le="0.5",service="svc",stage="quota"} 1.0' in text


def test_a_stage_entered_again_adds_up() -> None:
    clock = VirtualClock()
    stages = Stages("svc", clock)
    for _ in range(3):
        with stages("relay"), stages("inner"):
            clock.advance(0.25)
    assert stages.log_fields() == {"inner_ms": 750.0, "relay_ms": 750.0}


def test_stages_that_follow_each_other_add_up_to_the_whole() -> None:
    clock = VirtualClock()
    stages = Stages("svc", clock)
    began_s = stages.enter("edge")
    for stage, seconds in (("auth", 1), ("relay", 0.5), ("auth", 0.25)):
        clock.advance(seconds)
        assert stages.enter(stage) - began_s == clock.monotonic() - 1000.0
        assert stages.now == stage
    clock.advance(2)
    assert stages.enter(stages.now) - began_s == 3.75
    assert stages.log_fields() == {"edge_ms": 1000.0, "auth_ms": 2500.0, "relay_ms": 250.0}


def test_a_stage_that_fails_is_measured_too() -> None:
    clock = VirtualClock()
    stages = Stages("svc", clock)

    def fails() -> None:
        with stages("auth"):
            clock.advance(1)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert stages.log_fields() == {"auth_ms": 1000.0}


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        GOOD.upper(),
        GOOD[:-1],
        GOOD + "-x",
        "ff" + GOOD[2:],
        GOOD.replace(TRACE_ID, "0" * 32),
        GOOD.replace(SPAN_ID, "0" * 16),
        GOOD.replace("-01", "-0g"),
        GOOD + "\n",
        "01" + GOOD[2:] + "-" + "x" * 600,
    ],
)
def test_bad_traceparents_start_a_new_trace(value: str | None) -> None:
    assert parse_traceparent(value) is None
    stages = Stages("svc", traceparent=value)
    assert parse_traceparent(stages.trace.traceparent) == stages.trace
    assert stages.trace.trace_id != TRACE_ID
    assert not stages.trace.sampled


def test_the_callers_trace_goes_on_under_a_new_span() -> None:
    stages = Stages("svc", traceparent=GOOD)
    assert re.fullmatch(rf"00-{TRACE_ID}-[0-9a-f]{{16}}-01", stages.trace.traceparent)
    assert stages.trace.span_id != SPAN_ID


def test_later_versions_of_the_header_are_read() -> None:
    assert parse_traceparent("01" + GOOD[2:] + "-more") == TraceContext(TRACE_ID, SPAN_ID, True)


class RecordedSpan(trace.NonRecordingSpan):
    def __init__(self, name: str, parent: SpanContext, start_ns: int | None, number: int) -> None:
        trace_id = parent.trace_id or 0xABC
        super().__init__(SpanContext(trace_id, number, is_remote=False, trace_flags=TraceFlags(1)))
        self.name, self.parent, self.start_ns = name, parent, start_ns
        self.end_ns: int | None = None
        self.attributes: dict[str, Any] = {}
        self.ended = False

    def set_attributes(self, attributes: Any) -> None:
        self.attributes.update(attributes)

    def end(self, end_time: int | None = None) -> None:
        self.ended, self.end_ns = True, end_time


class Recorder(TracerProvider, trace.Tracer):
    """An SDK in a few lines."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        return self

    def start_span(
        self, name: str, context: Any = None, *args: Any, start_time: int | None = None, **kw: Any
    ) -> Span:
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append(RecordedSpan(name, parent, start_time, len(self.spans) + 1))
        return self.spans[-1]

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("stages end their spans themselves")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    assert isinstance(trace.get_tracer_provider(), ProxyTracerProvider)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: recorder)
    telemetry._tracer.cache_clear()
    yield recorder
    telemetry._tracer.cache_clear()


def test_with_an_sdk_every_stage_is_a_span_of_the_request(recorder: Recorder) -> None:
    clock = VirtualClock(wall=1000.0)
    stages = Stages("gateway", clock, traceparent=GOOD)
    with stages("auth"):
        clock.advance(0.5)
    stages.enter("relay")
    clock.advance(0.25)
    stages.enter("settle")
    stages.end(status=200)
    request, auth, relay = recorder.spans
    assert (relay.name, relay.start_ns, relay.end_ns) == ("relay", int(1000.5 * 1e9), int(1000.75 * 1e9))
    assert (request.name, f"{request.parent.span_id:016x}", request.ended) == ("gateway", SPAN_ID, True)
    assert request.attributes == {"status": 200}
    assert (auth.name, auth.parent.span_id) == ("auth", request.get_span_context().span_id)
    assert (auth.start_ns, auth.end_ns) == (1000 * 10**9, int(1000.5 * 10**9))
    assert stages.trace == TraceContext(TRACE_ID, f"{1:016x}", True)
