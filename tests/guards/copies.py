"""Copies of the checkout, in which something is taken away and tests are run.

A copy has the files that git knows or does not ignore, as they are now. Runs beside each other have a copy
each.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.guards.lifting import Edit
from tests.guards.removals import ROOT

LIMIT_S: Final = 120.0
"""The time for the tests of one removal, in seconds."""
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)
"""A test that failed. A file that cannot be read has no test."""


class Outcome(StrEnum):
    NOTICED = "noticed"
    HUNG = "noticed, by not ending"
    UNNOTICED = "UNNOTICED"
    BROKEN = "BROKEN"
    """The tests did not run."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the tests said."""

    outcome: Outcome
    took_s: float
    by: str
    """The first test that failed, or why none ran."""


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout, in a directory that goes when the block ends."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    with TemporaryDirectory(prefix="penstock-guards-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        yield root


def tried(root: Path, edits: Sequence[Edit], tests: Sequence[str], limit_s: float = LIMIT_S) -> Trial:
    """Make the edits in a copy, run the tests until one fails, and take the edits back."""
    stats = {edit.file: (root / edit.file).stat() for edit in edits}
    try:
        for edit in edits:
            (root / edit.file).write_text(edit.after)
        return _run(root, tests, limit_s)
    finally:
        for edit in edits:
            (root / edit.file).write_text(edit.before)
            before = stats[edit.file]  # Python's bytecode of the file as it was counts again
            os.utime(root / edit.file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _run(root: Path, tests: Sequence[str], limit_s: float) -> Trial:
    options = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the services that its tests have started
        process.communicate()
        return Trial(Outcome.HUNG, time.monotonic() - began_s, "")
    took_s = time.monotonic() - began_s
    if process.returncode == 0:
        return Trial(Outcome.UNNOTICED, took_s, "")
    if (failed := _FAILED.search(output)) is not None:
        return Trial(Outcome.NOTICED, took_s, failed[1])
    return Trial(Outcome.BROKEN, took_s, output.strip()[-300:])
