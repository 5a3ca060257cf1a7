"""The time in which a client must read what is written to its connection, whoever writes it.

A request that is handled has a time of its own (`gateway.client.answer`). But aiohttp writes some answers by
itself: errors, probes. It waits until they are read, for ever, and a connection that is closed ends once they
are. So a connection of which nothing is read is cut off after its time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web

from gateway.client.reading import ReadsInTurn
from shared.fairness.fair_turns import FairTurns


class EndsUnread(ReadsInTurn):
    """A connection that is cut off when its client does not read."""

    __slots__ = ("_are_handlers_timed", "_is_over", "_unread_s", "_unread_timer")

    def __init__(
        self,
        server: web.Server,
        turns: FairTurns,
        unread_s: float,
        *,
        are_handlers_timed: bool,
        **options: Any,
    ) -> None:
        """`are_handlers_timed` is true if the handler of a request limits this time by itself."""
        super().__init__(server, turns, **options)
        self._are_handlers_timed: Final = are_handlers_timed
        self._unread_s: Final = unread_s
        self._unread_timer: asyncio.TimerHandle | None = None
        """Cuts the connection off. None while nothing waits to be read."""
        self._is_over = False
        """True once the connection is closed, and ends when the rest was read."""

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._set_unread_timer(self.transport)

    def resume_writing(self) -> None:
        if not self._is_over:  # else part of the rest was read, and nobody would wait for the other
            self._end_unread_timer()
        super().resume_writing()

    async def start(self) -> None:
        """Answer the connection's requests, and close it."""
        transport = self.transport
        await super().start()
        self._bound_rest(transport)

    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        self._bound_rest(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_unread_timer()
        super().connection_lost(exc)

    def _bound_rest(self, transport: asyncio.Transport | None) -> None:
        """Bound the time of a connection that is closed, and ends once the rest was read."""
        self._is_over = True
        if transport is not None and self._unread_timer is None and transport.get_write_buffer_size():
            self._set_unread_timer(transport)

    def _set_unread_timer(self, transport: asyncio.Transport) -> None:
        self._unread_timer = self._loop.call_later(self._unread_s, self._cut_off, transport)

    def _end_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _cut_off(self, transport: asyncio.Transport) -> None:
        if self._are_handlers_timed and self._current_request is not None:
            self._set_unread_timer(transport)
        else:
            transport.abort()
