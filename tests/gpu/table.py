"""The table of targets, from the results file: what was measured, and what was not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.gpu.results import keep, read

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    rows: tuple[str, ...]
    """Of the results file. None: there is no measurement yet."""
    target: float
    share: Callable[[list[Line]], float]
    unit: str = "of the floor"


def own_share(lines: list[Line]) -> float:
    return float(lines[0]["share"])


def speedup(lines: list[Line]) -> float:
    slow, fast = lines
    return float(slow["ms"] / fast["ms"])


def decode(model: str, batch: int) -> str:
    return f"decode {model} batch {batch} context 2048"


TARGETS = (
    *(
        Target(f"decode step, Llama-3.1-8B, 2k, batch {b}", (decode("Llama-3.1-8B", b),), 0.85, own_share)
        for b in (1, 32, 256)
    ),
    Target("decode step, Qwen3-0.6B, 2k, batch 1", (decode("Qwen3-0.6B", 1),), 0.60, own_share),
    Target("decode step, Qwen3-0.6B, 2k, batch 256", (decode("Qwen3-0.6B", 256),), 0.80, own_share),
    Target(
        "paged decode attention, batch 32, 4k",
        ("decode attention batch 32 context 4096",),
        0.85,
        own_share,
        "of read bandwidth",
    ),
    Target("prefill, 8B, 2k", ("prefill Llama-3.1-8B 2048",), 0.70, own_share, "of the matrix rate"),
    Target("prefill, 8B, 8k", ("prefill Llama-3.1-8B 8192",), 0.70, own_share, "of the matrix rate"),
    Target(
        "fp8 weights, 8B, batch 1, against bf16",
        (decode("Llama-3.1-8B", 1), decode("Llama-3.1-8B fp8", 1)),
        1.6,
        speedup,
        "times",
    ),
    Target("GPU idle between decode steps, batch 32", (), 0.02, own_share, "at most"),
    Target("whole engine, 256 requests, Qwen3-0.6B", (), 0.75, own_share),
    Target("start to ready, 8B", (), 30.0, own_share, "s at most"),
)


def main() -> int:
    # The last word on a row counts: a part may have been run again.
    checked = {line["row"]: line for line in read() if "ok" in line}
    latest = {row: line for row, line in checked.items() if line["ok"]}
    failed = [line for line in checked.values() if not line["ok"]]
    print(f"{'what':50} {'measured':>14} {'target':>8}")
    for target in TARGETS:
        lines = [latest[row] for row in target.rows if row in latest]
        measured = target.share(lines) if target.rows and len(lines) == len(target.rows) else None
        said = "not measured" if measured is None else f"{measured:.2f}"
        print(f"{target.what:50} {said:>14} {target.target:8.2f} {target.unit}")
        value = "not measured" if measured is None else measured
        keep("table", target.what, measured=value, target=target.target, unit=target.unit)
    print(f"{len(failed)} checks failed" + "".join(f"\n  {line['row']}: {line['error']}" for line in failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
