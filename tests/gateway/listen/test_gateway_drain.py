"""A gateway that drains: what it accepts, what it finishes, and what its clients notice."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest

from shared.process.lifecycle import Phase
from tests.gateway.conftest import KEY, PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import chunk, stream, unary

DONE = b"data: [DONE]\n\n"
GET_READY = b"GET /readyz HTTP/1.1\r\nhost: a\r\n\r\n"
pytestmark = pytest.mark.hop("http2")


async def test_idle_connections_are_closed_and_new_ones_refused_at_once(open_house: Open) -> None:
    """Some have had an answer, some nothing yet, and one is accepted while the drain begins. No time limit of
    theirs closes them."""
    house: House = await open_house(timeouts={"head_s": 3600.0, "idle_s": 3600.0})
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    idle = [await asyncio.open_connection("127.0.0.1", house.gateway.port) for _ in range(3)]
    idle[0][1].write(GET_READY)
    assert b" 200 " in await idle[0][0].readline()
    async with house.chat(stream=True) as answer, asyncio.timeout(PATIENCE_S):
        await answer.content.readuntil(b"\n\n")
        idle.append(await asyncio.open_connection("127.0.0.1", house.gateway.port))
        drain = asyncio.create_task(house.gateway.drain())
        await until(lambda: house.gateway.lifecycle.phase is Phase.DRAINING)
        for reader, writer in idle:
            writer.write(GET_READY)
            with contextlib.suppress(ConnectionResetError):
                while line := await reader.readline():  # to its end: none is left hanging
                    assert not line.startswith(b"HTTP/1.1 200")
            writer.close()
        with pytest.raises(aiohttp.ClientConnectorError):
            await house.chat()
        assert not drain.done()
        go_on.set()
        assert (await answer.read()).endswith(DONE)
        assert await drain


async def test_a_load_balancer_has_time_to_notice(open_house: Open) -> None:
    """During the delay /readyz says no, and requests are served on connections that are then closed."""
    house: House = await open_house(timeouts={"drain_delay_s": 3600.0})
    house.engine.script = unary()
    hurry = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        drain = asyncio.create_task(house.gateway.drain(hurry))
        await until(lambda: house.gateway.lifecycle.phase is Phase.DRAINING)
        async with house.get("/readyz") as probe:
            assert (probe.status, probe.headers["connection"]) == (503, "close")
        async with house.chat() as answer:
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert not drain.done()
        hurry.set()
        assert await drain, "nothing was cut"


async def test_what_is_sent_on_a_busy_connection_after_the_drain_began_is_not_served(house: House) -> None:
    go_on = asyncio.Event()
    house.engine.script = stream(chunk("a"), go_on)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    body = b'{"model": "tiny", "stream": true, "messages": [{"role": "user", "content": "x"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n"
    request = (
        head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    async with asyncio.timeout(PATIENCE_S):
        writer.write(request)
        await reader.readuntil(chunk("a"))
        drain = asyncio.create_task(house.gateway.drain())
        await until(lambda: house.gateway.lifecycle.phase is Phase.DRAINING)
        writer.write(request)
        go_on.set()
        rest = await reader.read()
        assert DONE in rest
        assert b"HTTP/1.1 200" not in rest
        assert await drain
    writer.close()
    assert len(house.engine.seen) == 1


async def test_a_hurried_drain_ends_streams_with_an_error_that_says_so(house: House) -> None:
    house.engine.script = stream(chunk("a"), asyncio.Event())
    hurry = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), house.chat(stream=True) as answer:
        await answer.content.readuntil(b"\n\n")
        drain = asyncio.create_task(house.gateway.drain(hurry))
        await until(lambda: house.gateway.lifecycle.phase is Phase.DRAINING)
        assert not drain.done()
        hurry.set()
        assert b"gateway_stopped" in await answer.read()
        assert not await drain
    await house.at_rest()
