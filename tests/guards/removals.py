"""What the tests must notice: guards that are taken out of the product, and bounds that are lifted.

Both are data. `guards.toml` has the exact lines of each guard and what stands in their place. `bounds.toml`
has every bound of what comes from outside (a name that ends in `_MAX`) with the test that reaches it, or with
the reason why nothing from outside does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from tests.guards.lifting import Edit, lifted

ROOT: Final = Path(__file__).parents[2]
TOPS: Final = ("shared", "gateway", "engine")
BOUNDED: Final = ("shared/", "gateway/", "engine/api/", "engine/contract/")
"""Where bounds are of what a caller, an engine, Redis or a peer sends."""
_BOUND: Final = re.compile(r"_?[A-Z][A-Z0-9_]*_MAX")


class Removal(Protocol):
    """Something to take away from a copy of the product."""

    @property
    def name(self) -> str: ...

    @property
    def tests(self) -> Sequence[str]:
        """The ids of the tests of which at least one must fail."""
        ...

    def edits(self, sources: Mapping[str, str]) -> list[Edit]:
        """The changes of the product's files. Raises ValueError where there is nothing to take away."""
        ...


class Guard(Struct, frozen=True):
    """Some lines without which something goes wrong."""

    name: str
    file: str
    old: str
    """What is taken away: found in the file exactly once."""
    new: str
    """What stands in its place."""
    tests: tuple[str, ...]

    def edits(self, sources: Mapping[str, str]) -> list[Edit]:
        source = sources.get(self.file, "")
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has the old text {count} times")
        return [Edit(self.file, source, source.replace(self.old, self.new))]


class Bound(Struct, frozen=True):
    """A bound that a test reaches."""

    file: str
    constant: str
    test: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.constant}"

    @property
    def tests(self) -> tuple[str, ...]:
        return (self.test,)

    def edits(self, sources: Mapping[str, str]) -> list[Edit]:
        if found := lifted(sources, self.file, self.constant):
            return found
        raise ValueError(f"{self.name}: nothing uses it")


class _Guards(Struct, frozen=True, forbid_unknown_fields=True):
    guard: tuple[Guard, ...]


class Bounds(Struct, frozen=True, forbid_unknown_fields=True):
    """Both by file, then by the constant's name."""

    reached: dict[str, dict[str, str]]
    """The tests that reach bounds."""
    inner: dict[str, dict[str, str]]
    """The reasons why nothing from outside reaches them."""


def guards() -> tuple[Guard, ...]:
    return msgspec.toml.decode((Path(__file__).parent / "guards.toml").read_bytes(), type=_Guards).guard


def bounds() -> Bounds:
    return msgspec.toml.decode((Path(__file__).parent / "bounds.toml").read_bytes(), type=Bounds)


def removals() -> list[Removal]:
    """All guards, then all bounds that a test reaches."""
    reached = [
        Bound(file, name, test) for file, tests in bounds().reached.items() for name, test in tests.items()
    ]
    return [*guards(), *reached]


def product(root: Path = ROOT) -> dict[str, str]:
    """The texts of the product's files, by their paths."""
    paths = (path for top in TOPS for kind in ("*.py", "*.lua") for path in (root / top).rglob(kind))
    return {
        str(path.relative_to(root)): path.read_text() for path in sorted(paths) if "bench" not in path.parts
    }


def bounds_of(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The file and the name of every bound of what comes from outside, of modules and of classes."""
    for path, source in sources.items():
        if not path.startswith(BOUNDED) or "_MAX" not in source or not path.endswith(".py"):
            continue
        module = ast.parse(source)
        classes = (node for node in module.body if isinstance(node, ast.ClassDef))
        for statement in (*module.body, *(one for each in classes for one in each.body)):
            targets = statement.targets if isinstance(statement, ast.Assign) else ()
            for target in (statement.target,) if isinstance(statement, ast.AnnAssign) else targets:
                if isinstance(target, ast.Name) and _BOUND.fullmatch(target.id):
                    yield path, target.id
