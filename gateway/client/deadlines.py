"""One request's deadlines, and the one way in which others may end it.

A request passes through waits with different bounds: body, first token, between tokens, slow
client, and a total over all. A timer per wait would cost more than the wait's work, so there is one
timer, and moving the deadline later only writes a number: when the timer fires early it is set
again. asyncio's own `timeout` sets a timer each time.

Rules:

1. When the deadline passes, or `end` is called, the task is cancelled once, and leaving the `with`
   block raises the reason, an `ApiError`, in place of CancelledError.
2. A cancellation from elsewhere (the client left) passes through as it is, and wins.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from types import TracebackType
from typing import Final, Self

from shared.wire.errors import ApiError, TotalTimeout

TOTALS_MAX: Final = 1024
"""The number of total times whose message is cached. Callers may set a total of their own."""


class Watch:
    """`with Watch(total_s) as watch:` around the awaits of the current task."""

    __slots__ = (
        "_deadline_s",
        "_error",
        "_first_look_at_s",
        "_loop",
        "_started_s",
        "_task",
        "_timer",
        "_total_at_s",
        "_total_error",
        "_within_s",
        "reason",
    )

    def __init__(self, total_s: float, soonest_s: float | None = None) -> None:
        """`soonest_s` is the shortest of the bounds that will be expected, as far as it is known. The
        timer is set for it at once, so that none of them has to set it anew."""
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._total_error = _total_error(total_s)
        self._total_at_s = self._deadline_s = self._started_s + total_s
        self._first_look_at_s = self._started_s + min(total_s, soonest_s or total_s)
        self._error: tuple[type[ApiError], str] = self._total_error
        self._within_s = total_s
        self.reason: ApiError | None = None
        """The error that ended the request. None while nothing has, and when its client left."""
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self._loop)
        assert self._task is not None
        self._timer = self._loop.call_at(self._first_look_at_s, self._fire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._timer is not None:
            self._timer.cancel()
        if self.reason is not None and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self.reason from None

    def bound(self, total_s: float) -> None:
        """Replace the total by another, counted from the same start. Only the total counts now."""
        self._total_error = _total_error(total_s)
        self._total_at_s = self._started_s + total_s
        self._move(self._total_at_s)

    def expect(self, within_s: float, error: type[ApiError], message: str) -> None:
        """Expect the next thing within `within_s` seconds, or within the total, whichever is
        sooner."""
        self._error, self._within_s = (error, message), within_s
        self._move(self._loop.time() + within_s)

    def again(self) -> None:
        """Note that the expected thing happened, and expect it anew within as long. Called for every
        event: the timer is later or right."""
        deadline_s = self._loop.time() + self._within_s
        if deadline_s < self._total_at_s:
            self._deadline_s = deadline_s
        else:
            self._deadline_s, self._error = self._total_at_s, self._total_error

    def relax(self) -> None:
        """Expect nothing but the end within the total."""
        self._deadline_s, self._error = self._total_at_s, self._total_error

    def end(self, reason: ApiError) -> None:
        """End the request now. Later calls, and calls after its end, change nothing."""
        if self._task is None or self.reason is not None:
            return
        self.reason = reason
        self._task.cancel()

    def _move(self, deadline_s: float) -> None:
        if deadline_s >= self._total_at_s:
            deadline_s, self._error = self._total_at_s, self._total_error
        sooner = deadline_s < self._deadline_s
        self._deadline_s = deadline_s
        if sooner and self._timer is not None and deadline_s < self._timer.when():
            self._timer.cancel()
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_at(self._deadline_s, self._fire)

    def _fire(self) -> None:
        if self._loop.time() < self._deadline_s:
            self._set_timer()
        else:
            error, message = self._error
            self.end(error(message))


@lru_cache(maxsize=TOTALS_MAX)
def _total_error(total_s: float) -> tuple[type[ApiError], str]:
    return TotalTimeout, f"The request did not finish within {total_s:g} s."
