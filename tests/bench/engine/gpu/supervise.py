"""Runs a part in processes of its own, so that a row that breaks its process costs no other row. No torch
here.

A row can end its process: an illegal access to memory loses the device, a library aborts, a kernel never ends
(`measuring.check` gives it up after a while). The part is then started again and goes on behind the rows that
it has tried: each is noted in a file before it is run. A row that ended its process without a result gets one
here.

Rows that only check may share the card: with n shares, each process runs every n-th row. Most of their time
is compiling, which holds Python's lock, so that only processes can do it side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.engine.gpu.results import RESULTS_VARIABLE, append, read

TRIED_VARIABLE: Final = "PENSTOCK_GPU_TRIED"
"""The environment variable that names the file of rows that were begun."""
SHARE_VARIABLE: Final = "PENSTOCK_GPU_SHARE"
"""The environment variable with a process's share: `1/4` are rows 1, 5, 9 and so on, counted from 0."""
NO_GPU: Final = 3
"""The exit status of a part that finds no GPU."""
LOST: Final = 70
"""The exit status of a part whose device cannot be trusted any more."""
HUNG: Final = 71
"""The exit status of a part that gave up a row."""
TIMED_OUT: Final = 124
ENDED: Final = (0, 1, 2, NO_GPU)
"""The exit statuses of a part that reached its end, with any results."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    argv: Sequence[str]
    """The arguments behind `python -m`."""
    limit_s: float
    shares: int = 1


async def run_part(part: Part, results: Path, stdout: int | None = None) -> int:
    """Run a part -> 0, or the status of a share that failed. `stdout`: the file that rows are shown on; None
    is this process's own."""
    ends_s = time.monotonic() + part.limit_s
    with tempfile.TemporaryDirectory() as directory:
        shares = (
            _Share(part, number, results, Path(directory), ends_s, stdout).run()
            for number in range(part.shares)
        )
        return next(filter(None, await asyncio.gather(*shares)), 0)


@dataclass(frozen=True, slots=True)
class _Share:
    part: Part
    number: int
    results: Path
    directory: Path
    ends_s: float
    stdout: int | None

    async def run(self) -> int:
        self._tried.touch()
        is_broken = False
        while True:
            tried, known = len(self._begun()), len(read(self.results))
            status = await self._once()
            begun = self._begun()[tried:]
            if begun and status not in ENDED:
                self._say_so(begun[-1], status, known)
                is_broken = True
            if not begun or status in (*ENDED, TIMED_OUT):
                return status or int(is_broken)

    @property
    def _tried(self) -> Path:
        return self.directory / f"tried-{self.number}"

    def _begun(self) -> list[str]:
        return self._tried.read_text().splitlines()

    def _say_so(self, row: str, status: int, known: int) -> None:
        """Write a result for the row that ended the process, unless it has one. `known`: lines there were
        before."""
        if any(line["part"] == self.part.name and line["row"] == row for line in read(self.results)[known:]):
            return
        how = (
            f"ended its process by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        )
        error = f"not done when the part's {self.part.limit_s:g} s were up" if status == TIMED_OUT else how
        append(self.results, self.part.name, row, {"ok": False, "error": error})

    async def _once(self) -> int:
        with tempfile.TemporaryDirectory(dir=self.directory) as own:
            environment = {
                **os.environ,
                RESULTS_VARIABLE: str(self.results),
                TRIED_VARIABLE: str(self._tried),
                SHARE_VARIABLE: f"{self.number}/{self.part.shares}",
                "TMPDIR": own,
            }
            if self.part.shares > 1:
                environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.part.shares))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *self.part.argv),
                env=environment,
                stdout=self.stdout,
                start_new_session=True,
            )
            try:
                return await asyncio.wait_for(process.wait(), max(0.0, self.ends_s - time.monotonic()))
            except TimeoutError:
                return TIMED_OUT
            finally:  # and the processes that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
