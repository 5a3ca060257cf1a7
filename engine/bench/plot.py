"""Waits as a picture, when matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.bench.virtual import Run
from shared.bench.streams import BenchFailed


def check() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchFailed("--plot needs matplotlib: pip install matplotlib")


def draw(runs_of: Mapping[str, Sequence[Run]], path: Path) -> None:
    """The share of requests that waited longer, over the time to their first token."""
    from matplotlib.figure import Figure

    lens = sorted({o.request.prompt_len for runs in runs_of.values() for run in runs for o in run.outcomes})
    figure = Figure(figsize=(5.0 * len(lens), 4.0), layout="constrained")
    for axes, prompt_len in zip(figure.subplots(1, len(lens), squeeze=False)[0], lens, strict=True):
        for name, runs in runs_of.items():
            waits = sorted(
                o.first_token_s for run in runs for o in run.outcomes if o.request.prompt_len == prompt_len
            )
            above = [1 - i / len(waits) for i in range(len(waits))]
            axes.plot(waits, above, label=name)
        axes.set(
            title=f"prompts of {prompt_len} tokens",
            xlabel="time to first token, s",
            ylabel="share that waited longer",
            xscale="log",
            yscale="log",
        )
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
