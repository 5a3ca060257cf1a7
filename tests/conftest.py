"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("penstock", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("penstock")


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The name of a Unix socket may have 107 bytes."""
    return tmp_path_factory.mktemp("s")
