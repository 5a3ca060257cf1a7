"""How much the tests do: a part in every run, all by command, as `.ci/nightly` gives it.

    DRAWN=whole python -m pytest tests/engine/core/test_simulation.py tests/histories

A run of the suite has nine minutes on two cores. What is drawn from seeds finds most of what it finds in its
first hundreds, and the rest takes minutes. So every run draws a part, and leaves out the tests that are
marked `nightly`; whoever changes the scheduler, the relay, the accounts or the API runs all of theirs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

IS_WHOLE: Final = os.environ.get("DRAWN") == "whole"


def drawn(usual: int, whole: int) -> int:
    """The number to draw, or to try, in this run."""
    return whole if IS_WHOLE else usual


T = TypeVar("T")


def some(cases: Sequence[T], usual: int) -> Sequence[T]:
    """The cases to try in this run: the first few, or all."""
    return cases if IS_WHOLE else cases[:usual]
