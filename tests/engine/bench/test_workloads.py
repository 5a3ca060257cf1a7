from __future__ import annotations

import itertools
import random
import statistics

import pytest

from tests.bench.client import TimedRequest
from tests.bench.draft_texts import COUNT, KINDS, texts
from tests.bench.engine import live, workloads
from tests.bench.engine.drafts import _text, _tokens, _used, counted
from tests.bench.engine.live import LIVE, Served
from tests.bench.engine.virtual import Request
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


def test_the_counters_of_drafts_are_read() -> None:
    name = "penstock_engine_drafts_total"
    page = f'{name}{{outcome="right"}} 12.0\n{name}{{outcome="wrong"}} 3\n'
    assert (counted(page, "right"), counted(page, "wrong")) == (12, 3)
    assert counted("# HELP x\n", "right") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_a_kind_are_the_same_every_time_and_differ(kind: str) -> None:
    assert texts(kind) == texts(kind)
    assert len(set(texts(kind))) == COUNT


def test_an_edit_changes_one_line_of_its_file() -> None:
    for question, answer in texts("edits"):
        asked, answered = question.split("\n")[1:-1], answer.rstrip("\n").split("\n")
        assert sum(a != b for a, b in zip(asked, answered, strict=False)) == 1


def test_the_events_of_vllm_and_llama_cpp_are_read() -> None:
    """vLLM sends null for what it does not tell, and its usage in an event without choices."""
    raw = [
        b'data: {"choices":[{"index":0,"text":"ab","logprobs":null,"token_ids":null}],"usage":null}',
        b'data: {"choices":[{"index":0,"text":"c"}],"timings":{"draft_n":2}}',
        b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"details":null}}',
    ]
    exchange = TimedRequest(0.0, events=raw)
    assert (_text(exchange), _used(exchange), _tokens(exchange)) == ("abc", 3, [])
