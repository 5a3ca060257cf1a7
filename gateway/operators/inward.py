"""Connections of the gateway to itself: pairs of sockets within the process, served as the public listener's.

So a chat of the console's is a request like any other, from its headers to its completed line: admission,
quotas, routing and relay are the same code, and there is no port that others could reach.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import aiohttp
from aiohttp import ClientRequest, ClientTimeout
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace


class Inward(aiohttp.BaseConnector):
    """A connector whose connections are all to this process."""

    def __init__(self, serve: Callable[[], asyncio.Protocol]) -> None:
        """`serve` makes the server's protocol of a connection."""
        super().__init__(force_close=True)
        self._serve: Final = serve

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> ResponseHandler:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        with _closed_on_failure(ours):
            with _closed_on_failure(theirs):
                await loop.connect_accepted_socket(self._serve, theirs)
            _, protocol = await loop.create_unix_connection(self._factory, sock=ours)
        assert isinstance(protocol, ResponseHandler)
        return protocol


@contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    """Close a socket that no transport has taken over, as when the chat is ended meanwhile."""
    try:
        yield
    except BaseException:
        sock.close()
        raise
