"""Tokens drawn by the native kernels beside torch, of a vocabulary as models have it, on one thread.

    python -m tests.bench.sampling [--rows 32] [--vocab 151936]

Per kind of row, in turns, the time of a row in the best of some rounds; and the slowest kind beside rows
that are drawn from the whole vocabulary. A field of one request must not make a step much longer for others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from engine.contract.messages import SamplingParams
from engine.runtime.host.sampler import Draw, draw_by_torch
from engine.runtime.native.decoder import built_isas
from tests.bench.figures import Figure, at_most, exit_code, figure, write
from tests.engine.runtime.host.test_sampler import Seats
from tests.engine.runtime.test_native import PLAIN, Stage

ROUNDS: Final = 4
PEAKED, FLAT = 4.0, 1.0
"""The spread of the logits: a model that knows what comes next, and one that does not."""
KINDS: Final[Mapping[str, tuple[float, dict[str, Any]]]] = {
    "greedy": (PEAKED, {"temperature": 0.0}),
    "whole": (PEAKED, {}),
    "min_p 0.05": (PEAKED, {"min_p": 0.05}),
    "top_k 20": (PEAKED, {"top_k": 20}),
    "top_p 0.9": (PEAKED, {"top_p": 0.9}),
    "top_k 150,000": (PEAKED, {"top_k": 150_000}),
    "top_p 0.999 of flat logits": (FLAT, {"top_p": 0.999, "temperature": 2.0}),
    "top_p 0.9 with penalties": (PEAKED, {"top_p": 0.9, "presence_penalty": 0.5}),
    "greedy with all penalties": (
        PEAKED,
        {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ),
}
WORST_TARGET: Final = at_most(10)


def bench(rows: int, vocab: int) -> list[Figure]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    native: Draw = Stage.of(PLAIN, isa=built_isas()[0]).model.draw  # type: ignore[attr-defined]
    figures, row_us = [], dict[str, float]()
    for kind, (spread, options) in KINDS.items():
        logits = torch.randn(rows, vocab, generator=generator) * spread
        seats = Seats(vocab, slots=rows)
        for seed in range(rows):
            seats.add(SamplingParams(**({"seed": seed, "max_tokens": 4} | options)))
        best_s = {draw: float("inf") for draw in (native, draw_by_torch)}
        for _ in range(ROUNDS):
            for draw in best_s:
                began_s = time.perf_counter()
                seats.sample(logits, draw)
                best_s[draw] = min(best_s[draw], time.perf_counter() - began_s)
        row_us[kind], torch_us = (1e6 * seconds / rows for seconds in best_s.values())
        figures.append(figure(f"{kind}: native", row_us[kind], "us/row"))
        figures.append(figure(f"{kind}: torch / native", torch_us / row_us[kind], "x"))
    worst = max(row_us.values()) / row_us["whole"]
    figures.append(figure("the slowest / whole", worst, "x", WORST_TARGET))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--check", action="store_true", help="exit 1 when the figure misses its target")
    options = parser.parse_args()
    figures = bench(options.rows, options.vocab)
    write(figures)
    return exit_code(figures, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
