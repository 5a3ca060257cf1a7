"""Newcomers that have arrived, and of which a step takes in a few, tenants in turns.

Taking one in costs the host some 40 us, and for each token of its prompt 100 ns, or 7 ns where another choice
has brought the prompt: its page identities are computed, its prefix is looked up. A tenant that sends a
thousand at once would hold up everybody's next token by that, and whoever comes meanwhile. So they wait here,
and before each step as many are taken in as `TAKEN_MAX` and `TAKEN_TOKENS_MAX` allow: one of each tenant,
then another of each. A tenant's own come in the order in which they were sent. One that is aborted here goes
no further.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from engine.core.queue.newcomers import AddSequence

TAKEN_MAX: Final = 64
"""Newcomers of one step: 2 to 3 ms of the host's time."""
TAKEN_TOKENS_MAX: Final = 128 * 1024
"""Tokens of their prompts after which no other is taken in before the step."""


class Intake:
    """The newcomers that wait. The API process bounds their number: they count for its waiting queue.

    The time here is part of the hand-over: a few steps, and none for a tenant that sends no more than its
    turns. It counts against a deadline for a first token.
    """

    def __init__(self) -> None:
        self._of_tenant: dict[str, deque[int]] = {}
        """Handles by tenant; the tenant whose turn it is comes first. Those that were taken by name or
        dropped stay until their turn."""
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
        self._of_tenant.setdefault(newcomer.tenant, deque()).append(newcomer.handle)

    def take(self, now: float) -> list[AddSequence]:
        """Those of the next step, with what is left of the time for their first tokens: nothing, or less,
        where they waited longer."""
        taken: list[AddSequence] = []
        tokens = 0
        while self._of_tenant and len(taken) < TAKEN_MAX and tokens < TAKEN_TOKENS_MAX:
            tenant = next(iter(self._of_tenant))
            handles = self._of_tenant.pop(tenant)
            handle = handles.popleft()
            if handles:
                self._of_tenant[tenant] = handles
            for newcomer in self.take_named((handle,), now):
                taken.append(newcomer)
                tokens += len(newcomer.prompt_ids)
        return taken

    def take_named(self, handles: Iterable[int], now: float) -> list[AddSequence]:
        """Those of these handles that wait here, as `take` has them: something is said of them, which
        presupposes them."""
        waited = [self._waiting.pop(handle) for handle in handles if handle in self._waiting]
        return [_after(now - came_at, newcomer) for newcomer, came_at in waited]

    def drop(self, handles: Iterable[int]) -> list[int]:
        """Forget those of these handles that wait here. Returns them."""
        return [handle for handle in handles if self._waiting.pop(handle, None) is not None]

    def lift_deadlines(self, handles: Iterable[int]) -> None:
        """Let the first tokens of those of these handles that wait here come at any time."""
        for handle in handles:
            if (entry := self._waiting.get(handle)) is not None:
                newcomer, came_at = entry
                self._waiting[handle] = msgspec.structs.replace(newcomer, first_token_s=math.inf), came_at


def _after(waited_s: float, newcomer: AddSequence) -> AddSequence:
    """A newcomer that has waited for so long."""
    if newcomer.first_token_s == math.inf or not waited_s:
        return newcomer
    return msgspec.structs.replace(newcomer, first_token_s=newcomer.first_token_s - waited_s)
