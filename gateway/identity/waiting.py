"""The requests that wait for one issuer's keys: how many, whose, and in which order they go on.

A caller without any credential can make a request wait, by a token with a made-up key id. So a place among
those who wait is taken like a tenant's part of anything else (`shared.fairness.fair_share`): of who comes
from one address, or on a connection whose last request was of one tenant, three quarters of the places at
most. Who finds none is refused at once.

All of them are called together, when keys have come. Each then has an answer to write, so they go on a few in
each turn of the event loop, as requests begin (`shared.fairness.fair_turns`): between two turns all else goes
on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shared.fairness.fair_share import FairShare
from shared.fairness.fair_turns import BEGIN_MAX

WAITING_MAX: Final = 4096
"""The most requests that wait for one issuer's keys."""


class Waiting:
    """The requests that wait for one issuer's keys."""

    def __init__(self, most: int = WAITING_MAX) -> None:
        self._share: Final = FairShare(most)
        self._asleep: deque[asyncio.Future[None]] = deque()
        """The requests that wait for the next fetch to end."""
        self._called: Final[deque[asyncio.Future[None]]] = deque()
        """The requests that were called, and go on in turns."""

    def __len__(self) -> int:
        return self._share.held

    @contextmanager
    def place(self, whose: str) -> Iterator[bool]:
        """Take a place until the block is left. False where there is none."""
        has_place = self._share.acquire(whose, 1)
        try:
            yield has_place
        finally:
            if has_place:
                self._share.release(whose, 1)

    async def called(self, deadline_s: float) -> bool:
        """Wait until `call`, and for a turn after it. False where the loop's clock comes to `deadline_s`
        first."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asleep.append(turn)
        try:
            async with asyncio.timeout_at(deadline_s):
                await turn
        except TimeoutError:
            return False
        return True

    def call(self) -> None:
        """Let all who wait now go on, in turns."""
        is_calling = bool(self._called)
        self._called.extend(self._asleep)
        self._asleep.clear()
        if self._called and not is_calling:
            self._call_some()

    def _call_some(self) -> None:
        begun = 0
        while self._called and begun < BEGIN_MAX:
            turn = self._called.popleft()
            if not turn.done():
                turn.set_result(None)
                begun += 1
        if self._called:
            asyncio.get_running_loop().call_soon(self._call_some)
