"""`python -m tests.suites NAME`: fetch a suite that others wrote, run it, and print how much came out right.

What is fetched stays in a cache and is never committed: many suites have no licence. `--write` puts the
figures to the committed results, `tests/bench/results/suite-NAME.jsonl`. A suite is a module of this package
with `SUMMARY` and `run(cache) -> list[Figure]`; it raises SuiteFailed where it cannot be run.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from shared.process.arguments import Parser
from tests.bench import figures
from tests.suites.cache import SuiteFailed, cache_folder

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "tests/bench/results"
BESIDE: Final = frozenset({"__init__", "__main__", "cache", "chats", "held", "judging", "peeling", "serving"})


def names() -> list[str]:
    """The suites: all modules here but those of `BESIDE`."""
    return sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - BESIDE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one suite. Returns the process's exit code: 0 as it should be, 1 not so, 2 not run."""
    parser = Parser(prog="python -m tests.suites", description="Run a suite that others wrote.")
    suites = parser.add_subparsers(dest="suite", required=True, metavar="NAME")
    for name in names():
        suite = suites.add_parser(name, help=_module(name).SUMMARY, description=_module(name).__doc__)
        suite.add_argument("--write", action="store_true", help="put the figures to the committed results")
    options = parser.parse_args(argv)
    try:
        measured: list[figures.Figure] = _module(options.suite).run(cache_folder())
    except SuiteFailed as error:
        sys.stderr.write(f"{options.suite}: {error}\n")
        return 2
    figures.write(measured)
    if options.write:
        with (RESULTS / f"suite-{options.suite}.jsonl").open("w") as out:
            out.write(json.dumps(_head(options.suite)) + "\n")
            figures.write(measured, out, as_json=True)
    return figures.exit_code(measured, check=True)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"tests.suites.{name}")


def _head(name: str) -> dict[str, str]:
    """The line that says how the figures came about."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        "machine": f"{os.cpu_count()} virtual cores, {platform.system()} {platform.release()}",
        "commit": commit,
        "command": f"python -m tests.suites {name} --write",
    }


if __name__ == "__main__":
    sys.exit(main())
