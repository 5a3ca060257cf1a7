"""The metrics that a PromQL expression reads, with the labels that it reads them by."""

from __future__ import annotations

import re
from typing import Final

from helm.make.boards.scope import PLACE

ADDED: Final = frozenset({"instance", *PLACE})
"""Labels that Prometheus adds when it scrapes."""
_SELECTOR: Final = re.compile(r"\b((?:penstock|process|python)_\w+)(?:\{([^{}]*)\})?")
_MATCHER: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUP: Final = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def read_by(expr: str) -> dict[str, frozenset[str]]:
    """By the name of each metric: the labels that its selector names, without those of the scrape."""
    found: dict[str, frozenset[str]] = {}
    for name, matchers in _SELECTOR.findall(expr):
        labels = frozenset(_MATCHER.findall(matchers)) - ADDED
        found[name] = found.get(name, frozenset()) | labels
    return found


def grouped_by(expr: str) -> frozenset[str]:
    """The labels that results are grouped by."""
    names = {name.strip() for names in _GROUP.findall(expr) for name in names.split(",")}
    return frozenset(names) - ADDED
