"""The gateway's spans: of requests that are sampled, that fail, and of none besides."""

from __future__ import annotations

import pytest

from shared.telemetry.stages import parse_traceparent
from shared.telemetry.tracing import STAGE_S_MIN, TracePolicy, Tracing
from shared.wire.completed_line import GATEWAY_STAGES
from tests.gateway.conftest import House, Open, until
from tests.gateway.fake_engine import refusal
from tests.span_sink import KeptSpans

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    sink = KeptSpans()
    monkeypatch.setattr("gateway.app.tracing_of", lambda *_: Tracing(TracePolicy(), sink))
    return sink


async def traced(open_house: Open, sink: KeptSpans) -> House:
    """A gateway whose spans go to the sink."""
    house = await open_house()
    assert isinstance(house, House)
    assert not sink.spans
    return house


async def test_a_sampled_request_is_a_tree_under_the_callers_span(open_house: Open, sink: KeptSpans) -> None:
    house = await traced(open_house, sink)
    async with house.chat(headers=SAMPLED) as answer:
        await answer.read()
    line = await house.line()
    await until(lambda: bool(sink.spans))
    request, *stages = sink.spans
    assert (request.context.trace_id, request.parent_span_id) == (TRACE_ID, SPAN_ID)
    assert (request.context.span_id, request.attributes["penstock.request_id"]) == (
        line["span_id"],
        line["request_id"],
    )
    assert {span.name for span in stages} <= set(GATEWAY_STAGES)
    assert sum(span.end_ns - span.start_ns for span in stages) == pytest.approx(
        request.end_ns - request.start_ns, abs=len(GATEWAY_STAGES) * STAGE_S_MIN * 1e9
    )
    for span in stages:
        assert request.start_ns - 1000 <= span.start_ns <= span.end_ns <= request.end_ns + 1000


async def test_the_hop_carries_the_trace_and_its_state(open_house: Open, sink: KeptSpans) -> None:
    house = await traced(open_house, sink)
    async with house.chat(headers=SAMPLED) as answer:
        await answer.read()
    await house.line()
    seen = house.engine.seen[-1].headers
    parent = parse_traceparent(seen["traceparent"])
    assert parent is not None
    assert (parent.trace_id, parent.sampled, seen["tracestate"]) == (TRACE_ID, True, "vendor=1")


async def test_a_sampled_request_is_the_exemplar_of_its_buckets(open_house: Open, sink: KeptSpans) -> None:
    house = await open_house(admin={"port": 0})
    async with house.chat(headers={**SAMPLED, "x-request-id": "sampled.1"}) as answer:
        await answer.read()
    async with house.chat(headers={"x-request-id": "unsampled.1"}) as answer:
        await answer.read()
    await house.lines(2)
    metrics = f"http://127.0.0.1:{house.gateway.admin_port}/metrics"
    async with house.client.get(metrics, headers={"accept": "application/openmetrics-text"}) as answer:
        lines = (await answer.text()).splitlines()
    told = [line for line in lines if "sampled.1" in line]
    assert all(f'# {{request_id="sampled.1",trace_id="{TRACE_ID}"}}' in line for line in told)
    names = {line.partition("{")[0] for line in told}
    assert names == {
        "penstock_gateway_first_byte_seconds_bucket",
        "penstock_gateway_request_seconds_bucket",
        "penstock_stage_seconds_bucket",
    }


async def test_only_failures_are_exported_where_nobody_samples(open_house: Open, sink: KeptSpans) -> None:
    house = await traced(open_house, sink)
    async with house.chat() as answer:
        await answer.read()
    async with house.chat(temperature=99) as answer:
        assert answer.status == 400
    await house.lines(2)
    assert not sink.spans
    house.engine.script = refusal(500, "engine_failed")
    async with house.chat() as answer:
        assert answer.status >= 500
    await house.lines(3)
    request, *_ = sink.spans
    assert request.error is not None
    assert request.attributes["error.type"] == request.error
