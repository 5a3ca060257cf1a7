"""The command `penstock bench NAME`: run a bench, print its figures, and with `--check` judge them."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

from shared import logs
from shared.bench import figures
from shared.bench.services import ServiceFailed
from shared.cli import serving_load

BENCHES: Final = {
    "edge": ("gateway.bench.edge", "callers of the gateway that are slow, too large, malformed or guessing"),
    "engine": ("engine.bench.served", "tokens/s, time to first token and gap between tokens of an engine"),
    "faults": ("gateway.bench.faults", "what callers notice when one of three engines fails, beside Envoy"),
    "foreign": (
        "gateway.bench.foreign",
        "CPU time per event of engines of other makes, over HTTP/1.1, beside that of ours",
    ),
    "gateway": (
        "gateway.bench.compare",
        "CPU time per event and per request, and the latency that the gateway adds",
    ),
    "gpu": ("engine.bench.gpu", "decode, prefill and attention on a GPU, as shares of what the card can do"),
    "hop": ("gateway.bench.hop", "CPU time per event of the hop alone, over HTTP/2 and over HTTP/1.1"),
    "neighbours": ("gateway.bench.neighbours", "what a tenant notices of another one's attacks"),
    "outages": ("gateway.bench.outages", "what callers notice when the Redis of the quotas fails"),
    "quota": ("gateway.bench.quota", "CPU time and latency of quotas, in memory and in Redis"),
    "routing": ("gateway.bench.routing", "policies of choosing a replica, in virtual time"),
    "scheduler": ("engine.bench.scheduler", "the scheduler against simpler ones, in virtual time"),
    "workers": ("gateway.bench.workers", "throughput and CPU time of several workers beside one process"),
}
"""The module and the summary of each bench. A module has `add_arguments(parser)`, `async run(options)` and
`BenchFailed`."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the command line."""
    bench = commands.add_parser("bench", help="measure what README claims")
    names = bench.add_subparsers(dest="bench", required=True, metavar="NAME")
    serving_load.add_parser(names)
    for name, (_, summary) in BENCHES.items():
        parser = names.add_parser(name, help=summary, description=_module(name).__doc__)
        _module(name).add_arguments(parser)
        parser.add_argument(
            "--check", action="store_true", help="exit 1 when a figure falls short of its target"
        )
        parser.add_argument("--json", action="store_true", help="JSON lines, also on a terminal")
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON lines to FILE as well")
        parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the chosen bench. Returns the process's exit code."""
    module = _module(options.bench)
    logs.configure("bench", level="warning")  # to stderr: what is printed is figures alone
    try:
        measured = asyncio.run(module.run(options))
    except (ServiceFailed, module.BenchFailed, OSError) as error:
        print(f"penstock bench {options.bench}: {error}", file=sys.stderr)
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
