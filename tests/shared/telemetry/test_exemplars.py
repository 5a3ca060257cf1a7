"""Exemplars: the requests that stand for those in a bucket, and the format that has them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar as ShownExemplar

from gateway.workers.metrics import Snapshot, decode, encode, merged, registry_of, retired, snapshot
from shared.process.metrics import Counter, Exemplar, Gauge, Histogram
from shared.telemetry.stages import Stages, exposition
from shared.telemetry.tracing import TracePolicy, Tracing
from shared.wire.ids import RequestId
from tests.fakes import VirtualClock
from tests.span_sink import KeptSpans

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
LONGEST_ID = "r" * 64


def seen(number: int, at_s: float = 1_700_000_000.5) -> Exemplar:
    return Exemplar(f"{number:032x}", f"request-{number}", at_s)


def exemplars(registry: CollectorRegistry) -> dict[tuple[str, str], ShownExemplar]:
    """The exemplars in a scrape by series and bound, as a reader of the format sees them."""
    told = exposition(OPENMETRICS, registry)
    assert told.content_type.startswith("application/openmetrics-text; version=1.0.0")
    return {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in text_string_to_metric_families(told.body.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }


def histogram(registry: CollectorRegistry) -> Histogram:
    return Histogram("penstock_seconds", "Time.", (), (1, 2), registry=registry)


def test_a_bucket_shows_its_newest_request() -> None:
    registry = CollectorRegistry()
    seconds = histogram(registry)
    seconds.observe(0.5)
    seconds.observe(1.0, exemplar=seen(1))
    seconds.observe(1.5, exemplar=seen(2))
    seconds.observe(1.6, exemplar=seen(3, 1_700_000_001.25))
    seconds.observe(99.0, exemplar=Exemplar(TRACE_ID, LONGEST_ID, 1_700_000_002.0))
    found = exemplars(registry)
    assert {le: one.labels["request_id"] for (_, le), one in found.items()} == {
        "1.0": "request-1",
        "2.0": "request-3",
        "+Inf": LONGEST_ID,
    }
    of_two = found["penstock_seconds_bucket", "2.0"]
    assert (of_two.value, of_two.labels["trace_id"]) == (1.6, f"{3:032x}")
    assert of_two.timestamp is not None
    assert float(of_two.timestamp) == 1_700_000_001.25
    assert b"request-1" not in exposition("text/plain", registry).body, "no reader knows them there"


def test_stages_of_one_request_have_it_each() -> None:
    registry = CollectorRegistry()
    stages = Histogram("penstock_stages", "Time.", ("service", "stage"), (1,), registry=registry)
    stages.observe_all(("auth", "wait"), (0.5, 7.0), "gateway", exemplar=seen(1))
    stages.observe_all(("auth", "wait"), (0.6, 0.2), "gateway")
    lines = exposition(OPENMETRICS, registry).body.decode().splitlines()
    assert [line.split(" ")[0] for line in lines if "request-1" in line] == [
        'penstock_stages_bucket{le="1.0",service="gateway",stage="auth"}',
        'penstock_stages_bucket{le="+Inf",service="gateway",stage="wait"}',
    ]


def test_of_several_workers_the_newest_is_shown_and_outlives_its_worker() -> None:
    def told(number: int, at_s: float) -> Snapshot:
        registry = CollectorRegistry()
        histogram(registry).observe(1.5, exemplar=seen(number, at_s))
        return decode(encode(snapshot(registry)))

    older, newer = told(1, 1_700_000_000.0), told(2, 1_700_000_009.0)
    for alive in ({"0": older, "1": newer}, {"0": newer, "1": older}):
        [one] = exemplars(registry_of(merged(alive, []))).values()
        assert one.labels["request_id"] == "request-2"
    [one] = exemplars(registry_of(merged({"0": older}, retired([], newer)))).values()
    assert one.labels["request_id"] == "request-2"


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        (OPENMETRICS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan", False),
        ("application/openmetrics-text;q=0.3, text/plain;q=0.6", False),
        ("Application/OpenMetrics-Text; version=1.0.0; Q=0.9", True),
        ("application/vnd.google.protobuf;q=0.7," + OPENMETRICS, True),
        ("," * 100_000 + "application/openmetrics-text", False),
        (";;q=;=,;", False),
    ],
)
def test_the_format_is_what_the_scraper_prefers(accept: str | None, is_openmetrics: bool) -> None:
    told = exposition(accept, CollectorRegistry())
    assert told.body.endswith(b"# EOF\n") == is_openmetrics == ("openmetrics" in told.content_type)


def test_a_name_with_a_colon_is_the_same_in_both_formats() -> None:
    registry = CollectorRegistry()
    Counter("vllm:tokens", "Tokens.", registry=registry).inc(by=2)
    Gauge("vllm:running", "Running.", registry=registry)
    for accept in (None, OPENMETRICS):
        lines = exposition(accept, registry).body.decode().splitlines()
        assert {"vllm:tokens_total 2.0", "vllm:running 0.0"} <= {*lines}


@pytest.mark.parametrize(
    ("flags", "ratio", "seconds", "failed", "has_sink", "is_shown"),
    [
        ("01", 0.0, 0.1, False, False, True),  # its caller keeps the trace
        ("00", 1.0, 0.1, False, True, False),  # its caller does not, and decides
        (None, 1.0, 0.1, False, True, True),
        (None, 1.0, 0.1, False, False, False),
        (None, 0.0, 0.1, False, True, False),
        (None, 0.0, 9.0, False, True, True),
        (None, 0.0, 0.1, True, True, True),
        (None, 0.0, 9.0, True, False, False),
    ],
)
def test_a_request_is_an_exemplar_where_its_trace_can_be_found(
    flags: str | None, ratio: float, seconds: float, failed: bool, has_sink: bool, is_shown: bool
) -> None:
    policy = TracePolicy(ratio=ratio, errors=True, slow_s=5.0)
    tracing = Tracing(policy, KeptSpans() if has_sink else None)
    parent = None if flags is None else f"00-{TRACE_ID}-00f067aa0ba902b7-{flags}"
    stages = Stages("gateway", VirtualClock(), traceparent=parent, samples=tracing.samples)
    exemplar = tracing.exemplar(stages, RequestId("the-id"), seconds, failed=failed)
    assert (exemplar is not None) == is_shown
    if exemplar is not None:
        assert (exemplar.trace_id, exemplar.request_id) == (stages.trace.trace_id, "the-id")
