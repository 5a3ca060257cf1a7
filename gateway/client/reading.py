"""The reading of bodies in turns, shared fairly between tenants.

A large body is read in pieces of 256 KiB, and a loop that finds a piece on each of a hundred connections is
held for as long as all of them take. So a connection that has received a large piece reads on in its tenant's
turn (`shared.fairness.fair_turns`). That holds for what is dropped of a refused request's body as well.
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
