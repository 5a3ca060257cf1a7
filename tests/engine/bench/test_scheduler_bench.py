"""The bench runs, says what it should, and can be run again with the same result."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

import pytest

from engine.bench import scheduler
from engine.bench.virtual import Engine, Request, run
from engine.core.cost import StepCost
from shared.cli.bench import BENCHES

COST = StepCost(token_s=1e-3, row_s=1e-3, pair_s=0.0, fixed_s=0.01)


def test_virtual_time_is_the_cost_of_the_steps() -> None:
    done = run([Request(5.0, 100, 3), Request(20.0, 10, 1)], Engine(COST, step_time_target_s=1.0))
    first, second = done.outcomes
    assert first.first_token_s == pytest.approx(0.11)
    assert first.end_s == pytest.approx(0.11 + 2 * 0.011)
    assert first.gap_s_max == pytest.approx(0.011)
    assert second.first_token_s == pytest.approx(0.02)
    assert done.makespan_s == pytest.approx(20.02)
    assert (done.steps, done.bound_use) == (4, 0.0)


@pytest.mark.parametrize("target_s", [0.05, 0.1])
def test_a_long_prompt_does_not_stall_a_stream(target_s: float) -> None:
    """Once the runner's cost is learned, which takes a chunk or two."""
    cost = StepCost(token_s=1e-4, row_s=1e-3, pair_s=2e-9, fixed_s=5e-3)
    warming, stream, long = Request(0.0, 3000, 1), Request(3.0, 100, 300), Request(4.0, 30_000, 1)
    timed = run([warming, stream, long], Engine(cost, step_time_target_s=target_s))
    whole = run([warming, stream, long], Engine(cost, step_time_target_s=math.inf))
    assert timed.outcomes[1].gap_s_max <= 1.1 * target_s
    assert whole.outcomes[1].gap_s_max > 0.2
    assert timed.outcomes[2].first_token_s <= 1.3 * whole.outcomes[2].first_token_s


def test_the_figures_have_the_targets_and_can_be_had_again() -> None:
    bench = scheduler.Bench(count=60, seeds=1)
    figures = bench.figures()
    by_name = {figure.name: figure for figure in figures}
    assert len(by_name) == len(figures)
    assert {name: figure.target for name, figure in by_name.items() if figure.target} == {
        "chat: short TTFT p99 / FIFO's": "<= 0.2",
        "chat: long TTFT p99 / FIFO's": "<= 1.4",
        "chat: makespan / FIFO's": "<= 1.05",
        "chat: use of the bound on waiting": "<= 1",
        "long in short: short TTFT p99 / FIFO's": "<= 0.2",
        "long in short: a stream's longest gap, p99": "<= 110",
        "flood: others' TTFT p99 / without it, penstock": "<= 1.3",
        "KV at 1.2x need: goodput / with room": ">= 0.9",
        "KV at 1.2x need: preemptions of one request, most": "<= 3",
        "heavy tail: use of the bound on waiting": "<= 1",
    }
    assert all(by_name[name].ok for name in by_name if "bound" in name and by_name[name].target)
    assert scheduler.Bench(count=60, seeds=1).figures() == figures


async def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    options = argparse.Namespace(requests=10, seeds=1, plot=tmp_path / "plot.png")
    with pytest.raises(scheduler.BenchFailed, match="matplotlib"):
        await scheduler.run(options)


def test_penstock_bench_knows_it() -> None:
    assert BENCHES["scheduler"][0] == scheduler.__name__
