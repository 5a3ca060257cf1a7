"""Bodies that come on many connections at once are read in turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from aiohttp import web

from gateway.client.connection import ReadsInTurn, serves
from shared.fairness.fair_turns import BEGIN_MAX, FairTurns
from shared.process.listening import LINGER_S

PIECE_LEN: Final = 256 * 1024
"""Bytes that a loop reads of a socket at once."""
PIECES: Final = 4
FLOOD: Final = 16 * BEGIN_MAX
HEAD: Final = b"POST / HTTP/1.1\r\nhost: here\r\nx-tenant: %b\r\ncontent-length: %d\r\n\r\n"


class _Reader(ReadsInTurn):
    """A connection that notes when it reads on."""

    def __init__(self, room: _Room, server: web.Server, **options: Any) -> None:
        super().__init__(server, room.turns, lingering_time=LINGER_S, **options)
        self._room = room

    def _resume_transport_reading(self) -> None:
        self._room.note(self.tenant)
        super()._resume_transport_reading()


class _Room:
    """A server that reads bodies, and drops those of the tenant `refused`, and counts the loop's turns."""

    def __init__(self) -> None:
        self.turns = FairTurns()
        self.turn = 0
        self.read_on: list[tuple[int, str]] = []
        """The turn and the tenant of each time that a connection read on."""
        self.lengths: list[int] = []
        self.flooded = asyncio.Event()

    def note(self, tenant: str) -> None:
        self.read_on.append((self.turn, tenant))
        if len(self.read_on) == FLOOD:
            self.flooded.set()

    def count(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self.count)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        tenant = request.headers["x-tenant"]
        serves(request, tenant)
        if tenant == "refused":
            return web.Response(status=429)
        length = 0
        while piece := await request.content.readany():
            length += len(piece)
        self.lengths.append(length)
        return web.Response()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[_Room, int]]:
    room, loop = _Room(), asyncio.get_running_loop()
    server = web.Server(room.handle)
    listening = await loop.create_server(
        lambda: _Reader(room, server, loop=loop), "127.0.0.1", 0, backlog=2 * FLOOD
    )
    loop.call_soon(room.count)
    try:
        yield room, listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        await server.shutdown(0)


async def send(port: int, tenant: str, pieces: int = PIECES) -> bytes:
    """Send a body; returns the status line of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = bytes(pieces * PIECE_LEN)
        writer.write(HEAD % (tenant.encode(), len(body)) + body)
        await writer.drain()
        return await reader.readline()
    finally:
        writer.close()


@pytest.mark.parametrize("tenant", ["flood", "refused"])
async def test_no_turn_of_the_loop_reads_on_more_than_its_part_of_many_bodies(tenant: str) -> None:
    async with served() as (room, port):
        async with asyncio.timeout(60):
            lines = await asyncio.gather(*(send(port, tenant) for _ in range(FLOOD)))
        status = b"429" if tenant == "refused" else b"200"
        assert all(line.split()[1] == status for line in lines)
        most = Counter(turn for turn, _ in room.read_on)
        assert max(most.values()) <= 2 * BEGIN_MAX  # some of those that waited, and some that came
        assert len(room.read_on) > 2 * BEGIN_MAX
        if tenant == "flood":
            assert room.lengths == [PIECES * PIECE_LEN] * FLOOD


async def test_a_body_is_read_beside_a_flood_of_another_tenant_in_its_own_turns() -> None:
    async with served() as (room, port):
        async with asyncio.timeout(60):
            flood = [asyncio.create_task(send(port, "flood")) for _ in range(FLOOD)]
            await room.flooded.wait()
            await send(port, "victim")
            assert not any(task.done() for task in flood)
            await asyncio.gather(*flood)


async def test_a_connection_that_is_lost_takes_no_turn() -> None:
    async with served() as (room, port):
        async with asyncio.timeout(60):
            tasks = [asyncio.create_task(send(port, "flood", 4 * PIECES)) for _ in range(FLOOD)]
            await room.flooded.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (await send(port, "victim")).split()[1] == b"200"
