"""The narrow waist between handlers and whatever speaks HTTP to the client.

Handlers know these two protocols and nothing of the server behind them, so that one set of handlers
serves HTTP/1.1 and HTTP/2 alike.

Rules.

1. A handler either sends one whole answer (`send`), or starts a stream, writes, and finishes it.
2. `write` returns when the bytes are on their way to a reader who keeps up: awaiting it is how a slow
   client is felt.
3. A client that leaves shows up as cancellation of the handler's task at any await, or as
   `ClientGone` from a write, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

CONNECTED: Final = "penstock.connected"
"""A request's extension, on the client's side: a callable, told when there is a connection, new or kept,
and before anything is sent on it. What fails before was not dispatched."""


class ClientGone(Exception):
    """The client closed its end while we were writing."""


class Request(Protocol):
    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str:
        """Percent-decoded, without the query."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Looked up without regard to case."""
        ...

    async def body(self, *, len_max: int, deadline_s: float, hold: Callable[[int], None] = ...) -> bytes:
        """All of it. `hold` is told how much of it is held, and raises when that is too much. Raises
        BodyTooLarge as soon as the bound is passed, BodyTimeout at the deadline, InvalidRequest when its
        framing or encoding is wrong."""
        ...


class Responder(Protocol):
    @property
    def started(self) -> bool:
        """Whether a status has been sent, so that none can be sent any more."""
        ...

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None: ...

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None: ...

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None: ...

    def report(self, data: bytes) -> None:
        """The service's last words on this request, to a peer who can hear them (a gateway over HTTP/2),
        also when it has reset the stream. At most a few kilobytes, once, when all else was said."""
        ...

    def abort(self) -> None:
        """The client will get no more, and loses what it has not read: to HTTP/1.1 the connection is cut,
        to HTTP/2 the stream is reset. Whoever waits in one of the above is cancelled, or gets ClientGone."""
        ...
