"""The name and the version of this code."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Final

DISTRIBUTION: Final = "penstock-llm"
"""The name that pip installs it by. The one of that name without `-llm` is another project's."""
UNKNOWN: Final = "(not installed)"
"""The version of a checkout that was never installed."""


@cache
def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
