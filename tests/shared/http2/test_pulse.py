"""The pulse: a server that has stopped is noticed, and one that is slow, busy or idle is left alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine.api.http.http2_server import ServerRequest, ServerResponder
from gateway.relay.http2_client import CLIENT_WATCH, PING, ClientEndpoint, Http2Transport
from shared.http2 import frames
from shared.http2.connection_config import PulseConfig
from shared.http2.connection_errors import ConnectionLost
from tests.fakes import VirtualClock
from tests.shared.http2.loopback import EVENTS, Silent, client, endpoints, hello, listening, serving, until
from tests.shared.http2.test_client import Deaf

PULSE = PulseConfig(interval_s=1.0, timeout_s=3.0)
ASKED = frames.frame(frames.PING, 0, 0, PING)


def transport_at(clock: VirtualClock) -> Http2Transport:
    return Http2Transport(clock=clock, watch=replace(CLIENT_WATCH, pulse=PULSE))


async def beat(clock: VirtualClock, beats: int = 1) -> None:
    for _ in range(beats):
        await until(lambda: clock.sleeping == 2)  # the watch, and the pulse
        clock.advance(PULSE.interval_s)
        for _ in range(5):
            await asyncio.sleep(0)


async def connected(transport: Http2Transport, streams: int = 1) -> ClientEndpoint:
    await until(lambda: any(len(one.connection.streams) == streams for one in endpoints(transport)))
    return endpoints(transport)[0]


async def test_a_server_that_answers_nothing_is_dead_after_its_timeout() -> None:
    clock, deaf = VirtualClock(), Deaf(frames.settings({0x3: 100}))
    transport = transport_at(clock)
    async with listening(lambda: deaf) as listener, client(transport) as http:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        calls = [asyncio.create_task(http.get(url)) for _ in range(3)]
        endpoint = await connected(transport, 3)
        assert not transport.is_mute(url)
        await beat(clock)
        await until(lambda: deaf.heard.count(ASKED) == 1)
        assert not transport.is_mute(url)
        await beat(clock)
        await until(lambda: endpoint.is_mute)
        assert transport.is_mute(url), "no new requests for it"
        await beat(clock)
        assert not any(call.done() for call in calls)
        await beat(clock)
        for call in calls:
            with pytest.raises(ConnectionLost, match="PING"):
                await call
        assert deaf.heard.count(ASKED) == 1, "one question is enough"
        assert not transport.is_mute(url)


async def test_a_server_that_answers_pings_may_be_silent_for_long() -> None:
    clock = VirtualClock()
    transport = transport_at(clock)
    silent = Silent()
    async with serving(silent) as served, client(transport) as http:
        call = asyncio.create_task(http.get(served.url))
        await until(lambda: silent.running == 1)
        endpoint = await connected(transport)
        for _ in range(20):
            heard = endpoint.connection.receives
            await beat(clock)
            await until(lambda: endpoint.connection.receives > heard)  # noqa: B023
            assert not endpoint.is_mute
        assert not call.done()
        call.cancel()


async def test_one_whose_streams_move_is_asked_too_and_lives() -> None:
    clock, go_on = VirtualClock(), asyncio.Event()

    async def drip(_: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        while not go_on.is_set():
            await responder.write(b"data: x\n\n")
            await asyncio.sleep(0)
        await responder.finish()

    transport = transport_at(clock)
    async with serving(drip) as served, client(transport) as http:
        call = asyncio.create_task(http.get(served.url))
        endpoint = await connected(transport)
        for _ in range(5):
            heard = endpoint.connection.receives
            await until(lambda: endpoint.connection.receives > heard)  # noqa: B023
            await beat(clock)
            assert not endpoint.is_mute
        go_on.set()
        assert (await call).status_code == 200


async def test_an_idle_connection_is_not_asked() -> None:
    clock = VirtualClock()
    transport = transport_at(clock)
    async with serving(hello) as served, client(transport) as http:
        assert (await http.get(served.url)).status_code == 200
        (endpoint,) = endpoints(transport)
        heard = endpoint.connection.receives
        await beat(clock, 9)
        assert endpoint.connection.receives == heard
        assert not transport.is_mute(served.url)
        assert not transport.is_mute("http://127.0.0.1:9"), "unknown"


async def test_a_client_that_was_held_up_itself_does_not_blame_the_server() -> None:
    """However long it was, one beat is gone, and the answer is read before the next."""
    clock = VirtualClock()
    transport = transport_at(clock)
    silent = Silent()
    async with serving(silent) as served, client(transport) as http:
        call = asyncio.create_task(http.get(served.url))
        await until(lambda: silent.running == 1)
        endpoint = await connected(transport)
        for _ in range(3):
            await until(lambda: clock.sleeping == 2)
            heard = endpoint.connection.receives
            clock.advance(5.0)
            await until(lambda: endpoint.connection.receives > heard)  # noqa: B023
        assert not call.done()
        call.cancel()
