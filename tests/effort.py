"""How many worlds and histories the tests draw: a share of them in every run, and all by

    DRAWN=whole python -m pytest tests/engine/core/test_simulation.py tests/histories
    DRAWN=whole python -m pytest tests/gateway/test_openapi.py

The suite has 12 minutes on two cores. What is drawn from seeds finds most of what it finds in its first
hundreds, and the rest takes minutes. So every run of the suite draws these, and whoever changes the
scheduler, the relay, the accounts or the API draws all.
"""

from __future__ import annotations

import os
from typing import Final

IS_WHOLE: Final = os.environ.get("DRAWN") == "whole"


def drawn(usual: int, whole: int) -> int:
    """The number to draw in this run."""
    return whole if IS_WHOLE else usual
