"""The bench of the public listener: what it measures, and its statistics."""

from __future__ import annotations

import argparse
import random

import pytest

from gateway.bench import edge


async def test_refusals_are_measured_on_a_gateway_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "LARGE", edge.AT_ONCE)
    options = argparse.Namespace(rows=["large", "json", "keys"], samples=500)
    figures = {figure.name: figure for figure in await edge.run(options)}
    assert len(figures) == 1 + len(edge.HOSTILE) + 4 + 2
    assert all(figure.value is not None and figure.value >= 0 for figure in figures.values())


def test_welchs_t_tells_a_difference_from_noise() -> None:
    draw = random.Random(7)
    one, same, other = ([round(draw.gauss(mean, 50)) for _ in range(20_000)] for mean in (900, 900, 905))
    assert abs(edge.welch_t(one, same)) < 4.5
    assert abs(edge.welch_t(one, other)) > 4.5
