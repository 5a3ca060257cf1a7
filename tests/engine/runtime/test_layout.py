"""The walls inside the runtime: two runners that do not know each other, and no circle among imports."""

from __future__ import annotations

from functools import cache
from graphlib import TopologicalSorter

import pytest

from tests.test_layering import ROOT, imports, module_name

RUNTIME = ROOT / "engine" / "runtime"
MODULES = {module_name(path): path for path in sorted(RUNTIME.rglob("*.py"))}
APART = {
    "host": ("device", "kernels"),
    "device": ("host",),
    "kernels": ("host", "device"),
    "models": ("host", "device"),
    "reference": ("host", "device", "kernels", "native"),
}
"""The packages that do not import one another."""


@cache
def imported(module: str) -> frozenset[str]:
    """The runtime's modules that a module imports, wherever in its text."""
    return frozenset(imports(MODULES[module])) & (MODULES.keys() - {module})


@pytest.mark.parametrize("package", APART)
def test_packages_that_stand_beside_each_other_do_not_import_each_other(package: str) -> None:
    own = [module for module in MODULES if module.startswith(f"engine.runtime.{package}")]
    assert own
    others = tuple(f"engine.runtime.{other}" for other in APART[package])
    for module in own:
        assert not [name for name in imported(module) if name.startswith(others)], module


def test_there_is_no_circle() -> None:
    """Imports inside functions count: a circle that they close can be read from neither end."""
    graph = {module: imported(module) for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_triton_is_imported_by_the_kernels_alone() -> None:
    for module, path in MODULES.items():
        if not module.startswith("engine.runtime.kernels"):
            assert "triton" not in {name.partition(".")[0] for name in imports(path)}, module
