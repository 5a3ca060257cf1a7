"""Calls of a quota store, as tests make them, and the two stores under one clock."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.admission.quota import Decision, QuotaStore, ReservationId, Scope, Subject, Window
from gateway.admission.usage import Payer, Used
from gateway.config.quotas import QuotaLimits
from shared.wire.ids import TenantId
from tests.fakes import VirtualClock

Both = tuple[VirtualClock, QuotaStore]


def subject(id_: str = "k", scope: Scope = Scope.KEY, **limits: int | None) -> Subject:
    return of_limits(QuotaLimits(**limits), id_, scope)


def of_limits(limits: QuotaLimits, id_: str = "k", scope: Scope = Scope.KEY) -> Subject:
    return Subject(scope, id_, limits, TenantId("t"))


def remaining(window: Window | None) -> int:
    assert window is not None
    return window.remaining


def rid(name: object) -> ReservationId:
    return ReservationId(str(name))


async def take(
    store: QuotaStore,
    name: ReservationId,
    subjects: Sequence[Subject],
    least: int,
    most: int = 0,
    payer: Payer | None = None,
) -> Decision:
    """A seat, then tokens, as a request takes them. A request that is refused tokens ends, and gives its seat
    back."""
    decision = await store.enter(name, subjects, needs_tokens=least > 0)
    if decision.refusal is None and least:
        decision = await store.reserve(name, subjects, least, max(least, most), payer)
        if decision.refusal is not None:
            await store.settle(name, Used())
    return decision
