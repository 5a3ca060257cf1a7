"""The table of targets, from the results file: measured figures, and rows that were not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench import figures
from tests.bench.engine.gpu.results import Line
from tests.bench.figures import Figure, at_least, at_most, figure, unmeasured

LLAMA, QWEN, HYBRID = "Llama-3.1-8B", "Qwen3-0.6B", "Qwen3.5-0.8B"


@dataclass(frozen=True, slots=True)
class Target:
    what: str
    rows: tuple[str, ...]
    """The names of the rows in the results file that the figure is computed from."""
    bound: figures.Target
    unit: str
    value: Callable[[Sequence[Line]], float]


def only(field: str) -> Callable[[Sequence[Line]], float]:
    """Reads a target's value from a field of its only row."""
    return lambda lines: float(lines[0][field])


def speedup(lines: Sequence[Line]) -> float:
    slow, fast = lines
    return float(slow["ms"] / fast["ms"])


def decode(model: str, batch: int) -> str:
    return f"decode {model} batch {batch} context 2048"


def _steps() -> Iterator[Target]:
    for model, batch, least in (
        (LLAMA, 1, 0.85),
        (LLAMA, 32, 0.85),
        (LLAMA, 256, 0.85),
        (QWEN, 1, 0.50),
        (QWEN, 256, 0.85),
        (HYBRID, 1, 0.50),
        (HYBRID, 32, 0.70),
    ):
        what = f"decode step, {model}, 2k, batch {batch}"
        yield Target(what, (decode(model, batch),), at_least(least), "of the floor", only("share"))
    what, row = "paged decode attention, batch 32, 4k", "decode attention batch 32 context 4096"
    yield Target(what, (row,), at_least(0.88), "of read bandwidth", only("share"))
    what, row = "step of a delta net, batch 32", "delta net step batch 32"
    yield Target(what, (row,), at_least(0.80), "of read bandwidth", only("share"))
    for tokens, name in ((2048, "2k"), (8192, "8k")):
        what, row = f"prefill, {LLAMA}, {name}", f"prefill {LLAMA} {tokens}"
        yield Target(what, (row,), at_least(0.75), "of the matrix rate", only("share"))


TARGETS: Final = (
    *_steps(),
    Target(
        "GPU idle between decode steps, batch 32",
        ("engine idle batch 32",),
        at_most(0.02),
        "of the time",
        only("idle"),
    ),
    Target(
        f"whole engine, 256 requests, {QWEN}",
        (f"engine 256 requests {QWEN}",),
        at_least(0.75),
        "of the floor",
        only("share"),
    ),
    Target(
        f"fp8 weights, {LLAMA}, batch 1, against bf16",
        (decode(LLAMA, 1), decode(f"{LLAMA} fp8", 1)),
        at_least(1.65),
        "times",
        speedup,
    ),
    Target(
        "worst gap of 32 streams beside a 4k prompt, 8B",
        ("engine 4k prompt beside 32 streams",),
        at_most(100.0),
        "ms",
        only("gap_max_ms"),
    ),
    Target(
        "sampling a flat row, 152k tokens",
        ("sampling flat rows 1",),
        at_most(1.0),
        "ms",
        only("ms"),
    ),
    Target("start to ready, 8B", ("engine start 8B",), at_most(30.0), "s", only("ready_s")),
    Target(
        "start to ready, 8B, without the kernel cache",
        ("engine start 8B, kernels compiled anew",),
        at_most(30.0),
        "s",
        only("ready_s"),
    ),
)


def table(lines: Iterable[Line]) -> list[Figure]:
    """Every target beside its results."""
    checked = {line["row"]: line for line in lines if "ok" in line}
    good = {row: line for row, line in checked.items() if line["ok"]}
    found = []
    for target in TARGETS:
        own = [good[row] for row in target.rows if row in good]
        if len(own) < len(target.rows):
            found.append(unmeasured(target.what, target.unit, target.bound))
        else:
            found.append(figure(target.what, target.value(own), target.unit, target.bound))
    return found


def failures(lines: Iterable[Line]) -> list[str]:
    """The rows that failed when they were last tried, each with its error."""
    checked = {line["row"]: line for line in lines if "ok" in line}
    return [
        " | ".join([f"{row}: {line['error']}", *line.get("at", [])])
        for row, line in checked.items()
        if not line["ok"]
    ]
