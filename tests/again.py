"""Runs the few tests that failed in the last run once more, one at a time.

    python -m tests.again

CI runs all tests on every core at once, where a test that starts processes may meet a bound that it keeps
alone. Such a test is named, passes here and wants mending. One that fails twice is a failure, and so are more
than `AGAIN_MAX` failures: those have a cause of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).parent.parent
AGAIN_MAX: Final = 5
"""The number of failed tests that may be run again."""
LIMIT_S: Final = 600
"""The time for all of them, in seconds."""


def failed_tests(root: Path) -> list[str]:
    """The ids of the tests that failed when pytest last ran in this checkout."""
    path = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    if not path.is_file():
        return []
    return list(msgspec.json.decode(path.read_bytes(), type=dict[str, bool]))


def refusal(failed: Iterable[str]) -> str | None:
    """The reason why these tests are not run again; None where they may be."""
    count = len(list(failed))
    if count == 0:
        return "What failed was no test: nothing is run again."
    if count > AGAIN_MAX:
        return f"{count} tests failed: at most {AGAIN_MAX} are run again."
    return None


def main() -> None:
    """Run them; exit with 1 when one fails again, or when none may be run again."""
    failed = failed_tests(ROOT)
    if reason := refusal(failed):
        sys.exit(reason)
    print(
        "These tests failed beside the others. They are run again, alone:", *failed, sep="\n    ", flush=True
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *failed]
    done = subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit("A test failed twice.")
    print("WANTS MENDING: failed beside the others, passed alone:", *failed, sep="\n    ")


if __name__ == "__main__":
    main()
