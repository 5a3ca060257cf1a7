"""Kernels run in Triton's interpreter here, on CPU tensors, in float32 and float16.

tests/conftest.py chose the interpreter. bfloat16 is left to the GPU: the interpreter computes it wrongly and
says nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine.runtime.kernels.interpreter import prepare_interpreter

HERE = Path(__file__).parent

prepare_interpreter()


def frown_upon(items: list[pytest.Item], below: Path) -> None:
    """Older Tritons convert arrays in ways that newer NumPys frown at."""
    frown = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")
    within = f"{below}{os.sep}"
    for item in items:
        if str(item.path).startswith(within):
            item.add_marker(frown)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    frown_upon(items, HERE)
