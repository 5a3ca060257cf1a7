"""The common part of the comparisons with other engines: their start, the pieces of a run, its output."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import msgspec

from tests.bench.cpu import descendants
from tests.bench.figures import Figure, exit_code, figure, write
from tests.bench.figures import Target as Bound

STOP_S: Final = 30.0
POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of `python -m tests.bench engine --against`, which has the machine to itself."""

    rows: Sequence[str]
    streams: int = 1
    turns: int | None = 1
    """None: as many as the row has by itself."""
    rounds: int = 1
    prompt_tokens: int = 200
    kinds: Sequence[str] = ()
    """Texts of the row `drafts`; all where none is named."""


@dataclass(frozen=True, slots=True)
class Other:
    """A running server of another engine, which knows the model as `bench`."""

    name: str
    url: str
    pid: int


def add_arguments(parser: argparse.ArgumentParser, models: Iterable[str] = ()) -> None:
    """`models`: those that may be chosen, where there is a choice."""
    if names := list(models):
        parser.add_argument("--models", nargs="+", choices=names, default=names)
        parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "penstock-bench-models")
    parser.add_argument(
        "--engine", nargs="*", default=[], metavar="OPTION", help="for this engine, such as threads=1"
    )
    parser.add_argument(
        "--alone", type=str.split, default=[], metavar="COMMAND", help="in front of each piece"
    )
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure misses its target")


@contextlib.contextmanager
def server(
    name: str,
    argv: Sequence[str],
    port: int,
    start_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    health: str = "/health",
) -> Iterator[Other]:
    """A process that serves OpenAI's API on a port, from when its `health` is well."""
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=dict(env or os.environ), cwd=cwd)
        try:
            _wait_until_healthy(name, process, f"http://127.0.0.1:{port}{health}", start_s, Path(log.name))
            yield Other(name, f"http://127.0.0.1:{port}/v1", process.pid)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it; with all that it has started, where it does not end in time."""
    if process.poll() is not None:
        return
    own = descendants(process.pid)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        for pid in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(
    name: str, process: subprocess.Popen[bytes], url: str, start_s: float, log: Path
) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).is_success:
                return
        time.sleep(POLL_S)
    raise SystemExit(f"{name} did not start:\n{log.read_text(errors='replace')[-3000:]}")


def compare(
    name: str,
    model: Path,
    others: Sequence[Other],
    pieces: Iterable[Piece],
    options: argparse.Namespace,
    engine: Sequence[str] = (),
    targets: Mapping[str, Bound] | None = None,
) -> Iterator[Figure]:
    """The figures of one model, in pieces. `engine`: options of this engine beside those of `--engine`."""
    bounds = targets or {}
    own_options = [*engine, *(f"--{option}" for option in options.engine)]
    for piece in pieces:
        argv = [*options.alone, sys.executable, "-m", "tests.bench", "engine", "--json"]
        argv += ["--model", str(model), "--against", *(other.url for other in others)]
        argv += ["--against-model", "bench", "--against-name", *(other.name for other in others)]
        argv += ["--against-pid", *(str(other.pid) for other in others)]
        argv += ["--rows", *piece.rows, "--streams", str(piece.streams)]
        argv += ["--turns", str(piece.turns)] if piece.turns else []
        argv += ["--kinds", *piece.kinds] if piece.kinds else []
        argv += ["--rounds", str(piece.rounds)]
        argv += ["--prompt-tokens", str(piece.prompt_tokens), "--", *own_options]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
        for line in done.stdout.splitlines():
            found = msgspec.json.decode(line, type=Figure)
            own = f"{name}: {found.name}"
            if own in bounds and found.value is not None:
                yield figure(own, found.value, found.unit, bounds[own])
            else:
                yield msgspec.structs.replace(found, name=own)


def show(found: Iterable[Figure], options: argparse.Namespace) -> int:
    """Print the figures as they come, also to `--out` -> the exit status that `--check` asks for."""
    figures = []
    with options.out.open("w") if options.out else contextlib.nullcontext() as out:
        for one in found:
            figures.append(one)
            for target in (sys.stdout, *([out] if out else [])):
                write([one], target, as_json=True)
                target.flush()
    return exit_code(figures, check=options.check)
