"""Connections to one origin, and who gets a stream on which.

Decided synchronously (`_serve`), whenever something changed: a stream ended, SETTINGS or GOAWAY came, a
connection was made or lost. Making a connection is a task of the pool's own, one at a time; no request owns
it, so a request that is cancelled takes nothing down with it.

Rules.

1. The first connection with room is used, so that those which load does not need fall idle and expire.
2. Who waits, waits in one line; a stream is opened for the first in it at the moment that there is room.
3. A connection is asked for only while somebody waits, and never beyond `connections_max`.
4. Failing to connect fails everybody in line, unless there are connections left that will serve them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import httpx

from shared.http2.connection import Phase
from shared.http2.endpoint import Endpoint
from shared.http2.headers import HeaderList
from shared.http2.stream import Stream

WAITING_MAX: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A place in the line: what to open once there is room."""

    head: HeaderList
    end: bool
    connect_timeout_s: float | None
    opened: asyncio.Future[Stream]


class OriginPool:
    def __init__(
        self, connect: Callable[[OriginPool, float], Awaitable[Endpoint]], connections_max: int
    ) -> None:
        """`connect` is told for how long somebody is ready to wait, in seconds."""
        assert connections_max > 0
        self._connect = connect
        self._connections_max = connections_max
        self._waiting: deque[Place] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self.endpoints: list[Endpoint] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> bool:
        return bool(self.endpoints or self._waiting or self._connecting)

    def open_now(self, head: HeaderList, *, end: bool) -> Stream | None:
        """A stream on which `head` was sent, if there is room and nobody waits for it."""
        if not self._waiting and (endpoint := self._with_room()) is not None:
            return endpoint.connection.open(head, end=end)
        return None

    async def open(
        self, head: HeaderList, *, end: bool, connect_timeout_s: float | None, pool_timeout_s: float | None
    ) -> Stream:
        """The same, in turn, once there is room. Raises ConnectError, ConnectTimeout, PoolTimeout."""
        if len(self._waiting) >= WAITING_MAX:
            raise httpx.PoolTimeout("too many requests wait for a stream")
        place = Place(head, end, connect_timeout_s, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._serve()
        connected = bool(self.endpoints)
        try:
            async with asyncio.timeout(pool_timeout_s if connected else connect_timeout_s):
                return await place.opened
        except TimeoutError:
            self._leave(place)
            if connected:
                raise httpx.PoolTimeout("no stream became free in time") from None
            raise httpx.ConnectTimeout("no connection in time") from None
        except asyncio.CancelledError:
            self._leave(place)
            raise
        finally:
            del place  # it may hold an error, whose traceback holds this frame

    def _leave(self, place: Place) -> None:
        """A stream that was opened for somebody who has just left is closed again."""
        if place in self._waiting:
            self._waiting.remove(place)
        if place.opened.done() and not place.opened.cancelled() and place.opened.exception() is None:
            place.opened.result().reset()

    def changed(self) -> None:
        """Something happened to a connection; called by it, at any time."""
        self.endpoints = [one for one in self.endpoints if one.connection.phase is not Phase.CLOSED]
        self._serve()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        self._fail_waiting(httpx.ConnectError("the transport is closed"))
        for endpoint in list(self.endpoints):
            endpoint.close("the transport is closed")

    def _with_room(self) -> Endpoint | None:
        for endpoint in self.endpoints:
            if endpoint.connection.streams_room > 0:
                return endpoint
        return None

    def _serve(self) -> None:
        while self._waiting:
            if self._waiting[0].opened.done():  # cancelled, and about to leave
                self._waiting.popleft()
            elif (endpoint := self._with_room()) is not None:
                place = self._waiting.popleft()
                place.opened.set_result(endpoint.connection.open(place.head, end=place.end))
            else:
                break
        if self._waiting and self._connecting is None and self._live < self._connections_max:
            self._connecting = asyncio.get_running_loop().create_task(self._grow())

    @property
    def _live(self) -> int:
        """Those that retire make place for others; they end by themselves."""
        return sum(one.connection.phase is Phase.OPEN for one in self.endpoints)

    async def _grow(self) -> None:
        patience_s = max((place.connect_timeout_s or 0.0 for place in self._waiting), default=0.0)
        try:
            self.endpoints.append(await self._connect(self, patience_s))
        except httpx.TransportError as error:
            if not self._live:
                self._fail_waiting(error)
            return
        finally:
            self._connecting = None
        self.changed()

    def _fail_waiting(self, error: httpx.TransportError) -> None:
        for place in self._waiting:
            if not place.opened.done():
                place.opened.set_exception(type(error)(str(error)))  # one each, for their tracebacks
        self._waiting.clear()
