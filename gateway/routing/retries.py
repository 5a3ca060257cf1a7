"""The budget of retries. Pure.

A replica that fails makes its requests go elsewhere. When all fail at once, retries would multiply the load
just when there is too little to carry it. So at most a part of a model's requests in progress may be retries
at a time; the floor lets a model with few requests retry at all.

A retry holds its place until its answer begins, or it fails. So does the second attempt of a hedged stream.
Hedges have three quarters of the places at most: a stream that would like to be faster keeps no request from
being answered at all. Asking another replica after one that was sent
nothing is no repetition and needs no place: no engine has worked for it, and each replica is tried once.
"""

from __future__ import annotations

from typing import Final

PART_PERCENT: Final = 20
FLOOR: Final = 3
HEDGES_PERCENT: Final = 75
"""The part of the places up to which hedges take any."""


class RetryBudget:
    """The retries of one model at one worker."""

    __slots__ = ("active", "retrying")

    def __init__(self) -> None:
        self.active = 0
        """The requests that are sent or answered."""
        self.retrying = 0
        """Those of them that are retries, or hedged, and whose answers have not begun."""

    @property
    def most(self) -> int:
        """The retries that there may be at a time."""
        return max(FLOOR, self.active * PART_PERCENT // 100)

    def take(self) -> bool:
        """Take a place for a retry, if one is left. `give_back` must follow."""
        if self.retrying >= self.most:
            return False
        self.retrying += 1
        return True

    def take_for_hedge(self) -> bool:
        """Take a place for a hedge, if one is left that hedges may have. `give_back` must follow."""
        return self.retrying < self.most * HEDGES_PERCENT // 100 and self.take()

    def give_back(self) -> None:
        assert self.retrying > 0
        self.retrying -= 1
