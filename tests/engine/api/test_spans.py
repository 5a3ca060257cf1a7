"""The engine's spans, under the gateway's."""

from __future__ import annotations

import io

import pytest

from shared.process import logs
from shared.telemetry.tracing import TracePolicy, Tracing
from shared.wire.completed_line import ENGINE_STAGES
from tests import canary_heads as heads
from tests.engine.api.conftest import MODEL, Serve, until
from tests.span_sink import KeptSpans, collecting

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def test_a_sampled_request_is_a_tree_under_the_gateways_span(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = KeptSpans()
    monkeypatch.setattr("engine.api.http.server.tracing_of", lambda *_: Tracing(TracePolicy(), sink))
    async with serve() as served:
        served.says("the lazy dog")
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}", "tracestate": "vendor=1"}
            answer = await served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200
        await served.http.get("/readyz", headers=headers)
        await until(lambda: bool(sink.spans))
        request, *stages = sink.spans
        assert (request.context.trace_id, request.parent_span_id) == (TRACE_ID, SPAN_ID)
        assert (request.name, request.state) == (f"chat {MODEL}", "vendor=1")
        assert int(request.attributes["gen_ai.usage.output_tokens"]) > 0
        assert {span.name for span in stages} <= set(ENGINE_STAGES)
        for span in stages:
            assert span.parent_span_id == request.context.span_id
            assert request.start_ns - 1000 <= span.start_ns <= span.end_ns <= request.end_ns + 1000
    assert sink.is_closed


async def test_no_library_logs_what_is_in_a_head(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans pass through OpenTelemetry's, which logs what it does not take."""
    stream = io.StringIO()
    logs.configure("engine", level="debug", stream=stream)
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
        async with serve() as served:
            told = [
                await heads.answered(served.engine.port, head) for head in heads.heads_with("canary", "k")
            ]
            assert sum(answer.startswith(b"HTTP/1.1 200") for answer in told) > 30, told
        assert len(collector.spans) > 30
    logs.close()
    assert stream.getvalue()
    assert "canary" not in stream.getvalue()


async def test_a_sampled_request_is_the_exemplar_of_its_buckets(serve: Serve) -> None:
    async with serve(vllm_metrics=True) as served:
        served.says("the lazy dog")
        for flags in ("01", "00"):
            headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}", "x-request-id": f"the.{flags}"}
            await served.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        await until(lambda: not served.engine.state._working)
        answer = await served.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
        told = [line for line in answer.text.splitlines() if "the.0" in line]
        assert all(f'# {{request_id="the.01",trace_id="{TRACE_ID}"}}' in line for line in told)
        names = {line.partition("{")[0].removesuffix("_bucket") for line in told}
        assert {
            "penstock_engine_request_seconds",
            "penstock_engine_time_to_first_token_seconds",
            "penstock_engine_time_per_output_token_seconds",
            "penstock_engine_queue_seconds",
            "penstock_stage_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:time_to_first_token_seconds",
            "vllm:request_queue_time_seconds",
        } == names
