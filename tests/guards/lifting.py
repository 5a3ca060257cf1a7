"""The lifting of a bound: wherever the product uses it, it is a thousand times as large.

The bound's own value stays, so that a test that counts up to it, or that makes it small for itself, meets a
product that does not keep to it. What only says the bound is left as it is: a message, and a module's
assertion on how bounds go together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

TIMES: Final = 1000


@dataclass(frozen=True, slots=True)
class Edit:
    """The change of one file."""

    file: str
    before: str
    after: str
    """The whole file's text, like `before`."""


def lifted(sources: Mapping[str, str], module: str, name: str) -> list[Edit]:
    """The edits that lift a module's bound. None where nothing uses it."""
    edits = []
    for path, source in sources.items():
        if (
            name in source
            and path.endswith(".py")
            and (spans := [*_Uses(path, source, module, name).spans()])
        ):
            edits.append(Edit(path, source, _multiplied(source, spans)))
    return edits


@lru_cache(maxsize=1024)
def _read(source: str) -> tuple[ast.Module, list[tuple[str | None, str, str]]]:
    """A file, and what it imports: from where, its name, and the name that it has here."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return tree, [(one.module, name.name, name.asname or name.name) for one in imports for name in one.names]


def _multiplied(source: str, spans: list[tuple[int, int]]) -> str:
    for start, end in sorted(spans, reverse=True):
        source = f"{source[:start]}({TIMES} * {source[start:end]}){source[end:]}"
    return source


@dataclass(slots=True)
class _Uses:
    """The places of a file that read a bound."""

    path: str
    source: str
    module: str
    name: str

    def spans(self) -> Iterator[tuple[int, int]]:
        """Where they are, in characters."""
        dotted = self.module.removesuffix(".py").replace("/", ".")
        package, _, last = dotted.rpartition(".")
        own, modules = {self.name} if self.path == self.module else set(), {dotted}
        tree, imports = _read(self.source)
        for where, name, known_as in imports:
            if (where, name) == (dotted, self.name):
                own.add(known_as)
            elif (where, name) == (package, last):
                modules.add(known_as)
        yield from self._within(tree, own, modules)

    def _within(self, node: ast.AST, own: set[str], modules: set[str]) -> Iterator[tuple[int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.Module) and isinstance(child, ast.Assert):
                continue
            if isinstance(child, ast.JoinedStr):
                yield from self._in_text(child, own)
            elif isinstance(child, ast.Name | ast.Attribute) and self._is_read(child, own, modules):
                yield self._span(child)
            else:
                yield from self._within(child, own, modules)

    def _is_read(self, node: ast.Name | ast.Attribute, own: set[str], modules: set[str]) -> bool:
        if isinstance(node, ast.Name):
            return node.id in own and isinstance(node.ctx, ast.Load)
        is_own = self.path == self.module and ast.unparse(node.value) == "self"
        return node.attr == self.name and (is_own or ast.unparse(node.value) in modules)

    def _in_text(self, node: ast.JoinedStr, own: set[str]) -> Iterator[tuple[int, int]]:
        """A raw text is a regular expression, and no message. A message may show what is cut to the bound.
        Before Python 3.12 the parser does not say where the parts of such a text are."""
        start, end = self._span(node)
        text, names = self.source[start:end], "|".join(own) or "(?!)"
        is_raw = text[:2].lower() in ("rf", "fr")
        for found in re.finditer(rf"(?<!\{{)\{{({names})\}}" if is_raw else rf"\[:({names})\]", text):
            yield start + found.start(1), start + found.end(1)

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        lines = self.source.split("\n")
        return sum(len(text) + 1 for text in lines[: line - 1]) + len(
            lines[line - 1].encode()[:column].decode()
        )
