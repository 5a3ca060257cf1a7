"""This engine beside llama.cpp's server: the same weights, the same loads, in turns.

    python -m tests.bench.against_llama_cpp --server FILE [--models 0.9M 29M 474M qwen3.5-0.8B qwen3.5-2B]
        [--formats bf16 q8_0] [--streams 1 8 32] [--prompts 200 2000] [--limit-s S]

`FILE` is a `llama-server`, built for this processor from the source that PyPI's `llama-cpp-python` brings:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cd llama_cpp_python-*/vendor/llama.cpp && cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF && make -C build llama-server llama-batched-bench  # build/bin

The weights are those of `tests.bench.models`, converted by `tests.bench.gguf_model` (`pip install gguf`).
bfloat16 is measured beside bfloat16, and Q8_0 beside this engine's `--weights int8`. llama.cpp gets a slot
for each stream, all cores, flash attention and no cache of earlier prompts, which are all different here.

Each row is a run of `python -m tests.bench engine --against`, whose figures are printed with the model's
name, its format and the prompts' length. Targets: more tokens per second and a shorter time to first token in
each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.bench.against import Other, Piece, add_arguments, compare, server, show
from tests.bench.figures import Figure, at_least, at_most, figure
from tests.bench.gguf_model import write_gguf
from tests.bench.models import SHAPES, make_model
from tests.bench.services import free_port

START_S: Final = 120.0
OUTPUT_LEN: Final = 64
"""As `python -m tests.bench engine` asks for."""
SLACK_LEN: Final = 64
"""Context beyond prompt and answer, in tokens."""
STREAMS: Final = (1, 8, 32)
PROMPTS: Final = (200, 2000)
ENGINE_OPTIONS: Final = {
    "bf16": ["--dtype", "bfloat16"],
    "q8_0": ["--dtype", "bfloat16", "--weights", "int8"],
}
AHEAD: Final = {"output, ratio": at_least(1), "TTFT p50, ratio": at_most(1)}
"""The targets by the end of a figure's name."""


@contextlib.contextmanager
def llama_cpp(
    name: str, binary: Path, weights: Path, streams: int, context_len: int, further: Sequence[str] = ()
) -> Iterator[Other]:
    """A server of llama.cpp on a GGUF file. `context_len`: of each stream."""
    port, cores = free_port(), str(len(os.sched_getaffinity(0)))
    argv = [str(binary), "--model", str(weights), "--alias", "bench", "--port", str(port)]
    argv += ["--parallel", str(streams), "--ctx-size", str(streams * context_len), "--flash-attn", "on"]
    argv += ["--threads", cores, "--threads-batch", cores, "--cache-ram", "0", "--no-warmup", *further]
    with server(name, argv, port, START_S) as found:
        yield found


def work_of(name: str, streams: int, prompt_len: int) -> float:
    """How long a row takes beside others: its prompts' tokens by the millions of weights that each meets."""
    size = name.rpartition("-")[2]
    return float(size[:-1]) * {"M": 1, "B": 1000}[size[-1]] * streams * prompt_len


def turns_of(name: str, streams: int, prompt_len: int) -> tuple[int, int]:
    """The turns of each engine, and the requests that each stream makes in a turn: fewer where one takes
    minutes."""
    work = work_of(name, streams, prompt_len)
    if work > work_of("474M", 8, 200):
        return 1, 1
    return (3, 2) if work <= work_of("29M", 8, 200) else (2, 1)


def measured(options: argparse.Namespace) -> Iterator[Figure]:
    begun_at = time.monotonic()
    rows = itertools.product(options.models, options.streams, options.prompts)
    for name, streams, prompt_len in sorted(rows, key=lambda row: work_of(*row)):
        model = make_model(options.dir / name, SHAPES[name])
        for form in options.formats:
            row = f"{name} {form}, prompts of {prompt_len}"
            if options.limit_s is not None and time.monotonic() - begun_at > options.limit_s:
                sys.stderr.write(f"not begun: {row}, {streams} streams\n")
                continue
            piece = Piece(["load"], streams, *turns_of(name, streams, prompt_len), prompt_len)
            yield from _row(row, model, write_gguf(model, form), piece, options)


def _row(
    name: str, model: Path, weights: Path, piece: Piece, options: argparse.Namespace
) -> Iterator[Figure]:
    context_len = piece.prompt_tokens + OUTPUT_LEN + SLACK_LEN
    engine = [*ENGINE_OPTIONS[weights.stem], "--max-num-seqs", str(max(piece.streams, 2))]
    with llama_cpp("llama.cpp", options.server, weights, piece.streams, context_len) as other:
        for found in compare(name, model, [other], [piece], options, engine):
            end = next((end for end in AHEAD if found.name.endswith(end)), None)
            if end is None or found.value is None:
                yield msgspec.structs.replace(found, target=None, ok=None)
            else:
                yield figure(found.name, found.value, found.unit, AHEAD[end])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--server", type=Path, required=True, metavar="FILE")
    parser.add_argument("--formats", nargs="+", choices=list(ENGINE_OPTIONS), default=list(ENGINE_OPTIONS))
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--prompts", nargs="+", type=int, default=list(PROMPTS), metavar="TOKENS")
    parser.add_argument(
        "--limit-s", type=float, metavar="S", help="begin no row later; the quickest go first"
    )
    add_arguments(parser, SHAPES)
    options = parser.parse_args()
    return show(measured(options), options)


if __name__ == "__main__":
    sys.exit(main())
