"""Traces the tests that run in process, while all tests run; `tests.coverage_floors` holds what was covered.

    TRACED=1 python -m pytest ...
    python -m tests.coverage_floors

Tracing triples a test's cost. So it stops for tests whose work is done in other processes or by the runtime,
which computes in Triton, torch and C++; and for worlds, floods and mutations, which take long and reach no
branch that others do not.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path, PurePath
from typing import Final

ROOT: Final = Path(__file__).parent.parent
VARIABLE: Final = "TRACED"
_CHILDREN: Final = "COVERAGE_PROCESS_CONFIG"
"""Where coverage tells processes that are started to trace themselves."""

TRACED: Final = ("tests/gateway", "tests/shared", "tests/engine/api", "tests/engine/core")
LEFT_OUT: Final = {
    "tests/engine/core": ("forks", "long_prompts", "pace_worlds", "simulation", "waiting_tokens"),
    "tests/gateway/bench": ("outages_bench",),
    "tests/gateway/client": ("framing",),
    "tests/gateway/listen": ("mutated_requests",),
    "tests/gateway/routing": ("fault_laws",),
    "tests/gateway/workers": ("gateways", "workers_tls"),
    "tests/shared/text": ("tokenizer_matrix",),
    "tests/shared/http2": ("floods", "interop", "load"),
}


def is_traced(path: PurePath) -> bool:
    """`path`: a test's file, below the checkout."""
    left_out = LEFT_OUT.get(path.parent.as_posix(), ())
    return path.stem.removeprefix("test_") not in left_out and any(path.is_relative_to(top) for top in TRACED)


class Tracing:
    """Begins before anything of the product is imported, since a module's own lines run once."""

    def __init__(self) -> None:
        from coverage import Coverage  # which every other run goes without

        own = Coverage.current()  # that of a worker of xdist, as it is the child of a process that traces
        if own is None:
            file, config = ROOT / ".coverage", ROOT / "pyproject.toml"
            own = Coverage(data_file=str(file), data_suffix=True, config_file=str(config))
            own.start()
        self._coverage = own
        for command in import_module("shared.cli").COMMANDS:
            import_module(f"shared.cli.{command}")  # else by the first test that runs it, traced or not
        self._children = os.environ.get(_CHILDREN, "")
        self._on = True

    def follow(self, test: Path) -> None:
        """Trace from here on if the file of tests that comes is one to trace, and else no more."""
        on = is_traced(test.relative_to(ROOT))
        if on == self._on:
            return
        self._on = on
        if on:
            os.environ[_CHILDREN] = self._children
            self._coverage.start()
        else:
            self._coverage.stop()
            del os.environ[_CHILDREN]

    def end(self) -> None:
        """Leave what was traced in a file of this process's own."""
        self._coverage.stop()
        self._coverage.save()
