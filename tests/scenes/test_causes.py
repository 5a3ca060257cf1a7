"""Causes that are made through real processes: Why names each first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.scenes.causes import CAUSES, checked, opened

CHEAP = ("tokenizing", "grammar", "thinking", "handover")
"""Those that hold their request up for less than two seconds, and cost hardly more than the start."""


@pytest.mark.parametrize(
    "names", [CHEAP, pytest.param([*CAUSES], marks=pytest.mark.nightly)], ids=["cheap", "all"]
)
async def test_why_names_each_cause_first(names: Sequence[str]) -> None:
    async with opened() as house:
        problems = [await checked(house, name) for name in names]
    assert not any(problems), "\n".join(filter(None, problems))
