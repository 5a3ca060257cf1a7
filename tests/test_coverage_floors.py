"""The floors of coverage: a fall is told, and CI measures what has a floor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import coverage_floors
from tests.coverage_floors import ROOT, fallen, floors, measured

SOURCE = """
def sign(x):
    if x < 0:
        return -1
    return 1

sign(1)
"""


def test_a_package_below_its_floor_is_told_and_one_at_its_floor_is_not() -> None:
    assert fallen({"gateway": 97.2, "shared": 96.99}, {"gateway": 97.2, "shared": 97.0}) == [
        "shared: 96.99 % is below 97.0 %"
    ]


def test_a_branch_that_no_test_takes_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five lines and two branches, one line and one branch are missed: 5 of 7."""
    (tmp_path / "pyproject.toml").write_text("[tool.coverage.run]\nbranch = true\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "signs.py").write_text(SOURCE)
    command = [sys.executable, "-m", "coverage", "run", "package/signs.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setattr(coverage_floors, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert measured({"package": 0.0}) == {"package": pytest.approx(100 * 5 / 7)}


def test_a_command_holds_the_floors_of_packages_that_are_there() -> None:
    assert "--cov " in (ROOT / ".ci" / "coverage").read_text()
    assert "-m tests.coverage_floors" in (ROOT / ".ci" / "coverage").read_text()
    for package, floor in floors().items():
        assert (ROOT / package / "__init__.py").is_file(), package
        assert 90 <= floor <= 100, package
