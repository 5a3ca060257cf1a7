"""How a row is measured, on the current CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.bench.gpu.results import write


def check(part: str, row: str, run: Callable[[], Mapping[str, Any]]) -> bool:
    """Run one check; what it raises is its result, and the next one still runs. CUDA errors end the process:
    nothing after them can be believed."""
    try:
        found = run()
    except (
        Exception
    ) as error:  # a compiler's, a library's of another version: whatever it is, it is this row's
        write(part, row, ok=False, error=f"{type(error).__name__}: {error}"[:600])
        if isinstance(error, torch.AcceleratorError):
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises where the device is lost, whoever was the first to be told
        return False
    write(part, row, ok=True, **found)
    return True


def graph_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """The mean time of one of many runs, captured and replayed, so that the host plays no part."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # what `run` reads may still be on its way
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return span_ms(graph.replay, repetitions)


def span_ms(run: Callable[[], object], repetitions: int = 20) -> float:
    """The mean time of one of many runs behind each other."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repetitions):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repetitions
