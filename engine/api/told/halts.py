"""The times in which a sequence was not computed, as the API process sees them: it was preempted, or paused
because its client did not read. They do not overlap: while it is paused, nothing else holds it up.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from engine.api.told.attribution import Interruption, preemption_code
from engine.api.told.steps import StepRing
from engine.contract.messages import Move
from shared.wire.causes import CauseCode


class _Halt(Struct, frozen=True):
    """A time in which a sequence is not computed, from its beginning on."""

    code: CauseCode
    since: float
    after: int
    """The number of the last step before it."""


class Halts:
    """The halts of one sequence."""

    __slots__ = (
        *("_halt", "_over", "_preempted", "_preempted_s", "_ring", "_stalled_s"),
        *("is_paused", "preemptions", "swaps"),
    )

    def __init__(self, ring: StepRing) -> None:
        self._ring: Final = ring
        self._halt: _Halt | None = None
        """The halt that is not over."""
        self._over: list[tuple[_Halt, float, bool]] = []
        """Halts that are over, after which no token has come yet, with their seconds, and whether pages came
        back from host memory at their ends."""
        self._preempted: CauseCode | None = None
        """The reason for which it was preempted; None when it is not."""
        self.is_paused = False
        self._preempted_s = self._stalled_s = 0.0
        self.preemptions = self.swaps = 0
        """Preemptions while it ran, and those of them after which pages came back from host memory."""

    @property
    def is_preempted(self) -> bool:
        return self._preempted is not None

    def stalled_s(self, now: float) -> float:
        halt = self._halt
        return self._stalled_s + (now - halt.since if halt is not None and self.is_paused else 0.0)

    def preempted_s(self, now: float) -> float:
        halt = self._halt
        return self._preempted_s + (now - halt.since if halt is not None and not self.is_paused else 0.0)

    def pause(self, now: float) -> None:
        assert not self.is_paused
        self._end(now)
        self.is_paused = True
        self._begin(CauseCode.STALLED, now)

    def resume(self, now: float) -> None:
        assert self.is_paused
        self._end(now)
        self.is_paused = False
        if self._preempted is not None:
            self._begin(self._preempted, now)

    def moved(self, move: Move, swapped: bool, now: float) -> None:
        if move is Move.READMITTED:
            self.swaps += swapped and self._preempted is not preemption_code(Move.PREEMPTED_STALLED)
            self._preempted = None
        else:
            self._preempted = preemption_code(move)
            self.preemptions += move is not Move.PREEMPTED_STALLED
        if self.is_paused:
            return
        self._end(now, swapped)
        if self._preempted is not None:
            self._begin(self._preempted, now)

    def take_over(self, now: float, *, is_last: bool) -> list[Interruption]:
        """The halts that are over, now that a token has come; with `is_last` that which is not over, too."""
        if is_last:
            self._end(now)
        over, self._over = self._over, []
        last = self._ring.last.number
        return [Interruption(h.code, seconds, h.after, last, swapped) for h, seconds, swapped in over]

    def _begin(self, code: CauseCode, now: float) -> None:
        self._halt = _Halt(code, now, self._ring.last.number)

    def _end(self, now: float, swapped: bool = False) -> None:
        halt, self._halt = self._halt, None
        if halt is None:
            return
        self._over.append((halt, now - halt.since, swapped))
        if self.is_paused:
            self._stalled_s += now - halt.since
        else:
            self._preempted_s += now - halt.since

    def __bool__(self) -> bool:
        """True if a halt is over and no token has come since."""
        return bool(self._over)
