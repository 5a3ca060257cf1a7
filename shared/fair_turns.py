"""Turns of an event loop, shared fairly between tenants.

A loop runs all that is ready before it looks at its sockets again. Hundreds of requests that come together
would hold it for as long as all of them take to begin, and the tokens of running streams would wait for that.
So a request takes its turn before it begins, and a body that comes in many pieces before each.

Rules

1. In one turn of the loop one request begins, or one body is read on, or what else takes turns goes on. The
   others wait for one of the next turns; between two turns the loop does all else that is ready. So who comes
   waits for one beginning before it is looked at, and for one of each tenant before its own. A turn in which
   nothing else is ready costs microseconds: several in each turn would save little.
2. Tenants that wait go one after another, whatever the number of their requests. Within a tenant the one that
   came first goes first.
3. A request that was cancelled while it waited takes no turn.
"""

from __future__ import annotations

import asyncio
from collections import deque


class FairTurns:
    """The turns of one loop. It may be made before the loop runs."""

    __slots__ = ("_is_taken", "_waiting")

    def __init__(self) -> None:
        self._is_taken = False
        """True if a request has begun in this turn. Then `_turn` is called in the next one."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The requests that wait, by tenant; the tenant that goes next is first."""

    def ask(self, tenant: str) -> asyncio.Future[None] | None:
        """Ask for a turn in which the tenant's request may go on: None where this is one, else what is done
        when it comes. Who needs it no more cancels it."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._turn)
            return None
        waits: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(waits)
        return waits

    def _turn(self) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            self._is_taken = self._begin_next()
        if self._is_taken:
            asyncio.get_running_loop().call_soon(self._turn)

    def _begin_next(self) -> bool:
        """Let the next request go on. Returns False where it was cancelled."""
        tenant = next(iter(self._waiting))
        those = self._waiting.pop(tenant)
        waits = those.popleft()
        if those:
            self._waiting[tenant] = those  # behind all others
        if waits.done():
            return False
        waits.set_result(None)
        return True
