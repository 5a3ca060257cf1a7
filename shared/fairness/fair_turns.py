"""Turns of an event loop, shared fairly between tenants.

A loop runs all that is ready before it looks at its sockets again. Hundreds of requests that come together
would hold it for as long as all of them take to begin, and the tokens of running streams would wait for that.
So a request takes its turn before it begins, and a body that comes in many pieces before each.

Rules

1. In one turn of the loop at most `BEGIN_MAX` requests begin, or bodies are read on, or what else takes turns
   goes on. The others wait for one of the next turns; between two turns the loop does all else that is ready.
2. Tenants that wait go one after another, whatever the number of their requests. Within a tenant the one that
   came first goes first.
3. A request that was cancelled while it waited takes no turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

BEGIN_MAX: Final = 8
"""Requests that begin in one turn, or pieces that are read. Each takes a fraction of a millisecond, and
those that begin together leave in one write: a gateway with 1 took 1.25 times the CPU for unary requests."""


class FairTurns:
    """The turns of one loop. It may be made before the loop runs."""

    __slots__ = ("_begin_max", "_begun", "_is_turning", "_waiting")

    def __init__(self, begin_max: int = BEGIN_MAX) -> None:
        self._begin_max: Final = begin_max
        self._begun = 0
        """The number of requests that have begun in this turn."""
        self._is_turning = False
        """True if `_turn` is called in the next turn."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The requests that wait, by tenant; the tenant that goes next is first."""

    def ask(self, tenant: str) -> asyncio.Future[None] | None:
        """Ask for a turn in which the tenant's request may go on: None where this is one, else what is done
        when it comes. Who needs it no more cancels it."""
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)  # once in a turn: it asks the kernel who we are
        if self._begun < self._begin_max and not self._waiting:
            self._begun += 1
            return None
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waits)
        return waits

    def _turn(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._begin_max:
            self._begin_next()
        self._is_turning = self._begun > 0
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)

    def _begin_next(self) -> None:
        tenant = next(iter(self._waiting))
        those = self._waiting.pop(tenant)
        waits = those.popleft()
        if those:
            self._waiting[tenant] = those  # behind all others
        if not waits.done():
            waits.set_result(None)
            self._begun += 1
