"""Newcomers that have arrived, and of which a step takes in a few, tenants in turns.

Taking one in costs the host some 40 us: its page identities are computed, its prefix is looked up. A tenant
that sends a thousand at once would hold up everybody's next token by that, and whoever comes meanwhile. So
they wait here, and `TAKEN_MAX` are taken in before each step: one of each tenant, then another of each. A
tenant's own come in the order in which they were sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from engine.core.newcomers import AddSequence

TAKEN_MAX: Final = 64
"""Newcomers of one step: 2 to 3 ms of the host's time."""


class Intake:
    """The newcomers that wait. The API process bounds their number: they count for its waiting queue.

    The time here is part of the hand-over: a few steps, and none for a tenant that sends no more than its
    turns. It counts against a deadline for a first token.
    """

    def __init__(self) -> None:
        self._of_tenant: dict[str, deque[AddSequence]] = {}
        """Newcomers by tenant; the tenant whose turn it is comes first. Those that were taken by name stay
        until their turn."""
        self._waiting: dict[int, tuple[AddSequence, float]] = {}
        """Newcomers and when they came, by handle, in the order of their arrival."""
        self._newest = 0

    @property
    def newest(self) -> int:
        """The newest handle that has been taken in with all before it; 0: none."""
        return next(iter(self._waiting)) - 1 if self._waiting else self._newest

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, newcomer: AddSequence, now: float) -> None:
        self._newest = newcomer.handle
        self._waiting[newcomer.handle] = newcomer, now
        self._of_tenant.setdefault(newcomer.tenant, deque()).append(newcomer)

    def take(self, now: float) -> list[AddSequence]:
        """Those of the next step, with what is left of the time for their first tokens: nothing, or less,
        where they waited longer."""
        taken: list[AddSequence] = []
        while self._of_tenant and len(taken) < TAKEN_MAX:
            tenant = next(iter(self._of_tenant))
            newcomers = self._of_tenant.pop(tenant)
            newcomer = newcomers.popleft()
            if newcomers:
                self._of_tenant[tenant] = newcomers
            taken += self.take_named((newcomer.handle,), now)
        return taken

    def take_named(self, handles: Iterable[int], now: float) -> list[AddSequence]:
        """Those of these handles that wait here, as `take` has them: something is said of them, which
        presupposes them."""
        waited = [self._waiting.pop(handle) for handle in handles if handle in self._waiting]
        return [_after(now - came_at, newcomer) for newcomer, came_at in waited]


def _after(waited_s: float, newcomer: AddSequence) -> AddSequence:
    """A newcomer that has waited for so long."""
    if newcomer.first_token_s == math.inf or not waited_s:
        return newcomer
    return msgspec.structs.replace(newcomer, first_token_s=newcomer.first_token_s - waited_s)
