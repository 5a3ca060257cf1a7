"""What holds for every test."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path

import pytest
import trustme
from hypothesis import settings

# Triton chooses between its interpreter and a GPU when it is imported, and torch may import it at any time.
os.environ["TRITON_INTERPRET"] = "1"

# Every client and every gateway reads whom its machine trusts: 40 ms of CPU each time, and more than half of
# what the gateway's tests took. Here the machine trusts one authority, of which nobody has a certificate.
_trusted = tempfile.NamedTemporaryFile(suffix=".pem")  # noqa: SIM115 -- for as long as the process lives
_trusted.write(trustme.CA().cert_pem.bytes())
_trusted.flush()
atexit.register(_trusted.close)
os.environ["SSL_CERT_FILE"] = _trusted.name

settings.register_profile("penstock", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("penstock")


@pytest.fixture
def short_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The name of a Unix socket may have 107 bytes."""
    return tmp_path_factory.mktemp("s")
