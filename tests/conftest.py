"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Triton chooses between its interpreter and a GPU when it is imported, and torch may import it at any time.
os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("penstock", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("penstock")


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The name of a Unix socket may have 107 bytes."""
    return tmp_path_factory.mktemp("s")
