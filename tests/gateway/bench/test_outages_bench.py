"""`python -m tests.bench outages`: its statistics, and one outage, a short one."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import pytest

from tests.bench.client import ApiServer, TimedRequest
from tests.bench.figures import Figure
from tests.bench.gateway import outages

STRUCK_S, ENDED_S = 100.0, 103.0


def answered(sent_s: float, took_s: float, status: int = 200) -> TimedRequest:
    """One that was sent so long after the outage began."""
    return TimedRequest(STRUCK_S + sent_s, status, ended_at=STRUCK_S + sent_s + took_s)


def look(at_s: float, *, is_ready: bool, is_up: bool) -> outages.Look:
    return outages.Look(STRUCK_S + at_s, is_ready, is_up)


def subject(mode: str = "closed", *requests: TimedRequest) -> outages.Subject:
    one = outages.Subject(mode, ApiServer("http://127.0.0.1"), "", "", operator=None)  # type: ignore[arg-type]
    one.requests += [answered(-1.0, 0.002), answered(-0.5, 0.01), *requests]
    one.looks = [look(3.2, is_ready=True, is_up=True)]
    return one


def test_what_a_request_waits_until_the_recovery_is_compared_with_the_longest_of_before() -> None:
    met, late, usual = answered(0.1, 0.055), answered(0.5, 0.04), answered(0.6, 0.02)
    one = subject("local", met, late, usual, answered(3.1, 0.02), answered(5.0, 1.0))
    seen = outages.seen(one, STRUCK_S, ENDED_S, 0)
    assert seen.longest_beyond_ms == pytest.approx(45)
    assert (seen.slowed, seen.slowed_late) == (2, 1)
    assert seen.requests == 7
    assert seen.recovered_s == pytest.approx(0.2), "the metric's time, which was later"


def test_503_is_stated_for_a_closed_tenant_alone_and_belongs_to_the_outage() -> None:
    refused = answered(1.0, 0.001, 503), answered(4.0, 0.001, 503), answered(2.0, 0.001, 500)
    again = answered(4.5, 0.001)
    closed = outages.seen(subject("closed", *refused, again), STRUCK_S, ENDED_S, 0)
    assert (closed.unstated, closed.without, closed.without_otherwise) == (1, 2, 0)
    assert closed.recovered_s == pytest.approx(1.5), "the first that is served, after the end"
    assert outages.seen(subject("local", *refused, again), STRUCK_S, ENDED_S, 0).unstated == 3
    hiccups = answered(-0.2, 0.001, 503), again, answered(5.0, 0.001, 503)
    assert outages.seen(subject("closed", *hiccups), STRUCK_S, ENDED_S, 0).without_otherwise == 2 / 5
    assert outages.seen(subject("closed"), STRUCK_S, ENDED_S, 0).recovered_s == math.inf


def test_the_probe_must_say_what_the_metric_says() -> None:
    one = subject("closed")
    one.looks = [look(at / 10, is_ready=at < 0, is_up=at < 0) for at in range(-5, 20)]
    assert outages.seen(one, STRUCK_S, ENDED_S, 0).dishonest == 0
    assert outages.seen(one, STRUCK_S, ENDED_S, 0).noticed_s == 0.0
    one.looks[12] = replace(one.looks[12], is_ready=True)
    assert outages.seen(one, STRUCK_S, ENDED_S, 0).dishonest == 1
    one.mode = "local"
    assert outages.seen(one, STRUCK_S, ENDED_S, 0).dishonest == 17, "its tenants are served throughout"


@pytest.mark.nightly
async def test_an_outage_is_measured_at_both_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEFORE_S": 0.3, "AFTER_S": 0.6, "EVENTS": 20, "STREAMS": 2, "RATE": 20}.items():
        monkeypatch.setattr(outages, name, value)
    [full] = [replace(one, seconds=0.3) for one in outages.OUTAGES if one.name == "full"]
    monkeypatch.setattr(outages, "OUTAGES", (full,))
    figures: list[Figure] = await outages.run(argparse.Namespace(only=["full"]))
    values = {figure.name: figure.value for figure in figures}
    for mode in outages.MODES:
        assert values[f"full, {mode}: answers that are not stated"] == 0
        assert values[f"full, {mode}: streams that ended early"] == 0
        assert values[f"full, {mode}: tokens counted otherwise"] == 0
    assert values["full, closed: answers 503"]
