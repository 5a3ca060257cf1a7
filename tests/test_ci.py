"""What CI runs ends with how each part of it ended."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = ("tests", "coverage", "guards", "torches", "processors", "console", "images")


def _nightly(checkout: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / ".ci" / "nightly"), *steps]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout where the guards hold, containers cannot run, and every other step fails."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "nightly", tmp_path / ".ci")
    commands = {
        ".venv/bin/python": '[ "$2" = tests.guards ]',
        "tests/ship/run.sh": "exit 77",
        ".ci/torches": "false",
        ".ci/processors": "false",
    }
    for name, script in commands.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)
    return tmp_path


def test_a_step_that_fails_stops_no_other_and_all_are_in_the_table(checkout: Path) -> None:
    done = _nightly(checkout)
    table = [line.split(maxsplit=3) for line in done.stdout.splitlines()[-len(STEPS) :]]
    assert {name: how for name, _, _, how in table} == {
        **dict.fromkeys(STEPS, "FAILED (1)"),
        "guards": "passed",
        "images": "cannot run here",
    }
    assert done.returncode == 1


def test_a_step_may_be_run_alone(checkout: Path) -> None:
    assert _nightly(checkout, "guards").returncode == 0
    assert _nightly(checkout, "guards", "torches").returncode == 1
    assert _nightly(checkout, "gards").returncode == 2
