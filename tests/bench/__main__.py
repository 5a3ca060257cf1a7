"""`python -m tests.bench NAME`: run a bench, print its figures, and with `--check` judge them.

Benches measure what README claims. They are no part of the wheel, so they run in a checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from shared.process import logs
from shared.process.arguments import Parser
from shared.process.interrupts import INTERRUPTED
from tests.bench import figures
from tests.bench.services import ServiceFailed

BENCHES: Final = {
    "edge": (
        "tests.bench.gateway.edge",
        "callers of the gateway that are slow, too large, malformed or guessing",
    ),
    "engine": (
        "tests.bench.engine.served",
        "tokens/s, time to first token and gap between tokens of an engine",
    ),
    "faults": (
        "tests.bench.gateway.faults",
        "what callers notice when one of three engines fails, beside Envoy",
    ),
    "foreign": (
        "tests.bench.gateway.foreign",
        "CPU time per event of engines of other makes, over HTTP/1.1, beside that of ours",
    ),
    "gateway": (
        "tests.bench.gateway.compare",
        "CPU time per event and per request, and the latency that the gateway adds",
    ),
    "gpu": (
        "tests.bench.engine.gpu",
        "decode, prefill and attention on a GPU, as shares of what the card can do",
    ),
    "hop": ("tests.bench.gateway.hop", "CPU time per event of the hop alone, over HTTP/2 and over HTTP/1.1"),
    "neighbours": ("tests.bench.gateway.neighbours", "what a tenant notices of another one's attacks"),
    "outages": ("tests.bench.gateway.outages", "what callers notice when the Redis of the quotas fails"),
    "quota": ("tests.bench.gateway.quota", "CPU time and latency of quotas, in memory and in Redis"),
    "routing": ("tests.bench.gateway.routing", "policies of choosing a replica, in virtual time"),
    "scheduler": ("tests.bench.engine.scheduler", "the scheduler against simpler ones, in virtual time"),
    "workers": (
        "tests.bench.gateway.workers",
        "throughput and CPU time of several workers beside one process",
    ),
}
"""The module and the summary of each bench. A module has `add_arguments(parser)`, `async run(options)` and
`BenchFailed`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench. Returns the process's exit code: 0 done, 1 a target missed, 2 not measured."""
    options = build_parser().parse_args(argv)
    try:
        return run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> Parser:
    """The command line, with the options of every bench."""
    parser = Parser(prog="python -m tests.bench", description="Measure what README claims.")
    names = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, (_, summary) in BENCHES.items():
        bench = names.add_parser(name, help=summary, description=_module(name).__doc__)
        _module(name).add_arguments(bench)
        bench.add_argument(
            "--check", action="store_true", help="exit 1 when a figure falls short of its target"
        )
        bench.add_argument("--json", action="store_true", help="JSON lines, also on a terminal")
        bench.add_argument("--out", type=Path, metavar="FILE", help="write the JSON lines to FILE as well")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the chosen bench. Returns the process's exit code."""
    module = _module(options.bench)
    logs.configure("bench", level="warning")  # to stderr: what is printed is figures alone
    try:
        measured = asyncio.run(module.run(options))
    except (ServiceFailed, module.BenchFailed, OSError) as error:
        print(f"{options.bench}: {error}", file=sys.stderr)
        return 2
    finally:
        logs.close()
    figures.write(measured, as_json=True if options.json else None)
    if options.out is not None:
        with options.out.open("w") as out:
            figures.write(measured, out, as_json=True)
    return figures.exit_code(measured, check=options.check)


def _module(name: str) -> ModuleType:
    return importlib.import_module(BENCHES[name][0])


if __name__ == "__main__":
    sys.exit(main())
