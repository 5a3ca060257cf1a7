"""The command `penstock bench`: a load on a server (`serve`). Other benches are no part of what is installed:
it says how one is run in a checkout."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Final

from shared.cli import serving_load

OF_A_CHECKOUT: Final = (
    *(
        "edge",
        "engine",
        "faults",
        "foreign",
        "gateway",
        "gpu",
        "hop",
        "neighbours",
        "outages",
        "quota",
        "routing",
        "scheduler",
        "workers",
    ),
)
"""The benches of `python -m tests.bench`."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the command line."""
    bench = commands.add_parser("bench", help="put a load on a server, or say how other benches are run")
    names = bench.add_subparsers(dest="bench", required=True, metavar="NAME")
    serving_load.add_parser(names)
    for name in OF_A_CHECKOUT:
        command = f"python -m tests.bench {name}"
        parser = names.add_parser(name, help=f"in a checkout: {command}", add_help=False)
        parser.set_defaults(run=run, takes_more=True)


def run(options: argparse.Namespace) -> int:
    """Say how the bench is run. Returns the process's exit code."""
    command = f"python -m tests.bench {shlex.join([options.bench, *options.more])}"
    print(f"penstock bench {options.bench} runs in a checkout of Penstock: {command}", file=sys.stderr)
    return 2
