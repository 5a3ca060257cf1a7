"""The version of this code."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Final

UNKNOWN: Final = "(not installed)"
"""The version of a checkout that was never installed."""


@cache
def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
