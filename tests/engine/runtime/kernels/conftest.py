"""Kernels run in Triton's interpreter here, on CPU tensors, in float32 and float16.

The interpreter is chosen when Triton is imported, so this has to come before anything imports it. bfloat16 is
left to the GPU: the interpreter computes it wrongly and says nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton came before its mode"
os.environ["TRITON_INTERPRET"] = "1"

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Older Tritons convert arrays in ways that newer NumPys frown at."""
    frown = pytest.mark.filterwarnings("ignore::DeprecationWarning:triton.runtime.interpreter")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(frown)
