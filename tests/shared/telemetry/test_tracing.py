"""Which requests have their spans exported, and what these say."""

from __future__ import annotations

from typing import Any

import pytest

from shared.telemetry.stages import Stages
from shared.telemetry.tracing import NO_TRACING, STAGE_S_MIN, TracePolicy, Tracing, has_failed, spans_of
from tests.fakes import VirtualClock
from tests.span_sink import KeptSpans

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LINE: dict[str, Any] = {
    "method": "POST",
    "endpoint": "/v1/chat/completions",
    "model": "demo",
    "status": 200,
    "end_reason": "ok",
    "request_id": "req-1",
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "engine_queue_ms": 1.5,
    "total_ms": 2500.0,
}


BEGAN_S = VirtualClock().monotonic()


def stages_of(clock: VirtualClock, tracing: Tracing = NO_TRACING, flags: str | None = "01") -> Stages:
    parent = None if flags is None else f"00-{TRACE_ID}-{SPAN_ID}-{flags}"
    return Stages("gateway", clock, traceparent=parent, tracestate="v=1", samples=tracing.samples)


def walked(clock: VirtualClock) -> Stages:
    stages = stages_of(clock)
    for stage, seconds in (("connect", 1.0), ("connect", 0.5), ("relay", 1.0)):
        stages.enter(stage)
        clock.advance(seconds)
    stages.enter("settle")
    return stages


def test_a_request_has_a_span_and_each_visit_to_a_stage_one_below_it() -> None:
    clock = VirtualClock(wall=1000.0)
    stages = walked(clock)
    request, *visits = spans_of(stages, stages.began_s, 2.5, LINE)
    assert (request.name, request.is_server, request.error) == ("chat demo", True, None)
    assert (request.context.span_id, request.parent_span_id) == (stages.trace.span_id, SPAN_ID)
    assert (request.start_ns, request.end_ns) == (1000 * 10**9, 1002_500_000_000)
    assert request.state == "v=1"
    assert [span.name for span in visits] == ["connect", "connect", "relay"]
    assert {span.parent_span_id for span in visits} == {request.context.span_id}
    assert {span.context.trace_id for span in visits} == {TRACE_ID}
    first, second, relay = visits
    assert second.linked_span_id == first.context.span_id
    assert (first.linked_span_id, relay.linked_span_id) == (None, None)
    assert (second.start_ns, second.end_ns) == (1001 * 10**9, 1001_500_000_000)


def test_a_visit_that_is_over_at_once_has_no_span() -> None:
    clock = VirtualClock()
    stages = stages_of(clock)
    for stage, seconds in (("auth", STAGE_S_MIN / 2), ("wait", STAGE_S_MIN * 2), ("relay", 1.0)):
        stages.enter(stage)
        clock.advance(seconds)
    stages.enter("settle")
    assert [span.name for span in spans_of(stages, stages.began_s, 2.5, LINE)[1:]] == ["wait", "relay"]


def test_attributes_have_the_names_of_the_conventions() -> None:
    clock = VirtualClock()
    attributes = spans_of(walked(clock), BEGAN_S, 2.5, LINE)[0].attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "penstock"
    assert attributes["gen_ai.request.model"] == "demo"
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["http.response.status_code"] == 200
    assert attributes["penstock.request_id"] == "req-1"
    assert attributes["penstock.engine_queue_ms"] == 1.5
    assert "penstock.total_ms" not in attributes, "it is the span's own length"


def test_a_request_that_generates_nothing_is_named_after_its_route() -> None:
    clock = VirtualClock()
    line = {**LINE, "method": "GET", "endpoint": "/v1/models", "status": 503, "error_code": "not_ready"}
    request, *_ = spans_of(walked(clock), BEGAN_S, 2.5, line)
    assert (request.name, request.error) == ("GET /v1/models", "not_ready")
    assert request.attributes["error.type"] == "not_ready"
    assert "gen_ai.operation.name" not in request.attributes
    unparsed = {**line, "method": "", "endpoint": "unparsed", "status": 400}
    request, *_ = spans_of(walked(clock), BEGAN_S, 0.0, unparsed)
    assert (request.name, request.error) == ("HTTP unparsed", None)


def test_failures_are_a_servers_errors_and_those_of_answers_that_had_begun() -> None:
    assert has_failed(500, has_error=True)
    assert has_failed(200, has_error=True)
    assert not has_failed(429, has_error=True)
    assert not has_failed(499, has_error=False)
    assert not has_failed(200, has_error=False)


@pytest.mark.parametrize(
    ("flags", "failed", "seconds", "wanted"),
    [
        ("01", False, 0.1, True),
        ("00", False, 0.1, False),
        ("00", True, 0.1, True),
        ("00", False, 5.0, True),
        (None, False, 4.9, False),
    ],
)
def test_the_caller_decides_but_for_failures_and_slow_ones(
    flags: str | None, failed: bool, seconds: float, wanted: bool
) -> None:
    clock, sink = VirtualClock(), KeptSpans()
    tracing = Tracing(TracePolicy(ratio=0.0, slow_s=5.0), sink)
    stages = stages_of(clock, tracing, flags)
    tracing.ended(stages, BEGAN_S, seconds, failed=failed, line=lambda: LINE)
    assert bool(sink.spans) is wanted
    tracing.close()
    assert sink.is_closed


def test_a_ratio_of_new_traces_is_sampled_and_both_services_agree() -> None:
    clock, tracing = VirtualClock(), Tracing(TracePolicy(ratio=0.25), KeptSpans())
    found = [stages_of(clock, tracing, None) for _ in range(2000)]
    sampled = sum(stages.trace.sampled for stages in found)
    assert 350 < sampled < 650
    for stages in found[:50]:
        assert stages.trace.sampled == tracing.policy.samples(stages.trace.trace_id)
        engine = Stages("engine", clock, traceparent=stages.trace.traceparent)
        assert engine.trace.sampled == stages.trace.sampled
    assert TracePolicy(ratio=1.0).samples("f" * 32)
    assert not TracePolicy(ratio=0.0).samples("0" * 32)


def test_without_a_sink_nothing_is_made() -> None:
    def line() -> dict[str, Any]:
        raise AssertionError("nobody wants it")

    clock = VirtualClock()
    tracing = Tracing(TracePolicy(ratio=1.0))
    stages = stages_of(clock, tracing, None)
    assert not stages.trace.sampled
    tracing.ended(stages, BEGAN_S, 1.0, failed=True, line=line)
    tracing.close()
