"""The house rules that a machine can hold: ruff, mypy strict, and no function too long to read.

Where a module is cut is a question of meaning, for review."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FUNCTION_LINES_MAX = 50
KERNEL_LINES_MAX = 80

SOURCES = sorted(path for top in ("shared", "gateway", "engine") for path in (ROOT / top).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHES = sorted((ROOT / "tests/bench").rglob("*.py"))


@pytest.mark.parametrize(
    "argv",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_the_tools_find_nothing(argv: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def _untyped_modules() -> list[str]:
    """The modules that pyproject.toml exempts from types because they contain Triton kernels."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    return [
        name for override in overrides if "disallow_untyped_defs" in override for name in override["module"]
    ]


@pytest.mark.parametrize("module", _untyped_modules())
def test_only_triton_kernels_go_without_types(module: str) -> None:
    untyped = [
        node
        for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.returns is None
    ]
    assert untyped, f"{module} has no kernel: it needs no exemption"
    for node in untyped:
        assert _is_kernel(node), f"{module}: {node.name}"


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list] == ["triton.jit"]


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_can_be_read(path: Path) -> None:
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            most = KERNEL_LINES_MAX if _is_kernel(node) else FUNCTION_LINES_MAX
            assert node.end_lineno - node.lineno < most, f"{path.name}: {node.name}"


@pytest.mark.parametrize("path", [*SOURCES, *BENCHES], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is(path: Path) -> None:
    if path.read_text().strip():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_no_public_class_has_a_twin() -> None:
    """A name that is read in a log, a trace or a review means one class of the product."""
    modules: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
    for path in [*SOURCES, *BENCHES]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not any(mark in line for mark in marks), f"{path}:{number}: {line.strip()}"
