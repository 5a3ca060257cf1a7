"""A quota store that other processes share may be slow, or gone; requests and leases must outlive that.

Rules

1. Every call is over within `CALL_TIMEOUT_S`.
2. A seat or a reservation that cannot be asked for is refused, with a 503 that asks for a retry: what is not
   reserved is not done.
3. Whatever else fails is told in the log and changes nothing: a request has the end that it has, though it
   could not be settled, and its lease lapses by itself.
4. `is_well` says whether the last call came back. Leases are renewed all the time, so it becomes true again
   without any request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, ParamSpec, TypeVar

from gateway.admission.quota import (
    Decision,
    QuotaStore,
    ReservationId,
    Settlement,
    Subject,
    Windows,
)
from gateway.shield import Done
from shared import logs
from shared.errors import QuotaUnavailable
from shared.metrics import Counter

CALL_TIMEOUT_S: Final = 2.0

log = logs.get(__name__)

P = ParamSpec("P")
T = TypeVar("T")

FAILURES: Final = Counter(
    "penstock_gateway_quota_store_failures", "Calls that the quota store did not answer.", ["call"]
)


class GuardedStore:
    """A `QuotaStore` around one that may fail. Answers that are there at once pass as they are."""

    def __init__(self, store: QuotaStore, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._store: Final = store
        self._timeout_s: Final = timeout_s
        self.is_well = True

    def enter(
        self, reservation: ReservationId, subjects: Sequence[Subject], *, needs_tokens: bool
    ) -> Awaitable[Decision]:
        """Raises QuotaUnavailable."""
        return self._ask(self._store.enter, reservation, subjects, needs_tokens=needs_tokens)

    def reserve(
        self, reservation: ReservationId, subjects: Sequence[Subject], least: int, most: int
    ) -> Awaitable[Decision]:
        """Raises QuotaUnavailable."""
        return self._ask(self._store.reserve, reservation, subjects, least, most)

    def settle(self, reservation: ReservationId, tokens: int) -> Awaitable[Settlement | None]:
        """None, too, when the store did not answer: the reserved tokens stay charged."""
        return self._or_else(None, self._store.settle, reservation, tokens)

    def renew(self, reservations: Sequence[ReservationId]) -> Awaitable[None]:
        return self._or_else(None, self._store.renew, reservations)

    def windows(self, subjects: Sequence[Subject]) -> Awaitable[Windows]:
        """Empty when the store did not answer."""
        return self._or_else(Windows(), self._store.windows, subjects)

    def _ask(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        answer = call(*args, **kwargs)
        return answer if isinstance(answer, Done) else self._bounded(answer, call.__name__)

    async def _bounded(self, answer: Awaitable[T], call: str) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await answer
        except Exception as error:
            self._failed(error, call)
            raise QuotaUnavailable(
                "Quotas cannot be asked for at the moment. Please try again.",
                retry_after_s=1.0,
                detail=f"{call}: {type(error).__name__}",
            ) from None
        if not self.is_well:
            self.is_well = True
            log.warning("quota.store_answers_again")
        return result

    def _or_else(
        self, default: T, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        answer = self._ask(call, *args, **kwargs)
        return answer if isinstance(answer, Done) else self._survived(default, answer)

    async def _survived(self, default: T, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except QuotaUnavailable:
            return default

    def _failed(self, error: Exception, call: str) -> None:
        FAILURES.inc(call)
        if self.is_well or call == "settle":  # each of which leaves tokens charged that were not used
            log.error("quota.store_failed", call=call, error=f"{type(error).__name__}: {error}"[:200])
        self.is_well = False
