"""Waits and gaps as a picture, when matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shared.process.build import DISTRIBUTION
from tests.bench.engine.virtual import Run
from tests.bench.engine.workloads import CHAT, TRACE
from tests.bench.streams import BenchFailed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_MAX: Final = 2000
"""Points of one curve."""
_WORKLOADS: Final = {workload.name: workload for workload in (CHAT, TRACE)}


def check() -> None:
    """Raise BenchFailed when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchFailed(f"--plot needs matplotlib: pip install '{DISTRIBUTION}[bench]'")


def draw(runs_of: Mapping[str, Mapping[str, Sequence[Run]]], path: Path) -> None:
    """Write the picture as PNG to `path`."""
    picture(runs_of).savefig(path, format="png", dpi=120)


def picture(runs_of: Mapping[str, Mapping[str, Sequence[Run]]]) -> Figure:
    """The distributions of waits for short and for long prompts, and of gaps in streams, as the share above
    each value: a row for each workload, a curve for each discipline. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 4.0 * len(runs_of)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs_of), 3, squeeze=False)
    for row, (name, by_discipline) in zip(rows, runs_of.items(), strict=True):
        short, long, gaps = row
        workload = _WORKLOADS[name]
        for discipline, runs in by_discipline.items():
            outcomes = [outcome for run in runs for outcome in run.outcomes]
            _curve(short, discipline, [o.first_token_s for o in outcomes if workload.is_short(o.request)])
            _curve(long, discipline, [o.first_token_s for o in outcomes if workload.is_long(o.request)])
            _curve(gaps, discipline, [gap_s for o in outcomes for gap_s in o.gaps_s])
        up_to, from_on = workload.short_len_max, workload.long_len_min
        _label(short, f"{name}: prompts of up to {up_to} tokens", "time to first token, s")
        _label(long, f"{name}: prompts of {from_on} tokens and more", "time to first token, s")
        _label(gaps, f"{name}: gaps in streams", "time between two tokens, s")
    return figure


def _curve(axes: Axes, name: str, values: Sequence[float]) -> None:
    ordered = sorted(values)
    every = max(1, len(ordered) // POINTS_MAX)
    tail = [*range(0, len(ordered), every), *range(max(0, len(ordered) - every), len(ordered))]
    axes.plot([ordered[i] for i in tail], [1 - i / len(ordered) for i in tail], label=name)


def _label(axes: Axes, title: str, x: str) -> None:
    axes.set(title=title, xlabel=x, ylabel="share above", xscale="log", yscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
