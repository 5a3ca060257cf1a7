"""Instructions that the gateway executes for a unary request or an event: no noise, by valgrind.

    python -m tests.bench.instructions [--before DIR] [--requests 400] [--connect | --events]

A gateway runs under `valgrind --tool=cachegrind` and answers few requests, then another one answers more; the
difference of their instructions, by the difference of their requests, is what one request costs. It says the
same on a busy machine. What the kernel does for the gateway is not counted. `--before`: a checkout of another
version, measured in the same way. `--connect`: each request has a connection of its own. `--events`: short
streams and long ones instead, and what one event costs. Debian's package `valgrind` is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench.figures import Figure, at_most, figure, write
from tests.bench.gateway.subjects import Engine, ServerUnderTest, gateway, paced_engine

RUNS = 3
"""Runs of each length. The least counts, as a start may do more: it compiles what was changed, or waits."""
CONNECTIONS = 8
STREAMS = 32
INTERVAL_MS = 50.0
RATIO_TARGET = at_most(1.03)
VALGRIND = (
    *("env", "PYTHONHASHSEED=0"),  # other seeds, other collisions
    *("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"),
)
_TOTAL = re.compile(r"I\s+refs:\s+([\d,]+)")


@dataclass(frozen=True, slots=True)
class Load:
    """What a gateway is asked for: `ask` makes it do so many of what is counted, on each connection."""

    name: str
    ask: Callable[[ServerUnderTest, int], Awaitable[None]]
    connections: int
    warm: int
    """Those of the shorter run on each connection: after them, everything has been called."""
    more: int
    """Those that the longer run does beyond, on each connection."""
    has_target: bool = True


async def instructions(load: Load, checkout: Path | None) -> float:
    """Those of one of what is counted."""
    async with paced_engine(INTERVAL_MS, checkout) as engine:
        fewer = min([await _run(load, engine, checkout, load.warm) for _ in range(RUNS)])
        more = min([await _run(load, engine, checkout, load.warm + load.more) for _ in range(RUNS)])
    return (more - fewer) / (load.more * load.connections)


async def _run(load: Load, engine: Engine, checkout: Path | None, count: int) -> int:
    """Instructions of a gateway's whole life with so much work in it."""
    with tempfile.NamedTemporaryFile() as log:
        async with gateway(engine, checkout, (*VALGRIND, f"--log-file={log.name}")) as subject:
            await asyncio.gather(*(load.ask(subject, count) for _ in range(load.connections)))
        found = _TOTAL.search(log.read().decode())
    assert found is not None, "valgrind wrote no total"
    return int(found[1].replace(",", ""))


async def _unary(subject: ServerUnderTest, requests: int, *, connects: bool) -> None:
    request = subject.chat(16, stream=False)
    connection = await subject.endpoint.connect()
    for _ in range(requests):
        exchange = await connection.exchange(request)
        assert exchange.error is None, exchange.error
        if connects:
            connection.close()
            connection = await subject.endpoint.connect()
    connection.close()


async def _stream(subject: ServerUnderTest, events: int) -> None:
    connection = await subject.endpoint.connect()
    exchange = await connection.exchange(subject.chat(events))
    assert exchange.error is None, exchange.error
    connection.close()


def load_of(options: argparse.Namespace) -> Load:
    """The load that the command line asks for."""
    if options.events:
        return Load("event", _stream, STREAMS, 80, options.requests)
    ask = partial(_unary, connects=options.connect)
    name = "connection and unary request" if options.connect else "unary request"
    return Load(name, ask, CONNECTIONS, 10, options.requests // CONNECTIONS, has_target=not options.connect)


async def bench(before: Path | None, load: Load) -> list[Figure]:
    ours = await instructions(load, None)
    figures = [figure(load.name, ours / 1e3, "thousand instructions")]
    if before is not None:
        theirs = await instructions(load, before)
        figures.append(figure(f"{load.name}, before", theirs / 1e3, "thousand instructions"))
        target = RATIO_TARGET if load.has_target else None
        figures.append(figure(f"{load.name} / before", ours / theirs, "x", target))
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """The options of what is counted. Returns those of which one is given at most."""
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of another version")
    parser.add_argument("--requests", type=int, default=400, help="or events of each stream")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--connect", action="store_true", help="a connection for each request")
    what.add_argument("--events", action="store_true", help="streams, and what an event costs")
    return what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args()
    before = None if options.before is None else options.before.resolve()
    write(asyncio.run(bench(before, load_of(options))))


if __name__ == "__main__":
    main()
