"""A few of the random worlds of `tests.pace_worlds`, a quarter in each loop; by command, all in both."""

from __future__ import annotations

import pytest

from tests.effort import IS_WHOLE
from tests.pace_worlds import run_world

pytestmark = pytest.mark.slow

SEEDS = (1160, 25, 75, 209, 242, 1118, 915, 716, 924, 200, 201)
"""The first nine broke a law once."""


@pytest.mark.parametrize("overlap", [False, True])
def test_the_laws_of_a_steps_time_hold_in_random_worlds(overlap: bool) -> None:
    seeds = SEEDS if IS_WHOLE else SEEDS[overlap::4]
    assert sum(run_world(seed, overlap=overlap).mixed for seed in seeds) > 50 * len(seeds)
