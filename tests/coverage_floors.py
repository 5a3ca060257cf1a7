"""Holds each package's coverage to the floor that pyproject.toml gives it.

    TRACED=1 python -m pytest ... && coverage combine
    python -m tests.coverage_floors

`.ci/nightly coverage` does so. A percentage is that of lines and branches together, as `coverage report`
computes it. A floor is what was measured, rounded down to a tenth, and for packages with branches that depend
on timing a tenth below that; it is only ever raised.
"""

from __future__ import annotations

import io
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parent.parent


def floors() -> dict[str, float]:
    """The least percentage of each package, by its directory."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    found: dict[str, float] = tool["penstock"]["coverage-floors"]
    return found


def measured(packages: Mapping[str, float]) -> dict[str, float]:
    """The percentage of each package in the data that the last traced run left."""
    coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
    coverage.load()
    return {
        package: coverage.report(include=[f"{ROOT / package}/*"], file=io.StringIO()) for package in packages
    }


def fallen(found: Mapping[str, float], least: Mapping[str, float]) -> list[str]:
    """A line for each package whose coverage is below its floor."""
    return [
        f"{package}: {found[package]:.2f} % is below {floor} %"
        for package, floor in least.items()
        if found[package] < floor
    ]


def main() -> None:
    """Print every package's coverage; exit with 1 when one is below its floor."""
    least = floors()
    found = measured(least)
    for package, percentage in found.items():
        print(f"{package}: {percentage:.2f} % of lines and branches, floor {least[package]} %")
    if lines := fallen(found, least):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
