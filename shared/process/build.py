"""The name and the version of this code."""

from __future__ import annotations

import contextlib
import importlib.metadata
from functools import cache
from typing import Final

DISTRIBUTION: Final = "penstock-llm"
"""The name that pip installs it by. The one of that name without `-llm` is another project's."""
OF_GATEWAY: Final = f"{DISTRIBUTION}-gateway"
"""The distribution of a gateway alone."""
UNKNOWN: Final = "(not installed)"
"""The version of a checkout that was never installed."""


@cache
def version() -> str:
    """The version of the installed package."""
    for name in (DISTRIBUTION, OF_GATEWAY):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return UNKNOWN
