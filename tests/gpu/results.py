"""The results file: one JSON object per line, written as soon as it is known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def path() -> Path:
    return Path(os.environ["PENSTOCK_GPU_RESULTS"])


def write(part: str, row: str, **fields: Any) -> None:
    """Keep and show. `row` names what was checked or measured; it is how the table finds it."""
    print(keep(part, row, **fields))


def keep(part: str, row: str, **fields: Any) -> str:
    line = json.dumps({"part": part, "row": row, **fields})
    with path().open("a") as file:
        file.write(line + "\n")
    return line


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in path().read_text().splitlines()] if path().exists() else []


def check(part: str, row: str, run: Callable[[], dict[str, Any]]) -> bool:
    """Run one check; what it raises is its result, and the next one still runs. CUDA errors end the process:
    nothing after them can be believed."""
    try:
        found = run()
    except (AssertionError, RuntimeError, ValueError) as error:
        write(part, row, ok=False, error=f"{type(error).__name__}: {error}"[:600])
        if isinstance(error, torch.AcceleratorError):
            raise
        return False
    write(part, row, ok=True, **found)
    return True


def floors() -> tuple[float, float]:
    """(bytes per second, operations per second) that this card was measured to do."""
    found = [line for line in read() if line["part"] == "floors" and line["row"] == "card"]
    assert found, "the part `floors` has to run first"
    return found[-1]["read_bytes_per_s"], found[-1]["bf16_flops"]


def graph_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """The mean time of one of many runs, captured and replayed, so that the host plays no part."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return span_ms(graph.replay, repetitions)


def span_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repetitions):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repetitions
