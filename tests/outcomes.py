"""What a run of the tests came to, for CI to read: `.pytest_cache/outcome.json`.

Rules:
1. A worker that crashed, and a file that could not be collected, are told apart from tests that failed.
2. Hypothesis draws from one seed in all processes of a run, which is recorded.
3. A test that is skipped fails, unless `MAY_SKIP` says why it may be. Those that were are named.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import msgspec
import pytest

RECORD: Final = Path(".pytest_cache") / "outcome.json"
"""Where the last run is recorded, from the root of the checkout."""
MAY_SKIP: Final = {
    "tests/engine/test_disk_tier_settings.py": "without a compiler no native kernels are built",
    "tests/shared/process/test_lifecycle.py": "the kernel's parent-death signal is Linux's own",
    "tests/test_interrupts.py": "some containers allow no namespace of processes",
}
"""The files whose tests may be skipped, and why."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. Tests are named by their ids."""

    exit_status: int
    seed: int
    failed: tuple[str, ...]
    crashed: tuple[str, ...]
    """Tests during which a worker ended: by a signal, or because they took too long."""
    uncollected: tuple[str, ...]
    skipped: tuple[str, ...]


class Recorder:
    """A plugin of pytest in the process that tells of all tests."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._failed: dict[str, None] = {}
        self._crashed: dict[str, None] = {}
        self._uncollected: dict[str, None] = {}
        self._skipped: dict[str, None] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self._crashed[crashitem] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._crashed:
            self._failed[report.nodeid] = None
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._uncollected[report.nodeid] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._uncollected and exitstatus == pytest.ExitCode.OK:
            exitstatus = session.exitstatus = pytest.ExitCode.TESTS_FAILED
        outcome = Outcome(
            exit_status=int(exitstatus),
            seed=self._seed,
            failed=tuple(self._failed),
            crashed=tuple(self._crashed),
            uncollected=tuple(self._uncollected),
            skipped=tuple(self._skipped),
        )
        path = session.config.rootpath / RECORD
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.encode(outcome))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self._skipped:
            terminalreporter.write_line(f"SKIPPED {name}: {MAY_SKIP[name.partition('::')[0]]}")
        if self._failed:
            terminalreporter.write_line(f"Drawn with --hypothesis-seed={self._seed}")


def install(config: pytest.Config) -> None:
    """Choose the seed of a run, and record the run where its tests are told of."""
    if hasattr(config, "workerinput"):
        return
    (config.rootpath / RECORD).unlink(missing_ok=True)
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = random.randrange(2**32)
    config.pluginmanager.register(Recorder(int(config.option.hypothesis_seed)))


def judge_skip(report: pytest.TestReport) -> None:
    """Make a failure of a test that was skipped and may not be."""
    is_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_skip and report.nodeid.partition("::")[0] not in MAY_SKIP:
        report.outcome = "failed"
        report.longrepr = f"Skipped, which tests/outcomes.py does not allow: {report.longrepr}"


def last(root: Path) -> Outcome | None:
    """How the last run in a checkout ended. None where it did not come to its end."""
    path = root / RECORD
    return msgspec.json.decode(path.read_bytes(), type=Outcome) if path.is_file() else None
