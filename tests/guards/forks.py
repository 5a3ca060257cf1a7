"""Runs pytest again and again, each time in a fork of a process that has imported what takes long.

    python forks.py LIBRARY...

A program of its own, which imports nothing of the checkout in which it is started: each session reads the
files of that as they are then. A line of its input is a session's limit in seconds and pytest's arguments,
and one of its output pytest's status and what it said. A session that takes longer is killed, and what it
started with it. A library that starts a thread cannot be imported here.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest


def main(libraries: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    preload(libraries)
    sys.path[0] = str(Path.cwd())  # the checkout's, instead of this file's folder
    for line in sys.stdin:
        print(json.dumps(ended(*json.loads(line))), file=answers)


def preload(libraries: Sequence[str]) -> None:
    """Import the libraries. Pytest imports its plugins itself, or complains that it cannot rewrite them."""
    with tempfile.TemporaryDirectory() as empty:
        pytest.main(["-q", "-c", os.devnull, "--rootdir", empty, "-p", "no:cacheprovider", empty])
    for name in libraries:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a session's collections leave alone what is here, which they would copy


def ended(limit_s: float, arguments: list[str]) -> tuple[int | None, str]:
    """The status of a session, or None where it did not end in time, and what it said."""
    with tempfile.TemporaryFile() as said:
        if not (child := os.fork()):
            os.setsid()
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            status = pytest.main(arguments)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(status)  # taking all the libraries down takes as long as a test
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the services that its tests have started
        said.seek(0)
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        return None if is_late else os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")


if __name__ == "__main__":
    main(sys.argv[1:])
