"""The walls inside the runtime: two runners that do not know each other, and no circle among imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.test_layering import ROOT, imports, module_name

RUNTIME = ROOT / "engine" / "runtime"
MODULES = {module_name(path): path for path in sorted(RUNTIME.rglob("*.py"))}
APART = {
    "host": ("device", "kernels"),
    "device": ("host",),
    "kernels": ("host", "device"),
    "models": ("host", "device"),
}
"""The packages that do not import one another."""


@cache
def imported(module: str) -> frozenset[str]:
    """The runtime's modules that a module imports, wherever in its text."""
    return frozenset(imports(MODULES[module])) & (MODULES.keys() - {module})


def at_import(path: Path) -> Iterator[str]:
    """The names that a module imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", APART)
def test_packages_that_stand_beside_each_other_do_not_import_each_other(package: str) -> None:
    own = [module for module in MODULES if module.startswith(f"engine.runtime.{package}")]
    assert own
    others = tuple(f"engine.runtime.{other}" for other in APART[package])
    for module in own:
        assert not [name for name in imported(module) if name.startswith(others)], module


def test_there_is_no_circle() -> None:
    """A module may be imported first, whichever it is."""
    graph = {module: MODULES.keys() & set(at_import(path)) - {module} for module, path in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_triton_is_imported_by_the_kernels_alone() -> None:
    for module, path in MODULES.items():
        if not module.startswith("engine.runtime.kernels"):
            assert "triton" not in {name.partition(".")[0] for name in imports(path)}, module
