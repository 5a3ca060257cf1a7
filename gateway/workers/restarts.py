"""The rule by which dead workers are started again.

A worker that died is started after a pause, which doubles with each death of the same place in a row. One
place that cannot be filled costs nobody anything but its part of the capacity, so it is tried for ever. Where
about half of all places die as fast as they are filled, the fault is common to all, and whatever runs the
supervisor should know: then it gives up (a crash loop).
"""

from __future__ import annotations

from collections import deque
from typing import Final

PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 30.0
WINDOW_S: Final = 60.0
"""The time over which deaths are counted, and after which a worker that has lived counts as sound."""
DEATHS_MIN: Final = 8
"""The fewest deaths within `WINDOW_S` that are a crash loop: one place alone dies seven times at most."""
DEATHS_PER_WORKER: Final = 4


class Restarts:
    """The deaths of the workers so far."""

    def __init__(self, workers: int) -> None:
        self._deaths_max = max(DEATHS_MIN, DEATHS_PER_WORKER * workers)
        self._died_s: deque[float] = deque()
        self._pause_s = [PAUSE_S_MIN] * workers

    def died(self, index: int, lived_s: float, now_s: float) -> float | None:
        """Note a death, and return the pause until the next start, in seconds. None is a crash loop."""
        self._died_s.append(now_s)
        while self._died_s[0] <= now_s - WINDOW_S:
            self._died_s.popleft()
        if len(self._died_s) >= self._deaths_max:
            return None
        pause_s = PAUSE_S_MIN if lived_s >= WINDOW_S else self._pause_s[index]
        self._pause_s[index] = min(PAUSE_S_MAX, 2 * pause_s)
        return pause_s
