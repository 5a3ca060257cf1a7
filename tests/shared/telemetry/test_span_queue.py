"""The queue of spans: bounded, whoever receives them, and in a trace as OTLP's receivers see it."""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shared.process import logs
from shared.process.metrics import REGISTRY
from shared.process.setting_values import ConfigError
from shared.telemetry.otlp import tracing_of
from shared.telemetry.span_queue import BATCH_MAX, QUEUE_MAX, SpanQueue
from shared.telemetry.stages import TraceContext
from shared.telemetry.tracing import NO_TRACING, Span, TracingConfig, spans_of
from tests.fakes import VirtualClock
from tests.shared.telemetry.test_tracing import LINE, SPAN_ID, TRACE_ID, walked
from tests.span_sink import Collector, collecting
from tests.waiting import PATIENCE_S


def span(number: int) -> Span:
    return Span("s", TraceContext(TRACE_ID, f"{number + 1:016x}", True), None, "", 1, 2)


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("penstock_spans_total", {"outcome": outcome}) or 0.0


def test_spans_are_sent_in_batches_in_their_order() -> None:
    sent: list[Span] = []

    def send(spans: Sequence[Span]) -> bool:
        assert len(spans) <= BATCH_MAX
        sent.extend(spans)
        return True

    before, queue = counted("sent"), SpanQueue(send)
    spans = [span(i) for i in range(BATCH_MAX + 3)]
    queue.put(spans)
    queue.close()
    assert sent == spans
    assert counted("sent") - before == len(spans)


def test_a_receiver_that_hangs_costs_the_queue_and_nothing_else() -> None:
    hangs, entered = threading.Event(), threading.Event()

    def send(spans: Sequence[Span]) -> bool:
        entered.set()
        return hangs.wait(PATIENCE_S)

    before, queue = counted("dropped"), SpanQueue(send, queue_max=8, interval_s=0.001)
    queue.put([span(0)])
    assert entered.wait(PATIENCE_S)
    for i in range(20):
        queue.put([span(i)])
    assert counted("dropped") - before == 12
    hangs.set()
    queue.close()
    queue.put([span(0)])
    assert counted("dropped") - before == 13, "nothing is taken after the end"


def test_more_spans_than_may_wait_are_dropped() -> None:
    before, queue = counted("dropped"), SpanQueue(lambda spans: True)
    queue.put([span(0)] * (QUEUE_MAX + 1))
    assert counted("dropped") - before == QUEUE_MAX + 1
    queue.close()


def test_a_receiver_that_fails_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[bool | OSError] = iter([False, OSError("away"), True])
    done = threading.Semaphore(0)

    def send(spans: Sequence[Span]) -> bool:
        try:
            answer = next(answers)
            if isinstance(answer, OSError):
                raise answer
            return answer
        finally:
            done.release()

    said: list[str] = []
    from shared.telemetry import span_queue

    def warned(event: str, problem: str) -> None:
        assert problem, "it says what is wrong, also where the library does not raise"
        said.append(event)

    monkeypatch.setattr(span_queue.log, "warning", warned, raising=False)
    monkeypatch.setattr(span_queue.log, "info", said.append, raising=False)
    before, queue = counted("failed"), SpanQueue(send, interval_s=0.001)
    for i in range(3):
        queue.put([span(i)])
        assert done.acquire(timeout=PATIENCE_S)
    queue.close()
    assert counted("failed") - before == 2
    assert said == ["spans.not_taken", "spans.sent_again"]


# -- as a collector sees it -----------------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure("tests", stream=stream)
    yield stream
    logs.close()


def test_a_collector_gets_the_tree_with_its_links_and_errors(collector: Collector) -> None:
    tracing = tracing_of(TracingConfig(endpoint=collector.url), "penstock-gateway", {})
    stages = walked(VirtualClock(wall=1000.0))
    line = {**LINE, "error_code": "upstream_failed"}
    assert tracing._sink is not None
    tracing._sink.put(spans_of(stages, stages.began_s, 2.5, line))
    tracing.close()
    [request] = collector.requests
    attributes = {a.key: a.value.string_value for a in request.resource_spans[0].resource.attributes}
    assert attributes["service.name"] == "penstock-gateway"
    root, first, second, _ = collector.spans
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert (root.trace_state, root.kind, root.status.code) == ("v=1", 2, 2)
    assert first.parent_span_id == second.parent_span_id == root.span_id
    assert [link.span_id for link in second.links] == [first.span_id]
    assert (second.start_time_unix_nano, second.end_time_unix_nano) == (1001 * 10**9, 1001_500_000_000)


def test_the_environment_turns_the_export_on(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    tracing = tracing_of(TracingConfig(), "penstock-engine", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "x"})
    stages = walked(VirtualClock())
    tracing.ended(stages, stages.began_s, 2.5, failed=False, line=lambda: LINE)
    tracing.close()
    [request] = collector.requests
    attributes = {a.key: a.value.string_value for a in request.resource_spans[0].resource.attributes}
    assert attributes["service.name"] == "ours"


@pytest.mark.parametrize(
    "off", [{"OTEL_SDK_DISABLED": "True"}, {"OTEL_TRACES_EXPORTER": "none"}], ids=["disabled", "none"]
)
def test_the_environment_turns_any_export_off(off: dict[str, str], collector: Collector) -> None:
    for config in (TracingConfig(), TracingConfig(endpoint=collector.url)):
        on = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        assert tracing_of(config, "svc", on | off) is NO_TRACING


def test_an_address_for_grpc_is_named_and_not_posted_to(log: io.StringIO, collector: Collector) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert tracing_of(TracingConfig(), "svc", env) is NO_TRACING
    assert "gRPC" in said(log)
    for more in (env | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, env):
        endpoint = collector.url if more is env else None  # what the file says is a URL for HTTP
        tracing = tracing_of(TracingConfig(endpoint=endpoint), "svc", more)
        assert tracing is not NO_TRACING
        tracing.close()


def said(log: io.StringIO) -> str:
    """The line about an export that the environment asks for, and that is none."""
    logs.close()
    [line] = [line for line in log.getvalue().splitlines() if "spans.not_exported" in line]
    return line


def test_without_an_address_there_is_none_and_without_the_extra_it_is_said(
    monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    assert tracing_of(TracingConfig(ratio=1.0), "svc", {}) is NO_TRACING
    known = builtins.__import__

    def blocked(name: str, *args: Any, **named: Any) -> Any:
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")):
            raise ImportError(name)
        return known(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ConfigError, match=r"penstock-llm\[otel\]"):
        tracing_of(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"), "svc", {})
    assert tracing_of(TracingConfig(), "svc", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}) is NO_TRACING
    assert "penstock-llm[otel]" in said(log), "a platform sets it for all that it runs"
