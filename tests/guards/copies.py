"""Copies of the checkout, in which something is taken away and tests are run.

A copy has the files that git knows or does not ignore, as they are now, and the native libraries. Runs beside
each other have a copy each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from engine.runtime.native.build import LIBRARIES
from tests.guards.lifting import Edit
from tests.guards.removals import ROOT

LIMIT_S: Final = 120.0
"""The time for the tests of one removal, in seconds."""
PATIENCE_S: Final = "15"
"""How long tests wait for what does not come as something was taken away, unless the environment says."""
PRELOADED: Final = (
    "aiohttp.web", "cryptography.x509", "hiredis", "httpx", "hypothesis.strategies", "jinja2.sandbox", "jwt",
    "llguidance", "msgspec", "numpy", "openai", "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    "prometheus_client", "redis.asyncio", "structlog", "tokenizers", "torch", "trustme", "uvloop", "yaml",
)  # fmt: skip
"""What the product and its tests import, and what starts no thread. With it at hand, tests take half the
time."""
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


@dataclass(slots=True)
class Copy:
    """A copy, and the process that runs its tests."""

    root: Path
    forks: subprocess.Popen[str]
    trials: Iterator[int] = field(default_factory=lambda: count(1))

    def tried(self, edits: Sequence[Edit], tests: Sequence[str], limit_s: float = LIMIT_S) -> Trial:
        """Make the edits, run the tests until one fails, and take the edits back."""
        stats = {edit.file: (self.root / edit.file).stat() for edit in edits}
        later_ns = next(self.trials) * 10**9
        try:
            for edit in edits:
                self._write(edit.file, edit.after, stats[edit.file], later_ns)
            return self._run(tests, limit_s)
        finally:
            for edit in edits:
                self._write(edit.file, edit.before, stats[edit.file], 0)

    def _write(self, file: str, text: str, before: os.stat_result, later_ns: int) -> None:
        """Python knows its bytecode of a file by the second and the length: no other trial has the same."""
        (self.root / file).write_text(text)
        os.utime(self.root / file, ns=(before.st_atime_ns, before.st_mtime_ns + later_ns))

    def _run(self, tests: Sequence[str], limit_s: float) -> Trial:
        options = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        assert self.forks.stdin is not None
        assert self.forks.stdout is not None
        began_s = time.monotonic()
        print(json.dumps([limit_s, [*options, *tests]]), file=self.forks.stdin, flush=True)
        status, said = json.loads(self.forks.stdout.readline())
        took_s = time.monotonic() - began_s
        if status is None:
            return Trial(Outcome.HUNG, took_s, "")
        if status == 0:
            return Trial(Outcome.UNNOTICED, took_s, "")
        if (failed := _FAILED.search(said)) is not None:
            return Trial(Outcome.NOTICED, took_s, failed[1])
        return Trial(Outcome.BROKEN, took_s, said.strip()[-300:])


@contextmanager
def copied() -> Iterator[Copy]:
    """A copy of the checkout, in a directory that goes when the block ends."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    libraries = (str(path.relative_to(ROOT)) for path in LIBRARIES.glob("*.so"))
    with TemporaryDirectory(prefix="penstock-guards-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        for name in filter(None, (*names, *libraries)):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        with opened(root, PRELOADED) as copy:
            yield copy


def environment_of(root: Path) -> dict[str, str]:
    """The environment in which the tests of a directory are run."""
    # Triton reads its own when it is imported, and torch imports that.
    own = {"PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    return {"PATIENCE_S": PATIENCE_S, **os.environ, **own}


@contextmanager
def opened(root: Path, libraries: Sequence[str]) -> Iterator[Copy]:
    """A directory's process, with some libraries imported."""
    command = [sys.executable, str(Path(__file__).with_name("forks.py")), *libraries]
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment_of(root),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forks:
        yield Copy(root, forks)
