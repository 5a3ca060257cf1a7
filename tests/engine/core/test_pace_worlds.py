"""A few of the random worlds of `tests.pace_worlds`, some of each kind; by command, all of every kind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.effort import IS_WHOLE
from tests.pace_worlds import KINDS, run_world

pytestmark = pytest.mark.slow

SEEDS = (1160, 25, 75, 209, 242, 1118, 915, 716, 924, 200, 201)
"""The first nine broke a law once, without drafts."""
DRAFTED = (0, 2, 6, 11)
"""They broke one where streams drafted."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_of_a_steps_time_hold_in_random_worlds(kind: str) -> None:
    seeds: Sequence[int] = SEEDS if IS_WHOLE else SEEDS[1::4]
    if "drafts" in KINDS[kind]:
        seeds = (*SEEDS, *DRAFTED) if IS_WHOLE else DRAFTED
    seen = [run_world(seed, **KINDS[kind]) for seed in seeds]
    assert sum(each.mixed for each in seen) > 50 * len(seeds)
    assert "drafts" not in KINDS[kind] or all(each.drafted > 100 for each in seen)
