"""The interface between the engine's handlers and the server that speaks HTTP to the client.

Handlers know these two protocols and nothing of the server behind them, so that one set of handlers serves
HTTP/1.1 and HTTP/2 alike.

Rules.

1. A handler either sends one whole answer (`send`), or starts a stream, writes, and finishes it.
2. `write` returns when the bytes are on their way to a client that keeps up: awaiting it is how a handler
   feels a slow client.
3. A disconnect cancels the handler's task at any await, or raises `ClientGone` from a write, whichever comes
   first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class ClientGone(Exception):
    """The client closed its end before the answer was complete."""


class HttpRequest(Protocol):
    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str:
        """The path, percent-decoded and without the query."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, looked up without regard to case."""
        ...

    async def body(self, *, len_max: int, deadline_s: float, hold: Callable[[int], None] = ...) -> bytes:
        """Read the whole body.

        `hold` is called with the bytes that are held, and raises when they are too many. Raises BodyTooLarge
        as soon as the bound is passed, BodyTimeout at the deadline, InvalidRequest when the framing or the
        encoding is wrong.
        """
        ...


class Responder(Protocol):
    @property
    def started(self) -> bool:
        """True if a status has been sent, so that none can be sent any more."""
        ...

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None: ...

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None: ...

    def report(self, data: bytes) -> None:
        """Send the service's report on this request to a peer that takes reports (a gateway over HTTP/2),
        also when it has reset the stream. At most a few kilobytes, once, after all other writes."""
        ...

    def tell_load(self, data: bytes) -> None:
        """Tell a peer that takes reports the service's load, which has this request in it."""
        ...

    def abort(self) -> None:
        """End the answer at once, without what the client has not read: over HTTP/1.1 the connection is
        closed, over HTTP/2 the stream is reset. A task that waits in another method is cancelled, or gets
        ClientGone."""
        ...
