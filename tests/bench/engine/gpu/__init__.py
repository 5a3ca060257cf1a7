"""Measures a card against its own limits: decode steps, attention and prefill of true shapes, with random
weights.

    floors     the best rates of this card: read-only bandwidth over a buffer far larger than its cache, and
               the rate of a large bf16 product of random numbers. Every share is of these two, so a result
               means the same on another card, without a datasheet.
    attention  attention alone: paged decode, bytes of keys and values over time, by every back end that is
               installed; whole prompts by the library's kernels and the engine's. And delta nets alone: a
               step, bytes of states over time, and prompts.
    matmul     the library against the engine's tiles, per shape of the two models, weights not in the cache.
    steps      decode steps and prefills, as graphs where they decode; fp8 weights and KV against bf16.
    profile    the same decode steps kernel by kernel, with the time in which nothing runs.

Theory of the floors. A decode step of batch B at context L must read its weights once and B contexts of keys
and values, and multiply 2 P numbers per row:
    max(W / bandwidth, 2 P B / rate) + B L kv / bandwidth
With delta nets it reads and writes B states beside. Where each row verifies k drafts it multiplies B (k + 1)
rows, and reads weights and contexts once as without.
A prefill of L tokens multiplies 2 P numbers per token, and its attention 2 Hq D L per layer and token, half
of the square being masked:
    L (2 P + 2 Hq D layers L) / rate

Each part is a process of its own with a limit of its own, and is started again behind a row that ended it
(`supervise`): a row that fails or hangs costs no other. Rows that were not measured are named. No torch in
this module: the parts import it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.bench.engine.gpu.results import read
from tests.bench.engine.gpu.supervise import NO_GPU, TIMED_OUT, Part, run_part
from tests.bench.engine.gpu.targets import failures, table
from tests.bench.figures import Figure
from tests.bench.streams import BenchFailed

__all__ = ["BenchFailed", "add_arguments", "run"]

LIMITS_S: Final = {"floors": 60, "attention": 90, "matmul": 150, "steps": 200, "profile": 120}
"""The parts in their order, and the longest time of each: an H200 needs half of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the text above has lists and formulas
    parser.add_argument(
        "--only", nargs="+", choices=LIMITS_S, metavar="PART", help=f"of {', '.join(LIMITS_S)} (default: all)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="keep every row here, as JSON lines; rows that are there already count",
    )


async def run(options: argparse.Namespace) -> list[Figure]:
    """Measure, and compare with the targets. Raises BenchFailed where there is no GPU."""
    if options.results is not None:
        return await _measure(options.results, options.only)
    with tempfile.TemporaryDirectory() as directory:
        return await _measure(Path(directory) / "gpu.jsonl", options.only)


async def _measure(results: Path, only: list[str] | None) -> list[Figure]:
    wanted = set(only or LIMITS_S)
    if not any(line["part"] == "floors" and line["row"] == "card" for line in read(results)):
        wanted.add("floors")  # the other parts' results are shares of these
    for part in LIMITS_S:
        if part in wanted:
            await _run_part(part, results)
    lines = read(results)
    for failure in failures(lines):
        sys.stderr.write(f"failed: {failure}\n")
    return table(lines)


async def _run_part(part: str, results: Path) -> None:
    """Run one part. Its rows go to the results file, and to the terminal if there is one."""
    whole = Part(part, ["tests.bench.engine.gpu", part], LIMITS_S[part])
    status = await run_part(whole, results, sys.stderr.fileno())
    if status == NO_GPU:
        raise BenchFailed("there is nothing to measure without an NVIDIA GPU that this torch can use")
    if status == TIMED_OUT:
        sys.stderr.write(f"{part} took longer than {LIMITS_S[part]} s: what is missing was not measured\n")
    elif status:
        sys.stderr.write(f"{part} failed with status {status}\n")
