"""What `penstock up` takes before anybody asks for anything: time to be ready, memory, CPU.

    python -m tests.bench.footprint [--model DIR] [--starts 3]

From the start of the command to the gateway's first yes on `/readyz`, which it gives once the engine behind
it is ready; files were read before, so that a disk counts for nothing. Memory and CPU time are those of all
its processes together: the command itself, gateway, engine, core.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from typing import Final

from tests.bench.cpu import cpu_s, descendants, proportional_bytes, resident_bytes
from tests.bench.figures import Figure, at_most, figure, quantile, write
from tests.bench.services import free_port, service

READY_TARGET: Final = at_most(10)
IDLE_TARGET: Final = at_most(1)
SETTLE_S: Final = 2.0
IDLE_S: Final = 20.0


async def footprint(model: str | None, starts: int) -> list[Figure]:
    ready_s: list[float] = []
    for start in range(1 + starts):  # the first reads the files
        port = free_port()
        with tempfile.TemporaryDirectory() as logs:
            argv = [sys.executable, "-m", "shared.cli", "up", "--port", str(port), "--data-dir", logs]
            argv += ["--model", model] if model else []
            began_s = time.monotonic()
            async with service(argv, f"http://127.0.0.1:{port}/readyz") as process:
                ready_s += [time.monotonic() - began_s] if start else []
                if start == starts:
                    rest = await _at_rest(process.pid)
    return [
        figure("up: ready, median", quantile(ready_s, 0.5), "s"),
        figure("up: ready, slowest", max(ready_s), "s", READY_TARGET),
        *rest,
    ]


async def _at_rest(pid: int) -> list[Figure]:
    await asyncio.sleep(SETTLE_S)
    before = {process: cpu_s(process) for process in descendants(pid)}
    await asyncio.sleep(IDLE_S)
    busy = sum(cpu_s(process) - was for process, was in before.items()) / IDLE_S
    return [
        figure("up: idle, all processes", 100 * busy, "% of a core", IDLE_TARGET),
        figure("up: resident memory", resident_bytes(pid) / 1e6, "MB"),
        figure("up: resident memory, shared pages once", proportional_bytes(pid) / 1e6, "MB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="default: the built-in demo model")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="after the first (default: 3)")
    options = parser.parse_args()
    write(asyncio.run(footprint(options.model, options.starts)))


if __name__ == "__main__":
    main()
