"""The quotas that an answer tells where no reservation has looked at them: errors, lists of models, ends of
requests.

They are asked for once in `TOLD_S` for the same subjects, and told meanwhile as they stood: whoever sends
malformed bodies, or asks for what no quota counts, makes no more calls of a shared store than that.
"""

from __future__ import annotations

from typing import Final

from gateway.admission.quota import QuotaStore, Subject, Windows
from gateway.identity.bounded import BoundedDict
from shared.process.clock import Clock
from shared.process.shield import Done

TOLD_S: Final = 1.0
TOLD_MAX: Final = 1024
"""The subjects whose quotas are remembered."""


class ToldWindows:
    """The quotas of a store."""

    def __init__(self, store: QuotaStore, clock: Clock) -> None:
        self._store: Final = store
        self._clock: Final = clock
        self._told: Final[BoundedDict[tuple[Subject, ...], tuple[float, Windows]]] = BoundedDict(TOLD_MAX)
        """What was told last, and when it was asked for, in seconds."""

    async def of(self, subjects: tuple[Subject, ...]) -> Windows:
        """The quotas of these subjects."""
        now_s = self._clock.monotonic()
        told = self._told.get(subjects)
        if told is not None and now_s - told[0] < TOLD_S:
            return told[1]
        asked = self._store.windows(subjects)
        windows = await asked
        if not isinstance(asked, Done):  # nobody had to be called
            self._told.put(subjects, (now_s, windows))
        return windows
