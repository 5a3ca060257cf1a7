"""Python frames and C calls of the gateway for a unary request or an event, and the files that it enters.

    python -m tests.bench.calls [--before DIR] [--requests 400] [--connect | --events | --decode] [--files]

A gateway that counts its calls answers few requests, then another one answers more; the difference, by the
difference of their requests, is what one request takes. It says the same on a busy machine. A file is entered
by a request when some function of it is called at least once for every second one. `--before`: a checkout of
another version, measured in the same way. `--decode`: an engine's core process instead, on the CPU, and what
a decode step of one row takes. `--files`: name the files, with the frames of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

from tests.bench.figures import Figure, at_most, figure, write
from tests.bench.gateway.subjects import Engine, gateway, paced_engine
from tests.bench.instructions import INTERVAL_MS, Load, add_arguments, load_of

RUNS = 2
"""Runs of each length. The least counts, as what happens now and then falls into some runs."""
ROOT = Path(__file__).parents[2]
COUNTED = Path(__file__).with_name("counted_calls.py")
PACKAGES = ("gateway", "engine", "shared")
DECODE_WARM = 200
"""Steps of the shorter run, after which the core has learned what a step costs."""
DECODE_MORE = 400
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


def calls_of(frames: Counter[CodeType], count: int) -> Calls:
    """The calls for one of so many, of frames that were counted in this process."""
    by_function = {
        (_short(code.co_filename, ROOT), code.co_qualname, code.co_firstlineno): calls / count
        for code, calls in frames.items()
    }
    return Calls(by_function, 0.0)


async def calls(load: Load, checkout: Path | None) -> Calls:
    """The calls for one of what is counted."""
    async with paced_engine(INTERVAL_MS, checkout) as engine:
        run = partial(_run, load, engine, checkout)
        return await _for_one(run, load.warm, load.more, load.connections)


async def decode_calls(checkout: Path | None) -> Calls:
    """The calls for a decode step of one row."""
    return await _for_one(partial(_decode, checkout), DECODE_WARM, DECODE_MORE)


async def _for_one(
    run: Callable[[int], Awaitable[Calls]], warm: int, more: int, connections: int = 1
) -> Calls:
    """The difference between runs, for one of what is counted."""
    short = [await run(warm) for _ in range(RUNS)]
    long = [await run(warm + more) for _ in range(RUNS)]
    count = more * connections
    least, most = (min(runs, key=lambda run: run.frames + run.in_c) for runs in (short, long))
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
        return _read(out, checkout)


async def _decode(checkout: Path | None, steps: int) -> Calls:
    """The calls of a core process's whole life with so many steps in it."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "calls.json"
        argv = (str(COUNTED), str(out), sys.executable, "-m", "decode_steps", str(steps))
        env = {**os.environ, "PYTHONPATH": str(COUNTED.parent)}  # the checkout's own packages come before it
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=checkout or ROOT, env=env)
        assert await process.wait() == 0, "the core process failed"
        return _read(out, checkout)


def _read(out: Path, checkout: Path | None) -> Calls:
    """The calls that a process wrote when it ended."""
    rows = json.loads(out.read_text())
    root = (checkout or ROOT).resolve()
    return Calls(
        {(_short(name, root), function, line): n for name, function, line, n in rows[:-1]}, rows[-1][3]
    )


def _short(name: str, root: Path) -> str:
    path = Path(name)
    return str(path.relative_to(root)) if path.is_relative_to(root) else name


def _figures(what: str, name: str, of: Calls) -> list[Figure]:
    return [
        figure(f"{what}: Python frames{name}", of.frames, "calls"),
        figure(f"{what}: C calls{name}", of.in_c, "calls"),
        figure(f"{what}: files entered{name}", len(of.by_file), "files"),
    ]


async def bench(
    before: Path | None, what: str, count: Callable[[Path | None], Awaitable[Calls]], names_files: bool
) -> list[Figure]:
    ours = await count(None)
    figures = _figures(what, "", ours)
    if before is not None:
        theirs = await count(before)
        figures += _figures(what, ", before", theirs)
        figures.append(figure(f"{what}: frames / before", ours.frames / theirs.frames, "x", NO_MORE))
        figures.append(figure(f"{what}: C calls / before", ours.in_c / theirs.in_c, "x", NO_MORE))
    if names_files:
        by_file = sorted(ours.by_file.items(), key=lambda item: -item[1])
        figures += [figure(f"frames in {name}", frames, "calls") for name, frames in by_file]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser).add_argument("--decode", action="store_true", help="a decode step of one row")
    parser.add_argument("--files", action="store_true", help="name the files that are entered")
    options = parser.parse_args()
    before = None if options.before is None else options.before.resolve()
    load = load_of(options)
    count = decode_calls if options.decode else partial(calls, load)
    what = "decode step" if options.decode else load.name
    write(asyncio.run(bench(before, what, count, options.files)))


if __name__ == "__main__":
    main()
