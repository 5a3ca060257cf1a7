"""Takes guards out of the product one at a time, and bounds, and says which of them no test misses.

    python -m tests.guards              # all: a quarter of an hour on two cores that have other work, too
    python -m tests.guards NAME...      # those whose names contain one of these

Each is taken out of a copy of the checkout, where the tests that must notice it are run, for at most two
minutes. Before that they pass with nothing taken away. Ends with what was not noticed, and then with
status 1. A test that draws its cases has one that notices as an example: a draw may miss it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tests.guards.copies import Copy, Outcome, Trial, copied, environment_of
from tests.guards.removals import Removal, product, removals

AT_ONCE: Final = (os.cpu_count() or 1) + 2
"""Copies: tests wait for what never comes as something was taken away."""


def main(names: Sequence[str]) -> int:
    wanted = [one for one in removals() if not names or any(name in one.name for name in names)]
    if not wanted:
        print("No guard and no bound has such a name.", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        copies = [stack.enter_context(copied()) for _ in range(min(len(wanted), AT_ONCE))]
        if not _pass(copies[0].root, sorted({test for one in wanted for test in one.tests})):
            print("These tests fail with nothing taken away.", file=sys.stderr)
            return 1
        trials = _tried(copies, wanted)
    missed = [one for one in trials if trials[one].outcome in (Outcome.UNNOTICED, Outcome.BROKEN)]
    for one in missed:
        print(f"{trials[one].outcome}: {one}  {trials[one].by}")
    print(f"{len(trials) - len(missed)} of {len(trials)} were noticed")
    return 1 if missed else 0


def _pass(copy: Path, tests: Sequence[str]) -> bool:
    """True if the tests pass."""
    options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-n", str(AT_ONCE)]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(command, cwd=copy, env=environment_of(copy), check=False).returncode == 0


def _tried(copies: Sequence[Copy], wanted: Sequence[Removal]) -> dict[str, Trial]:
    """Try the removals, one at a time in each copy. Prints each as it is done."""
    sources, free = product(), SimpleQueue[Copy]()
    for copy in copies:
        free.put(copy)

    def work(one: Removal) -> Trial:
        copy = free.get()
        try:
            return copy.tried(one.edits(sources), one.tests)
        finally:
            free.put(copy)

    trials: dict[str, Trial] = {}
    width = max(len(one.name) for one in wanted)
    with ThreadPoolExecutor(len(copies)) as threads:
        jobs = {threads.submit(work, one): one for one in wanted}
        for job in as_completed(jobs):
            trial = trials[jobs[job].name] = job.result()
            shown = trial.by.rpartition("/")[2] if trial.outcome is Outcome.NOTICED else ""
            print(f"{jobs[job].name:{width}}  {trial.outcome}  {trial.took_s:.0f} s  {shown}", flush=True)
    return trials


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
