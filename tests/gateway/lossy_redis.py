"""A way to a Redis server on which the answers to changes of the directory get lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Literal

import hiredis

Loss = Literal["close", "stall"]
"""close: the connection is closed once the server has answered. stall: nothing more is passed on."""


class LossyRedis:
    """A relay of calls and answers to a server on this machine."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """What serves each connection."""
        self.port = 0
        self.losses: list[Loss] = []
        """What is to become of the next answers to changes."""
        self.at_loss: Callable[[], object] = lambda: None
        """Called when the server has answered, and nobody else knows."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        serving = asyncio.create_task(self._carry(reader, writer))
        self._open[serving] = writer
        serving.add_done_callback(self._open.pop)

    async def aclose(self) -> None:
        """Close all connections."""
        for writer in self._open.values():
            writer.close()
        if self._open:
            await asyncio.wait(self._open)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        changes: deque[bool] = deque()  # whether each call without an answer is one
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        asking = asyncio.create_task(self._ask(reader, server_writer, changes))
        with contextlib.suppress(OSError):
            if await self._answer(server_reader, writer, changes) == "stall":
                await asyncio.wait([asking])
        for one in (writer, server_writer):
            one.close()
            with contextlib.suppress(OSError):
                await one.wait_closed()
        await asking

    async def _ask(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, changes: deque[bool]
    ) -> None:
        calls = hiredis.Reader()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                calls.feed(data)
                while (call := calls.gets()) is not False:
                    changes.append(b"put" in call)
                server.write(data)
        server.close()

    async def _answer(
        self, server: asyncio.StreamReader, writer: asyncio.StreamWriter, changes: deque[bool]
    ) -> Loss | None:
        """Pass on what the server says, up to the first answer that is to be lost."""
        answers = hiredis.Reader()
        while data := await server.read(1 << 16):
            answers.feed(data)
            while answers.gets() is not False:
                if changes.popleft() and self.losses:
                    loss = self.losses.pop(0)
                    self.at_loss()
                    return loss
            writer.write(data)
        return None


@contextlib.asynccontextmanager
async def lossy_redis(server_port: int) -> AsyncIterator[LossyRedis]:
    """A relay that loses nothing until it is told to."""
    relay = LossyRedis(server_port)
    async with await asyncio.start_server(relay.carry, "127.0.0.1", 0) as server:
        relay.port = server.sockets[0].getsockname()[1]
        yield relay
        await relay.aclose()
