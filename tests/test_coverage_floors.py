"""The floors of coverage: a fall is told, and CI traces what has a floor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from coverage import Coverage

from tests import coverage_floors
from tests.coverage_floors import ROOT, fallen, floors, measured
from tests.tracing import LEFT_OUT, TRACED, is_traced

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


def test_ci_traces_and_holds_the_floors_of_packages_that_are_there() -> None:
    ci = (ROOT / ".ci" / "nightly").read_text()
    traced, held = (ci.index(part) for part in ("TRACED=1", "-m tests.coverage_floors"))
    assert traced < held
    for folder in TRACED:
        assert folder in ci[traced:held]
    for package, floor in floors().items():
        assert (ROOT / package / "__init__.py").is_file(), package
        assert 90 <= floor <= 100, package


def test_what_is_traced_is_there_and_so_is_what_is_left_out() -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    left_out = {Path(top) / f"test_{name}.py" for top, names in LEFT_OUT.items() for name in names}
    assert left_out <= files
    assert not any(is_traced(path) for path in left_out)
    for top in TRACED:
        assert any(is_traced(path) for path in files if path.is_relative_to(top)), top
    assert not is_traced(Path("tests/engine/test_metrics.py"))


def test_a_test_that_is_not_traced_runs_at_full_speed() -> None:
    """Whoever started this process: this file is not among the traced."""
    assert Coverage.current() is None
