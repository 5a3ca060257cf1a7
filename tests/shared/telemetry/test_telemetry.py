from __future__ import annotations

import re

import pytest

from shared.process.metrics import REGISTRY
from shared.telemetry import stages as telemetry
from shared.telemetry.stages import Stages, TraceContext, parse_traceparent
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
    text = telemetry.exposition().body.decode()
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


@pytest.mark.parametrize(
    "value",
    [
        "vendor=opaque",
        "a=1, b@c=2",
        "ot=th:8",
        "a=1,,b= 2 3\t",
        "0a@b=~!",
        ",".join(f"a{i}=1" for i in range(32)),
    ],
)
def test_a_tracestate_goes_with_its_traceparent(value: str) -> None:
    assert Stages("svc", traceparent=GOOD, tracestate=value).state == value
    assert not Stages("svc", tracestate=value).state, "a new trace has none"


@pytest.mark.parametrize(
    "value",
    [
        *("", "=x", "a=\r\nx: y", "a=" + "x" * 511, "Ä=1", ",", "a", "a=", "a=b=c", "a=1,a=2", "A=1", "0a=1"),
        "a=" + "x" * 256 + ",b=" + "x" * 256,  # longer than all of it may be
        *("a=" + "x" * 257, "a b=1", "a@b@c=1", "a=\x7f", ",".join(f"a{i}=1" for i in range(33))),
    ],
)
def test_a_tracestate_that_is_none_is_left_out(value: str) -> None:
    assert not Stages("svc", traceparent=GOOD, tracestate=value).state


def test_visits_have_their_places_on_the_clock() -> None:
    clock = VirtualClock()
    stages, began_s = Stages("svc", clock), VirtualClock().monotonic()
    stages.enter("connect")
    clock.advance(1)
    with stages("validate"):
        clock.advance(0.5)
    stages.enter("settle")
    clock.advance(2)
    end_s = stages.enter("settle")
    stages.carve("connect", {"prefill": 0.5, "queue": 0.25})
    order = ("queue", "prefill")
    found = [(name, begin_s - began_s, took_s) for name, begin_s, took_s in stages.visits(end_s, order)]
    assert found == [
        ("queue", 0, 0.25),
        ("prefill", 0.25, 0.5),
        ("connect", 0.75, 0.75),
        ("settle", 1.5, 2.0),
        ("validate", 1.0, 0.5),
    ]
