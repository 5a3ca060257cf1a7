"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("penstock", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("penstock")
