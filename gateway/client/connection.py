"""A client's connection, in what aiohttp leaves open: it is read in turns, and must itself be read in time.

Bodies are read in turns, shared fairly between tenants. A large body is read in pieces of 256 KiB, and a loop
that finds a piece on each of a hundred connections is held for as long as all of them take. So a connection
that has received a large piece reads on in its tenant's turn (`shared.fairness.fair_turns`). That holds for
what is dropped of a refused request's body as well.

A client must read what is written to its connection, whoever writes it. A request that is handled has a time
of its own (`gateway.client.answer`). But aiohttp writes some answers by itself: errors, probes. It waits
until they are read, for ever, and a connection that is closed ends once they are. So a connection of which
nothing is read is cut off after its time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from shared.fairness.fair_turns import FairTurns

BUFFER_LEN: Final = 32 * 1024
"""Half of the bytes beyond which what was received of a body pauses its connection."""


class ReadsInTurn(RequestHandler):
    """A connection of which bodies are read in turns."""

    __slots__ = ("_turn", "_turns", "tenant")

    def __init__(self, server: web.Server, turns: FairTurns, **options: Any) -> None:
        super().__init__(server, read_bufsize=BUFFER_LEN, **options)
        self.tenant = ""
        """The tenant whose request the connection serves, or served last; empty until it is known."""
        self._turns = turns
        self._turn: asyncio.Future[None] | None = None
        """The turn that the connection waits for. None where it waits for none."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading in the tenant's turn, if it was paused. aiohttp calls this after every read of a
        body, and would run its parser over nothing each time."""
        if not self._reading_paused or self._turn is not None:
            return
        self._turn = self._turns.ask(self.tenant)
        if self._turn is None:
            super().resume_reading(resume_parser)
        else:
            self._turn.add_done_callback(self._read_on)

    def _read_on(self, turn: asyncio.Future[None]) -> None:
        self._turn = None
        if self.transport is not None and not turn.cancelled():
            super().resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._turn is not None:
            self._turn.cancel()
        super().connection_lost(exc)


def serves(request: web.BaseRequest, tenant: str) -> None:
    """Take what the request's connection has still to do for it in this tenant's turns."""
    if isinstance(request.protocol, ReadsInTurn):
        request.protocol.tenant = tenant


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
        if transport is not None and self._unread_timer is None and _is_unread(transport):
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


def _is_unread(transport: asyncio.Transport) -> bool:
    try:
        return transport.get_write_buffer_size() > 0
    except AttributeError:  # asyncio's TLS, closed twice, has no buffer left, and says so in this way
        return False
