"""The command `penstock usage`: what callers used, from a gateway's admin API, as a table, JSON or CSV."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import UNSET

from shared.cli import admin, terminal
from shared.cli.terminal import harmless
from shared.process.arguments import Parser, checked
from shared.wire.usage_report import DIMENSIONS, UsageEntry, UsageReport

FORMATS: Final = ("table", "json", "csv")
_SUMS: Final = tuple(name for name in UsageEntry.__struct_fields__ if name not in DIMENSIONS)


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `usage` to the command line."""
    parser = commands.add_parser(
        "usage",
        help="show what callers used, by tenant, key, model and day",
        description="Show the requests and tokens that callers were charged, from the admin API of a gateway "
        f"([admin] in its configuration). An operator's key must be in ${admin.KEY_VARIABLE}.",
    )
    parser.add_argument(
        "--by",
        default="tenant",
        metavar="WHAT",
        help="tenant, key, model, day: one, or several with commas between (default: tenant)",
    )
    parser.add_argument(
        "--from", dest="first", metavar="DAY", help="such as 2026-11-01 (default: this month's)"
    )
    parser.add_argument("--to", dest="last", metavar="DAY", help="the last day, in UTC (default: today)")
    for name in ("tenant", "key", "model"):
        parser.add_argument(f"--{name}", type=checked(terminal.text_problem), help=f"only of this {name}")
    parser.add_argument("--format", choices=FORMATS, default="table", help="(default: table)")
    admin.add_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the usage. Returns 0, or 1 when it cannot be had."""
    terminal.prepare()
    asked = {
        "by": options.by,
        "from": options.first,
        "to": options.last,
        "tenant": options.tenant,
        "key": options.key,
        "model": options.model,
    }
    try:
        parameters = {name: value for name, value in asked.items() if value is not None}
        report = admin.ask(options.admin_url, "/usage", UsageReport, parameters)
    except admin.AdminFailed as error:
        sys.stderr.write(f"penstock usage: {harmless(str(error))}\n")
        return 1
    match options.format:
        case "json":
            print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        case "csv":
            write_csv(report)
        case _:
            print("\n".join(table(report)))
    if report.named:
        sys.stderr.write(f"penstock usage: no answer from {harmless(report.named)}: there may be more\n")
    return 0


def table(report: UsageReport) -> Iterable[str]:
    """The rows in columns, numbers to the right, with a line of sums below."""
    head = [*report.by, *(name.replace("_", " ") for name in _SUMS)]
    rows = [[harmless(cell) for cell in _cells(report, row)] for row in report.rows]
    sums = [f"{sum(getattr(row, name) for row in report.rows):,}" for name in _SUMS]
    total = ["total", *[""] * (len(report.by) - 1), *sums]
    widths = [max(map(len, column)) for column in zip(head, *rows, total, strict=True)]
    since = "" if report.since is None else f", counted in memory since {report.since:%Y-%m-%d %H:%M}"
    yield f"{report.first} to {report.last} (UTC){since}"
    for row in (head, *rows, total):
        left = len(report.by)
        named = (cell.ljust(width) for cell, width in zip(row[:left], widths[:left], strict=True))
        counted = (cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True))
        yield "  ".join((*named, *counted)).rstrip()


def write_csv(report: UsageReport) -> None:
    """Write the rows to standard output, with a head (RFC 4180)."""
    out = csv.writer(sys.stdout, lineterminator="\r\n")
    out.writerow([*report.by, *_SUMS])
    for row in report.rows:
        out.writerow([getattr(row, name) for name in (*report.by, *_SUMS)])


def _cells(report: UsageReport, row: UsageEntry) -> list[str]:
    names = [getattr(row, name) for name in report.by]
    assert UNSET not in names
    return [*map(str, names), *(f"{getattr(row, name):,}" for name in _SUMS)]
