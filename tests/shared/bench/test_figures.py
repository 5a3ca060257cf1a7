from __future__ import annotations

import math

import pytest

from tests.bench.figures import Target, at_least, at_most, exit_code, figure, quantile


@pytest.mark.parametrize(
    ("target", "value", "ok"),
    [
        (at_most(15), 15, True),
        (at_most(15), 15.01, False),
        (at_least(2), 2, True),
        (at_least(2), 1.99, False),
    ],
)
def test_a_target_is_met_at_its_bound(target: Target, value: float, ok: bool) -> None:
    assert figure("f", value, "us", target).ok is ok


def test_only_a_figure_that_falls_short_fails_the_check() -> None:
    good, told, short = (
        figure("a", 1, "ms", at_most(2)),
        figure("b", 9, "ms"),
        figure("c", 3, "ms", at_most(2)),
    )
    assert exit_code([good, told], check=True) == 0
    assert exit_code([good, short], check=False) == 0
    assert exit_code([good, short], check=True) == 1


def test_nan_meets_no_target() -> None:
    assert figure("f", math.nan, "ms", at_most(1)).ok is False


def test_quantile_by_nearest_rank() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(range(100), 0.99) == 99
    assert math.isnan(quantile([], 0.5))
