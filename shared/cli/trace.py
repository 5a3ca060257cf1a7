"""The command `penstock trace`: the completed lines of one request in both services' logs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

import msgspec

from shared.arguments import Parser, checked
from shared.cli import terminal
from shared.ids import is_request_id
from shared.trace.join import join
from shared.trace.reading import LINES_MAX, Reading
from shared.trace.table import printable, table

STDIN: Final = "-"


def _id_problem(text: str) -> str | None:
    return None if is_request_id(text) else "must be 1 to 64 of A-Z a-z 0-9 . _ -"


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `trace` to the command line."""
    parser = commands.add_parser(
        "trace",
        help="show what became of a request, from both services' logs",
        description="Show what became of a request: how it ended in gateway and engine, and the time of "
        "every stage. Requests that share the id are shown one after the other.",
    )
    parser.add_argument(
        "request_id",
        metavar="REQUEST_ID",
        type=checked(_id_problem),
        help="the x-request-id of its answer",
    )
    parser.add_argument(
        "--logs",
        metavar="FILE",
        nargs="+",
        required=True,
        help="logs of gateways and engines, in any order and mixed as you like; - is standard input",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per request")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the requests that were found. Returns 0, or 1 when there is none. Raises OSError for an
    unreadable log."""
    terminal.prepare()
    reading = Reading(options.request_id)
    for name in dict.fromkeys(options.logs):
        if name == STDIN:
            reading.read(sys.stdin.buffer)
        else:
            with Path(name).open("rb") as log:
                reading.read(log)
    traces = join(reading.lines)
    if options.json:
        for trace in traces:
            print(json.dumps(msgspec.to_builtins(trace)))  # ASCII alone, so nothing that a terminal obeys
    elif traces:
        print("\n".join(table(traces)))
    for problem in _problems(reading, options.logs):
        print(f"penstock trace: {problem}", file=sys.stderr)
    return 0 if traces else 1


def _problems(reading: Reading, logs: list[str]) -> list[str]:
    """Problems with the logs that the user should know about, in words."""
    problems = []
    if not reading.lines:
        problems.append(f"no completed line of this request in {printable(', '.join(logs))}")
    if reading.damaged:
        problems.append(f"lines that name this request and cannot be read: {reading.damaged}")
    if reading.left_out:
        problems.append(f"only the first {LINES_MAX} lines are shown; there are {reading.left_out} more")
    return problems
