"""The command `penstock trace`: what became of requests, from a running gateway or both services' logs."""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from gzip import BadGzipFile, GzipFile
from heapq import nlargest
from pathlib import Path
from typing import Annotated, BinaryIO, Final, cast

import msgspec
from msgspec import Meta

from shared.cli import admin, terminal
from shared.cli.keeper import id_problem
from shared.process.arguments import Parser, checked, spelt
from shared.trace.join import join
from shared.trace.log_reading import LINES_MAX, DamagedLine, LogReading, SlowestReading, Tail, parse
from shared.trace.request_records import RequestPage, RequestRecords, RequestSummary
from shared.trace.request_text import line_row, printable, record_text, summary_row, table
from shared.wire.completed_line import GatewayLine, Line
from shared.wire.silence import Silent

STDIN: Final = "-"
SLOWEST_MAX: Final = 1000
Slowest = Annotated[int, Meta(ge=1, le=SLOWEST_MAX)]
PAGE_ROWS: Final = 1000
PAGES_MAX: Final = 32
"""Pages of a gateway's requests that are read: more than it has memory for."""
GZIP: Final = b"\x1f\x8b"
"""The beginning of a file that gzip has packed."""
POLL_S: Final = 0.5


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `trace` to the command line."""
    parser = commands.add_parser(
        "trace",
        help="show what became of a request, from a running gateway or from both services' logs",
        description="Show what became of a request: how it ended in gateway and engine, the time of every "
        "stage, and what it waited for. Requests that share the id are shown one after the other. Without "
        f"--logs a running gateway is asked, with an operator's key in ${admin.KEY_VARIABLE}.",
    )
    parser.add_argument(
        "request_id",
        metavar="REQUEST_ID",
        nargs="?",
        type=checked(id_problem),
        help="the x-request-id of its answer",
    )
    parser.add_argument(
        "--logs",
        metavar="FILE",
        nargs="+",
        help="logs of gateways and engines, in any order, mixed, also packed by gzip; - is standard input",
    )
    parser.add_argument(
        "--slowest", metavar="N", type=spelt(Slowest), help="show the N requests that took longest"
    )
    parser.add_argument("--follow", action="store_true", help="show each request as it ends, in a row")
    parser.add_argument("--json", action="store_true", help="one JSON object per request")
    admin.add_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the requests that were found. Returns 0, or 1 when there is none or the gateway cannot be asked,
    and 2 for a wrong question. Raises OSError for an unreadable log."""
    terminal.prepare()
    asked = [bool(options.request_id), bool(options.slowest), options.follow]
    if sum(asked) != 1:
        _tell("give one of REQUEST_ID, --slowest and --follow")
        return 2
    try:
        if options.follow:
            return _follow(options)
        return _from_logs(options) if options.logs else _from_gateway(options)
    except admin.AdminFailed as error:
        hint = "; or give its logs with --logs" if isinstance(error, admin.Unreached) else ""
        _tell(terminal.harmless(f"{error}{hint}"))
        return 1


def _tell(problem: str) -> None:
    print(f"penstock trace: {problem}", file=sys.stderr)


# -- logs -----------------------------------------------------------------------------------------


def _from_logs(options: argparse.Namespace) -> int:
    slowest = None if options.slowest is None else SlowestReading(options.slowest)
    reading = slowest or LogReading(options.request_id)
    broken = []
    for name, log in _opened(options.logs):
        try:
            reading.read(log)
        except (EOFError, BadGzipFile, zlib.error) as error:
            broken.append(f"{printable(name)} is damaged, and was read up to there: {error}")
    traces = join(reading.lines)
    if slowest is not None:
        traces.sort(key=lambda one: -max(line.total_ms for line in one.lines))
    if options.json:
        for trace in traces:
            print(json.dumps(msgspec.to_builtins(trace)))  # ASCII alone, so nothing that a terminal obeys
    elif traces:
        print("\n".join(table(traces)))
    for problem in (*broken, *_problems(reading, options.logs)):
        _tell(problem)
    return 0 if traces else 1


def _opened(names: list[str]) -> Iterator[tuple[str, BinaryIO]]:
    for name in dict.fromkeys(names):
        if name == STDIN:
            yield name, _plain(sys.stdin.buffer)
        else:
            with Path(name).open("rb") as log:
                yield name, _plain(log)


