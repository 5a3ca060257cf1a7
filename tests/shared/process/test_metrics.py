from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.registry import Collector

from shared.process.metrics import REGISTRY, Counter, Gauge, Histogram, registry_of_service
from shared.telemetry.stages import exposition

BOUNDS = (0.125, 0.5, 1, 10)


@pytest.fixture
def counter() -> Iterator[Counter]:
    made = Counter("test_things", "Things.", ("kind", "ok"))
    yield made
    REGISTRY.unregister(made)


def text_of(collector: Collector) -> list[str]:
    """As it is scraped, without when each child was made, which we do not tell."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


def test_a_counter_reads_as_the_librarys(counter: Counter) -> None:
    theirs = TheirCounter("test_things", "Things.", ("kind", "ok"), registry=None)
    for kind, ok, by in (("a", True, 1), ("a", True, 2.5), ('quo"ted\n', 200, 3), ("b", None, 0)):
        counter.inc(kind, ok, by=by)
        theirs.labels(kind, ok).inc(by)
    assert text_of(counter) == text_of(theirs)
    assert REGISTRY.get_sample_value("test_things_total", {"kind": "a", "ok": "True"}) == 3.5


# half-precision values have exact sums: from Python 3.12 on, `sum` rounds less than the library's additions
@given(st.lists(st.floats(0, 100, width=16) | st.sampled_from(BOUNDS), max_size=50))
def test_a_histogram_reads_as_the_librarys(values: list[float]) -> None:
    ours = Histogram("test_seconds", "Seconds.", ("stage",), BOUNDS)
    try:
        theirs = TheirHistogram("test_seconds", "Seconds.", ("stage",), buckets=BOUNDS, registry=None)
        for value in values:
            ours.observe(value, "a")
            theirs.labels("a").observe(value)
        assert text_of(ours) == text_of(theirs)
    finally:
        REGISTRY.unregister(ours)


def test_what_has_no_labels_is_there_before_anything_happened() -> None:
    registry = CollectorRegistry()
    Counter("test_things", "Things.", registry=registry)
    Histogram("test_seconds", "Seconds.", (), BOUNDS, registry=registry)
    gauge = Gauge("test_level", "Level.", registry=registry)
    assert registry.get_sample_value("test_things_total") == 0
    assert registry.get_sample_value("test_seconds_count") == 0
    assert registry.get_sample_value("test_seconds_bucket", {"le": "+Inf"}) == 0
    assert registry.get_sample_value("test_level") == 0
    gauge.set_function(lambda: 2.5)
    assert registry.get_sample_value("test_level") == 2.5


def test_a_services_registry_has_the_processs_metrics_too(counter: Counter) -> None:
    mine, other = registry_of_service(), registry_of_service()
    Counter("test_own", "Of one service.", registry=mine).inc(by=3)
    counter.inc("a", True)
    text = exposition(registry=mine).body.decode()
    assert "test_own_total 3.0" in text
    assert text.count('test_things_total{kind="a",ok="True"} 1.0') == 1
    assert "process_cpu_seconds_total" in text
    for told in (exposition(registry=other), exposition()):
        assert b"test_own" not in told.body


def test_labels_are_as_many_as_were_declared(counter: Counter) -> None:
    with pytest.raises(AssertionError):
        counter.inc("a")
