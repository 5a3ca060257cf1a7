"""The live bench: its traffic, and what it makes of the times that it took."""

from __future__ import annotations

import pytest

from tests.bench.engine import live
from tests.bench.engine.live import LIVE, Served
from tests.bench.engine.virtual import Request

SHORT, LONG = Request(0.0, 50, 16), Request(0.0, 1000, 32)


def test_exact_shares_have_the_exact_number_of_requests() -> None:
    requests = LIVE.traffic(1, 200, 10.0)
    assert sum(LIVE.is_long(request) for request in requests) == 30
    assert len(requests) == 200


def test_ratios_are_penstocks_over_fifos() -> None:
    fifo = [[Served(SHORT, 2.0, 10.0, [0.1]), Served(LONG, 4.0, 20.0, [0.2])]]
    ours = [[Served(SHORT, 0.2, 9.0, [0.1]), Served(LONG, 6.0, 21.0, [0.1])]]
    by_name = {figure.name: figure for figure in live.figures(5.0, fifo, ours)}
    assert by_name["live: short TTFT p99 / FIFO's"].value == pytest.approx(0.1)
    assert by_name["live: short TTFT p99 / FIFO's"].ok
    assert by_name["live: long TTFT p99 / FIFO's"].value == pytest.approx(1.5)
    assert not by_name["live: long TTFT p99 / FIFO's"].ok
    assert by_name["live: makespan / FIFO's"].value == pytest.approx(1.05)
    assert by_name["live: gap p99 / FIFO's"].value == pytest.approx(0.5)
    assert by_name["live: short TTFT p99, penstock"].value == pytest.approx(200.0)
