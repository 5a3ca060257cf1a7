from __future__ import annotations

import itertools
import random
import statistics

import pytest

from tests.bench.engine import workloads
from tests.bench.engine.workloads import CHAT, TRACE
from tests.bench.figures import quantile

DRAWN = 20_000


@pytest.mark.parametrize(
    ("percentiles", "mean"), [(workloads.TRACE_PROMPT_LENS, 830), (workloads.TRACE_OUTPUT_LENS, 271)]
)
def test_the_traces_lengths_have_the_percentiles_and_the_means_that_are_published(
    percentiles: workloads.Percentiles, mean: float
) -> None:
    draw, rng = workloads.drawn_from(percentiles), random.Random(1)
    lens = [draw(rng) for _ in range(DRAWN)]
    assert statistics.mean(lens) == pytest.approx(mean, rel=0.03)
    for at, length in percentiles[1:-1]:
        assert quantile(lens, at) == pytest.approx(length, rel=0.06)
    assert min(lens) >= percentiles[0][1]
    assert max(lens) <= percentiles[-1][1]


def test_the_trace_comes_in_bursts_and_at_the_rate_that_was_asked_for() -> None:
    for workload, variation in ((CHAT, 1.0), (TRACE, 2**0.5)):
        requests = workload.traffic(1, DRAWN, 5.0)
        gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(requests)]
        assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)


def test_traffic_is_reproducible_from_its_seed() -> None:
    assert TRACE.traffic(3, 50, 1.0) == TRACE.traffic(3, 50, 1.0)
    assert TRACE.traffic(3, 50, 1.0) != TRACE.traffic(4, 50, 1.0)
