"""Runs the one test that failed in the last run once more.

    python -m tests.again

CI runs all tests on every core at once, where a test that starts processes may meet a bound that it keeps
alone. If it passes here, it is named in `.pytest_cache/again.txt` with the seed of what was drawn, and wants
mending. Two failures have a cause of their own, and so have a worker that crashed, a test that took too long
and a file that could not be collected: those are never run again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests import outcomes
from tests.outcomes import Outcome

ROOT: Final = Path(__file__).parent.parent
RECORD: Final = Path(".pytest_cache") / "again.txt"
"""The tests that passed when they were run again, a line each, from the root of the checkout."""
LIMIT_S: Final = 300
"""The time for the test, in seconds."""


def refusal(outcome: Outcome | None) -> str | None:
    """The reason why nothing is run again; None where one test may be."""
    if outcome is None:
        return "The tests did not come to their end."
    if outcome.crashed:
        return f"A worker crashed in {', '.join(outcome.crashed)}."
    if outcome.uncollected:
        return f"Not collected: {', '.join(outcome.uncollected)}."
    if outcome.exit_status != 1 or len(outcome.failed) != 1:
        return f"{len(outcome.failed)} tests failed, and pytest ended with {outcome.exit_status}."
    return None


def main() -> None:
    """Run it; exit with 1 when it fails again, or when it may not be run again."""
    outcome = outcomes.last(ROOT)
    reason = refusal(outcome)
    if outcome is None or reason is not None:
        sys.exit(f"{reason} Nothing is run again.")
    [failed] = outcome.failed
    print(f"{failed} failed beside the others. It is run again, alone.", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--hypothesis-seed={outcome.seed}", failed]
    done = subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit("A test failed twice.")
    line = f"WANTS MENDING: failed beside the others, passed alone: {failed} --hypothesis-seed={outcome.seed}"
    with (ROOT / RECORD).open("a") as record:
        record.write(f"{line}\n")
    print(line)


if __name__ == "__main__":
    main()
