"""The house rules that a machine can hold: ruff, mypy strict, and no function too long to read.

Where a module is cut is a question of meaning, for review."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests import effort

ROOT = Path(__file__).parent.parent
FUNCTION_LINES_MAX = 50
KERNEL_LINES_MAX = 80

BESIDE = sorted(path for top in ("tests/bench", "engine/demo/train") for path in (ROOT / top).rglob("*.py"))
"""What measures the product, and what trains the demo model."""
SOURCES = sorted(
    path
    for top in ("shared", "gateway", "engine")
    for path in (ROOT / top).rglob("*.py")
    if path not in BESIDE
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TYPED = () if effort.IS_WHOLE else ("shared", "gateway", "engine", "helm/make")
"""What mypy reads in every run. Tests are two thirds of its work, and run anyway."""


@pytest.mark.parametrize(
    "argv",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        pytest.param(("mypy", *TYPED), marks=pytest.mark.slow),
    ],
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


@dataclass(frozen=True, slots=True)
class Function:
    """What the rules look at of one function."""

    name: str
    lineno: int
    lines: int
    is_typed: bool
    is_kernel: bool


@dataclass(frozen=True, slots=True)
class Module:
    """What the rules look at of one module."""

    is_empty: bool
    has_docstring: bool
    classes: tuple[str, ...]
    functions: tuple[Function, ...]


@cache
def read(path: Path) -> Module:
    """A module, which is parsed once for all rules; its tree would hold too much memory."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Module(
        not tree.body,
        ast.get_docstring(tree) is not None,
        tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        tuple(
            Function(
                node.name,
                node.lineno,
                (node.end_lineno or node.lineno) - node.lineno,
                node.returns is not None,
                [ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list]
                == ["triton.jit"],
            )
            for node in functions
        ),
    )


def test_only_triton_kernels_go_without_types() -> None:
    wrong = []
    for module in _untyped_modules():
        functions = read(ROOT / f"{module.replace('.', '/')}.py").functions
        untyped = [function for function in functions if not function.is_typed]
        wrong += [] if untyped else [f"{module} has no kernel: it needs no exemption"]
        wrong += [f"{module}: {function.name}" for function in untyped if not function.is_kernel]
    assert wrong == []


def test_functions_can_be_read() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path in sorted({*SOURCES, *TESTS, *BESIDE})
        for function in read(path).functions
        if function.lines >= (KERNEL_LINES_MAX if function.is_kernel else FUNCTION_LINES_MAX)
    ]
    assert too_long == []


def test_a_module_says_what_it_is() -> None:
    mute = [path for path in [*SOURCES, *BESIDE] if not read(path).has_docstring and not read(path).is_empty]
    assert [str(path.relative_to(ROOT)) for path in mute] == []


def test_no_public_class_has_a_twin() -> None:
    """A name that is read in a log, a trace or a review means one class of the product."""
    modules: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in read(path).classes:
            if not name.startswith("_"):
                modules.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
    for path in [*SOURCES, *BESIDE]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not any(mark in line for mark in marks), f"{path}:{number}: {line.strip()}"
