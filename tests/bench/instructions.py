"""Instructions that the gateway executes for a unary request: a figure without noise, by valgrind.

    python -m tests.bench.instructions [--before DIR] [--requests 400] [--connect]

A gateway runs under `valgrind --tool=cachegrind` and answers few requests, then another one answers more; the
difference of their instructions, by the difference of their requests, is what one request costs. It says the
same on a busy machine. `--before`: a checkout of another version, measured in the same way. `--connect`: each
request has a connection of its own. Debian's package `valgrind` is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from pathlib import Path

from gateway.bench.subjects import Engine, ServerUnderTest, gateway, paced_engine
from shared.bench.figures import Figure, at_most, figure, write

WARM = 80
"""Requests of the shorter run: after them, everything has been called."""
RUNS = 3
"""Runs of each length. The least counts, as a start may do more: it compiles what was changed, or waits."""
CONNECTIONS = 8
RATIO_TARGET = at_most(1.03)
VALGRIND = (
    *("env", "PYTHONHASHSEED=0"),  # other seeds, other collisions
    *("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"),
)
_TOTAL = re.compile(r"I\s+refs:\s+([\d,]+)")


async def instructions(checkout: Path | None, requests: int, connects: bool) -> float:
    async with paced_engine(20.0, checkout) as engine:
        fewer = min([await _run(engine, checkout, WARM, connects) for _ in range(RUNS)])
        more = min([await _run(engine, checkout, WARM + requests, connects) for _ in range(RUNS)])
    return (more - fewer) / requests


async def _run(engine: Engine, checkout: Path | None, requests: int, connects: bool) -> int:
    """Instructions of a gateway's whole life with so many requests in it."""
    with tempfile.NamedTemporaryFile() as log:
        async with gateway(engine, checkout, (*VALGRIND, f"--log-file={log.name}")) as subject:
            await _ask(subject, requests, connects)
        found = _TOTAL.search(log.read().decode())
    assert found is not None, "valgrind wrote no total"
    return int(found[1].replace(",", ""))


async def _ask(subject: ServerUnderTest, requests: int, connects: bool) -> None:
    request = subject.chat(16, stream=False)

    async def ask() -> None:
        connection = await subject.endpoint.connect()
        for _ in range(requests // CONNECTIONS):
            exchange = await connection.exchange(request)
            assert exchange.error is None, exchange.error
            if connects:
                connection.close()
                connection = await subject.endpoint.connect()
        connection.close()

    await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))


async def bench(before: Path | None, requests: int, connects: bool) -> list[Figure]:
    name = "connection and unary request" if connects else "unary request"
    ours = await instructions(None, requests, connects)
    figures = [figure(name, ours / 1e3, "thousand instructions")]
    if before is not None:
        theirs = await instructions(before, requests, connects)
        figures.append(figure(f"{name}, before", theirs / 1e3, "thousand instructions"))
        figures.append(figure(f"{name} / before", ours / theirs, "x", None if connects else RATIO_TARGET))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of another version")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--connect", action="store_true", help="a connection for each request")
    options = parser.parse_args()
    before = None if options.before is None else options.before.resolve()
    write(asyncio.run(bench(before, options.requests, options.connect)))


if __name__ == "__main__":
    main()
