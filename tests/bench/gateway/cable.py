"""A relay of bytes to a server, for benches in which the way to it fails."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final


class Cable:
    """A relay to a port of this machine, on a port of its own.

    It can be cut: then it passes nothing on, either way, and closes nothing, until it is mended. It can be
    long: then what the server says arrives late.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port: Final = server_port
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay_s = 0.0
        """The time that the server's bytes take."""

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._passes.clear()

    def mend(self) -> None:
        self._passes.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.close()
            return
        for source, sink, is_answer in ((reader, other_writer, False), (other_reader, writer, True)):
            task = asyncio.create_task(self._pass(source, sink, is_answer=is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._passes.wait()
                if is_answer and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        sink.close()
