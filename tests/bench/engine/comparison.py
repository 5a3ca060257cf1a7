"""The six figures of one discipline under one workload that a user or an operator would ask for, and those of
several disciplines side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.core.estimate.cost import StepCost
from tests.bench.engine.virtual import Outcome, Request, Run
from tests.bench.engine.workloads import Workload
from tests.bench.figures import Figure, figure, quantile

GOOD_WAIT_S: Final = 1.0
GOOD_WAIT_SERVICES: Final = 10.0
GOOD_GAP_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Measures:
    """The figures of one discipline under one workload, over all seeds."""

    short_ttft_p99_s: float
    long_ttft_p99_s: float
    makespan_s: float
    """The time until the last answer has ended, summed over all seeds, in seconds."""
    gap_p99_s: float
    """The 99th percentile of the times between two tokens of a stream, over all streams, in seconds."""
    preemptions: float
    """Preemptions of a request, on average."""
    goodput_per_s: float
    """Requests served well: the first token came within a second, or within ten times what its prompt takes
    alone, and no token came later than 200 ms after the one before."""


def measure(workload: Workload, runs: Sequence[Run], cost: StepCost) -> Measures:
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    makespan_s = sum(run.makespan_s for run in runs)
    return Measures(
        short_ttft_p99_s=ttft_p99(runs, workload.is_short),
        long_ttft_p99_s=ttft_p99(runs, workload.is_long),
        makespan_s=makespan_s,
        gap_p99_s=quantile([gap_s for outcome in outcomes for gap_s in outcome.gaps_s], 0.99),
        preemptions=sum(outcome.preemptions for outcome in outcomes) / len(outcomes),
        goodput_per_s=sum(_is_good(outcome, cost) for outcome in outcomes) / makespan_s,
    )


def ttft(runs: Iterable[Run], chosen: Callable[[Request], bool], q: float) -> float:
    """The quantile `q` of the times to first token of all chosen requests, in seconds."""
    return quantile([o.first_token_s for run in runs for o in run.outcomes if chosen(o.request)], q)


def ttft_p99(runs: Iterable[Run], chosen: Callable[[Request], bool]) -> float:
    return ttft(runs, chosen, 0.99)


def _is_good(outcome: Outcome, cost: StepCost) -> bool:
    patience_s = max(GOOD_WAIT_S, GOOD_WAIT_SERVICES * cost.service_s(outcome.request.prompt_len))
    return outcome.first_token_s <= patience_s and outcome.gap_s_max <= GOOD_GAP_S


_COLUMNS: Final[Sequence[tuple[str, str, str, float]]] = (
    ("short_ttft_p99_s", "short TTFT p99", "s", 1.0),
    ("long_ttft_p99_s", "long TTFT p99", "s", 1.0),
    ("makespan_s", "makespan", "s", 1.0),
    ("gap_p99_s", "gap p99", "ms", 1e3),
    ("preemptions", "preemptions", "/request", 1.0),
    ("goodput_per_s", "goodput", "requests/s", 1.0),
)
"""Attribute, title, unit, and the factor by which the attribute is multiplied."""


def figures(workload: str, by_name: Mapping[str, Measures]) -> list[Figure]:
    return [
        figure(f"{workload}: {title}, {name}", getattr(measures, attribute) * scale, unit)
        for attribute, title, unit, scale in _COLUMNS
        for name, measures in by_name.items()
    ]


def markdown(tables: Mapping[str, Mapping[str, Measures]]) -> str:
    """The measures as Markdown: a table for each workload, a row for each discipline."""
    lines: list[str] = []
    for workload, by_name in tables.items():
        titles = [workload, *(f"{title}, {unit}" for _, title, unit, _ in _COLUMNS)]
        lines += ["| " + " | ".join(titles) + " |", "|---" + "|---:" * len(_COLUMNS) + "|"]
        for name, measures in by_name.items():
            values = [f"{getattr(measures, attribute) * scale:.3g}" for attribute, _, _, scale in _COLUMNS]
            lines.append("| " + " | ".join([name, *values]) + " |")
        lines.append("")
    return "\n".join(lines)
