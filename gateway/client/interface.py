"""What a request's stages know of its client: the connection, the body and the answer's way back.

aiohttp's objects have these shapes (`gateway.client.connection.ReadsInTurn`, its `StreamReader`,
`gateway.client.answer.Client`), so that nothing is wrapped; a caller that has no socket brings its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.client.blocked import BlockedSpan
from gateway.endpoints.dialect import Dialect
from shared.wire.errors import ApiError


class ClientConnection(Protocol):
    """The connection that a request came by."""

    tenant: str
    """The tenant whose request it serves, or served last; empty until it is known."""

    @property
    def transport(self) -> asyncio.BaseTransport | None:
        """What tells the peer's address and certificate; None where there is none, or not any more."""
        ...


class Body(Protocol):
    """A request's body, which is read in pieces."""

    def is_eof(self) -> bool:
        """True if all of it has come."""
        ...

    def at_eof(self) -> bool:
        """True if all of it has been read."""
        ...

    async def readany(self) -> bytes:
        """Wait for what comes next, at least one byte. Nothing at the end."""
        ...


class Outlet(Protocol):
    """The way back of an answer that begins, comes in pieces and is whole in the end. What raises ClientGone
    does so once nobody is left to read it."""

    is_chunked: bool
    """True if each piece of the answer is a chunk of HTTP/1.1."""

    async def begin(self, status: int, headers: Mapping[str, str], body: bytes, *, whole: bool) -> None:
        """Write the head and the first bytes of the body, or all of the body when `whole`. `headers` have the
        content's type and nothing of the framing. Raises ClientGone."""
        ...

    def write_nowait(self, data: bytes) -> bool:
        """Write `data`, which is not empty, at once. Returns whether there is room for more; where there is
        none, wait for `drain` first. Raises ClientGone."""
        ...

    def write_framed(self, data: bytes) -> bool:
        """Write a chunk with its framing, where `is_chunked`. Returns and raises as `write_nowait` does."""
        ...

    async def write(self, data: bytes) -> None:
        """Write, and wait for room. Raises ClientGone."""
        ...

    async def drain(self) -> None:
        """Wait until there is room again. Raises ClientGone."""
        ...

    async def finish(self) -> None:
        """End a whole answer. Raises ClientGone."""
        ...


class Sink(Outlet, Protocol):
    """The way back of a request's answer, whatever its end."""

    status: int | None
    """The status of an answer that has begun, which can no longer be changed. None until then."""
    finished: bool
    slow_client_s: float
    """The time within which what is written must be read, in seconds."""

    @property
    def blocked(self) -> Sequence[BlockedSpan]:
        """The times in which room was waited for."""
        ...

    @property
    def is_gone(self) -> bool:
        """True if nobody is left to read the answer."""
        ...

    async def go_on(self) -> None:
        """Tell a client that waits for it to send the body."""
        ...

    async def fail(self, error: ApiError, event: bytes | None) -> None:
        """End an answer that has begun and is not finished. `event` is the error event for a stream; None
        where no event may be appended. Raises ClientGone."""
        ...

    def refuse(self, error: ApiError, headers: Mapping[str, str], dialect: Dialect, *, closes: bool) -> None:
        """Answer with an error in a dialect, where no answer has begun. `closes`: no other request comes by
        the connection."""
        ...
