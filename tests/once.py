"""What is made once in a run, however many processes pytest-xdist shares its tests out to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], str]) -> str:
    """The text that `make` returns. Called by the first process that wants it, while the others wait; when it
    raises, the next one tries."""
    directory = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of all processes of the run
    path = directory / f"{name}.once"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(".made")
            made.write_text(make())
            made.rename(path)
        return path.read_text()
