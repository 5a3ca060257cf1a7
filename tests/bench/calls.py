"""Python frames and C calls of the gateway for a unary request or an event, and the files that it enters.

    python -m tests.bench.calls [--before DIR] [--requests 400] [--connect | --events] [--files]

A gateway that counts its calls answers few requests, then another one answers more; the difference, by the
difference of their requests, is what one request takes. It says the same on a busy machine. A file is entered
by a request when some function of it is called at least once for every second one. `--before`: a checkout of
another version, measured in the same way. `--files`: name the files, with the frames of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import Figure, at_most, figure, write
from tests.bench.gateway.subjects import Engine, gateway, paced_engine
from tests.bench.instructions import INTERVAL_MS, Load, add_arguments, load_of

RUNS = 2
"""Runs of each length. The least counts, as what happens now and then falls into some runs."""
COUNTED = Path(__file__).with_name("counted_calls.py")
PACKAGES = ("gateway", "shared")
NO_MORE = at_most(1.01)
FILE_MIN = 0.5
"""The calls of a function for each request from which on its file counts as entered."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one process, or for one request."""

    by_function: dict[tuple[str, str, int], float]
    """Python frames by file, function and line. Files of the product are relative to its root."""
    in_c: float

    @property
    def frames(self) -> float:
        return sum(self.by_function.values())

    @property
    def by_file(self) -> dict[str, float]:
        """The product's files that are entered, with their frames."""
        files = Counter[str]()
        entered = {name for (name, *_), calls in self.by_function.items() if calls >= FILE_MIN}
        for (name, *_), calls in self.by_function.items():
            files[name] += calls  # type: ignore[assignment]
        return {name: files[name] for name in entered if name.split("/")[0] in PACKAGES}


async def calls(load: Load, checkout: Path | None) -> Calls:
    """The calls for one of what is counted."""
    async with paced_engine(INTERVAL_MS, checkout) as engine:
        fewer = [await _run(load, engine, checkout, load.warm) for _ in range(RUNS)]
        more = [await _run(load, engine, checkout, load.warm + load.more) for _ in range(RUNS)]
    count = load.more * load.connections
    least, most = (min(runs, key=lambda run: run.frames + run.in_c) for runs in (fewer, more))
    functions = {
        key: (n - least.by_function.get(key, 0)) / count
        for key, n in most.by_function.items()
        if n > least.by_function.get(key, 0)
    }
    return Calls(functions, (most.in_c - least.in_c) / count)


async def _run(load: Load, engine: Engine, checkout: Path | None, count: int) -> Calls:
    """The calls of a gateway's whole life with so much work in it."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "calls.json"
        async with gateway(engine, checkout, (sys.executable, str(COUNTED), str(out))) as subject:
            await asyncio.gather(*(load.ask(subject, count) for _ in range(load.connections)))
        rows = json.loads(out.read_text())
    root = (checkout or Path(__file__).parents[2]).resolve()
    return Calls(
        {(_short(name, root), function, line): n for name, function, line, n in rows[:-1]}, rows[-1][3]
    )


def _short(name: str, root: Path) -> str:
    path = Path(name)
    return str(path.relative_to(root)) if path.is_relative_to(root) else name


def _figures(load: Load, name: str, of: Calls) -> list[Figure]:
    return [
        figure(f"{load.name}: Python frames{name}", of.frames, "calls"),
        figure(f"{load.name}: C calls{name}", of.in_c, "calls"),
        figure(f"{load.name}: files entered{name}", len(of.by_file), "files"),
    ]


async def bench(before: Path | None, load: Load, names_files: bool) -> list[Figure]:
    ours = await calls(load, None)
    figures = _figures(load, "", ours)
    if before is not None:
        theirs = await calls(load, before)
        figures += _figures(load, ", before", theirs)
        figures.append(figure(f"{load.name}: frames / before", ours.frames / theirs.frames, "x", NO_MORE))
        figures.append(figure(f"{load.name}: C calls / before", ours.in_c / theirs.in_c, "x", NO_MORE))
    if names_files:
        by_file = sorted(ours.by_file.items(), key=lambda item: -item[1])
        figures += [figure(f"frames in {name}", frames, "calls") for name, frames in by_file]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--files", action="store_true", help="name the files that are entered")
    options = parser.parse_args()
    before = None if options.before is None else options.before.resolve()
    write(asyncio.run(bench(before, load_of(options), options.files)))


if __name__ == "__main__":
    main()
