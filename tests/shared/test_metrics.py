from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.registry import Collector

from shared.metrics import REGISTRY, Counter, Histogram

BOUNDS = (0.1, 0.5, 1, 10)


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


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS), max_size=50))
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


def test_labels_are_as_many_as_were_declared(counter: Counter) -> None:
    with pytest.raises(AssertionError):
        counter.inc("a")
