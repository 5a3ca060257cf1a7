"""Kernels run in Triton's interpreter here, as in ../kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runtime.kernels.conftest import frown_upon

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    frown_upon(items, HERE)
