"""The docstrings below the fields of a dataclass, which Python itself does not keep."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


def field_docstrings(type_: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, each on one line, by the fields' names, inherited ones too.
    Empty where no source is installed."""
    found: dict[str, str] = {}
    for base in reversed(type_.__mro__):
        found |= _docstrings_in(base.__module__).get(base.__name__, {})
    return found


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of a module's classes, by the names of the classes and the fields."""
    found: dict[str, dict[str, str]] = {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # no source, or a module of the interpreter's own
        return found
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            texts = found[node.name] = {}
            for field, below in pairwise(node.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                        texts[name] = " ".join(text.split())
    return found
