"""The bench of recording: with its book a step leaves a record, without it none, and both are measured."""

from __future__ import annotations

import pytest

from engine.api.told.steps import StepRing
from engine.core.step.results import StepBook
from tests.bench.engine import recording


def test_a_round_of_each_is_measured_in_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[int] = []
    monkeypatch.setattr(recording, "PAIRS", 2)
    monkeypatch.setattr(recording, "STEPS", 5)
    monkeypatch.setattr(StepRing, "push", lambda _, step: pushed.append(step.number))
    with_us, without_us = recording.host_us(3)
    assert len(with_us) == len(without_us) == 2
    assert min(*with_us, *without_us) > 0
    assert pushed == [*range(1, 26)] * 2, "of the rounds with a book alone"
    assert issubclass(recording.NoBook, StepBook)