def _plain(log: BinaryIO) -> BinaryIO:
    """The log, unpacked where it is packed by gzip, as `logrotate` leaves it."""
    peek = getattr(log, "peek", None)
    return cast(BinaryIO, GzipFile(fileobj=log)) if peek is not None and peek(2)[:2] == GZIP else log


def _problems(reading: LogReading | SlowestReading, logs: list[str]) -> list[str]:
    """Problems with the logs that the user should know about, in words."""
    problems = []
    if not reading.lines:
        whose = "of this request " if isinstance(reading, LogReading) else ""
        problems.append(f"no completed line {whose}in {printable(', '.join(logs))}")
    if reading.damaged:
        which = "that name this request and" if isinstance(reading, LogReading) else "that"
        problems.append(f"lines {which} cannot be read: {reading.damaged}")
    if isinstance(reading, LogReading) and reading.left_out:
        problems.append(f"only the first {LINES_MAX} lines are shown; there are {reading.left_out} more")
    return problems


# -- a running gateway ----------------------------------------------------------------------------


def _from_gateway(options: argparse.Namespace) -> int:
    if options.slowest is not None:
        kept = {(one.number, one.request_id): one for one in _kept(options.admin_url)}
        slowest = nlargest(options.slowest, kept.values(), key=lambda one: one.total_ms)
        for one in slowest:
            print(json.dumps(msgspec.to_builtins(one)) if options.json else summary_row(one))
        return 0 if slowest else 1
    found = admin.ask(options.admin_url, f"/requests/{options.request_id}", RequestRecords, {})
    for number, record in enumerate(found.data):
        if options.json:
            print(json.dumps(msgspec.to_builtins(msgspec.structs.replace(record, text=""))))
            continue
        print("\n".join([*([""] if number else []), *record_text(record)]))
    _tell_silent(found)
    return 0


def _tell_silent(answer: Silent) -> None:
    if answer.named:
        _tell(terminal.harmless(f"no answer from {answer.named}: there may be more"))


def _kept(url: str | None) -> Iterator[RequestSummary]:
    """The requests that a gateway has, live and completed, page by page; of several workers some twice."""
    before: int | None = None
    for _ in range(PAGES_MAX):
        older = {} if before is None else {"before": str(before)}
        page = admin.ask(url, "/requests", RequestPage, {"limit": str(PAGE_ROWS), **older})
        if before is None:
            _tell_silent(page)
        yield from page.data
        if (before := page.before) is None:
            return


# -- following ------------------------------------------------------------------------------------


def _follow(options: argparse.Namespace, sleep: Callable[[float], None] = time.sleep) -> int:
    rows = _log_rows(options.logs) if options.logs else _gateway_rows(options.admin_url)
    try:
        for row in rows:
            if row is None:
                sys.stdout.flush()
                sleep(POLL_S)
            else:
                print(row)
    except KeyboardInterrupt:
        pass
    return 0


def _log_rows(names: list[str]) -> Iterator[str | None]:
    """A row for each request that ends in the logs; None where there is nothing new. Where a gateway writes,
    the engines' lines are left out."""
    with ExitStack() as files:
        logs = [sys.stdin.buffer if n == STDIN else files.enter_context(Path(n).open("rb")) for n in names]
        tails = [Tail(log) for log in logs]
        has_gateway = False
        while True:
            for tail in tails:
                for text in tail.lines():
                    line = _completed(text)
                    has_gateway |= isinstance(line, GatewayLine)
                    if line is not None and (isinstance(line, GatewayLine) or not has_gateway):
                        yield line_row(line)
            yield None


def _completed(text: bytes) -> Line | None:
    try:
        return parse(text)
    except DamagedLine:
        return None


def _gateway_rows(url: str | None) -> Iterator[str | None]:
    """A row for each request that ends at the gateway; None where there is nothing new."""
    last = None
    while True:
        page = admin.ask(url, "/requests", RequestPage, {"state": "done", "limit": str(PAGE_ROWS)})
        for one in reversed(page.data):
            if last is not None and one.number > last:
                yield summary_row(one)
        last = max((one.number for one in page.data), default=0)
        yield None
