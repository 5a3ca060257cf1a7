"""The connections to one origin, and the queue of requests that wait for a stream.

Streams are assigned synchronously (`_serve`), whenever something changed: a stream ended, SETTINGS or GOAWAY
came, a connection was made or lost. Making a connection is a task of the pool's own, one at a time; no
request owns it, so a request that is cancelled cancels nothing else.

Rules.

1. The first connection with room is used, so that the connections that the load does not need fall idle and
   expire.
2. Requests wait in one queue; a stream is opened for the first of them as soon as there is room.
3. A connection is made only while requests wait, and there are never more than `connections_max`.
4. A failed connection attempt fails all waiting requests, unless there are connections left that will serve
   them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import httpx

from shared.http2.endpoint import ConnectionEndpoint
from shared.http2.headers import HeaderList
from shared.http2.phase import ConnectionPhase
from shared.http2.stream import Stream

WAITING_MAX: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A place in the queue, and what to open once there is room."""

    head: HeaderList
    end: bool
    connect_timeout_s: float | None
    opened: asyncio.Future[Stream]


class OriginPool:
    def __init__(
        self, connect: Callable[[OriginPool, float], Awaitable[ConnectionEndpoint]], connections_max: int
    ) -> None:
        """`connect` is called with the pool and the longest time that a waiting request allows for it, in
        seconds."""
        assert connections_max > 0
        self._connect = connect
        self._connections_max = connections_max
        self._waiting: deque[Place] = deque()
        self._connecting: asyncio.Task[None] | None = None
        self.endpoints: list[ConnectionEndpoint] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> bool:
        return bool(self.endpoints or self._waiting or self._connecting)

    def open_now(self, head: HeaderList, *, end: bool) -> Stream | None:
        """A stream on which `head` was sent. None when there is no room, or others wait for it."""
        if not self._waiting and (endpoint := self._with_room()) is not None:
            return endpoint.connection.open(head, end=end)
        return None

    async def open(
        self, head: HeaderList, *, end: bool, connect_timeout_s: float | None, pool_timeout_s: float | None
    ) -> Stream:
        """A stream on which `head` was sent, once its turn has come. Raises ConnectError, ConnectTimeout,
        PoolTimeout."""
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
        """Leave the queue. A stream that was opened for the place already is reset."""
        if place in self._waiting:
            self._waiting.remove(place)
        if place.opened.done() and not place.opened.cancelled() and place.opened.exception() is None:
            place.opened.result().reset()

    def changed(self) -> None:
        """Note that a connection has changed. Connections call it, at any time."""
        self.endpoints = [one for one in self.endpoints if one.connection.phase is not ConnectionPhase.CLOSED]
        self._serve()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        self._fail_waiting(httpx.ConnectError("the transport is closed"))
        for endpoint in list(self.endpoints):
            endpoint.close("the transport is closed")

    def _with_room(self) -> ConnectionEndpoint | None:
        for endpoint in self.endpoints:
            if endpoint.connection.streams_room > 0:
                return endpoint
        return None

    def _serve(self) -> None:
        while self._waiting:
            if self._waiting[0].opened.done():  # cancelled, and about to leave the queue
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
        """The number of connections that accept streams. Those that retire do not count; they end by
        themselves."""
        return sum(one.connection.phase is ConnectionPhase.OPEN for one in self.endpoints)

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
                place.opened.set_exception(type(error)(str(error)))  # its own: each gets a traceback
        self._waiting.clear()
