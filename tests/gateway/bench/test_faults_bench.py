"""The bench of faults: its statistics, and its engines."""

from __future__ import annotations

import pytest

from tests.bench.gateway import faults


def test_the_time_to_recover_is_when_slow_first_events_end() -> None:
    before = [(-i / 100, 0.05) for i in range(1, 300)]
    well = [(i / 100, 0.06) for i in range(900)]
    assert faults.recovered_s([*before, *well]) == 0.0
    slow = [(i / 100, 3.0 if i < 150 else 0.06) for i in range(900)]
    assert faults.recovered_s([*before, *slow]) == pytest.approx(1.5)
    never = [(i / 100, 3.0) for i in range(900)]
    assert faults.recovered_s([*before, *never]) >= 8.5
    assert faults.recovered_s(slow) == pytest.approx(1.5), "a fault from the beginning on"
