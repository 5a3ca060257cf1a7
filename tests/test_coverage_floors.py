"""The floors of coverage: a fall is told, and CI traces what has a floor."""

from __future__ import annotations

from pathlib import Path

from tests.coverage_floors import ROOT, floors
from tests.tracing import LEFT_OUT, TRACED, is_traced


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
