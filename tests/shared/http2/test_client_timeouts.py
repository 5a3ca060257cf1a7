"""The client's timeouts, and servers that do not answer as HTTP/2 servers do."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.relay.hop_errors import NoConnection, NoConnectionInTime, NotHttp2, Unsendable
from gateway.relay.http2_client import Http2Transport
from shared.http2 import frames, limits
from shared.http2.connection import ConnectionPhase
from shared.http2.connection_config import WatchConfig
from shared.http2.connection_errors import ConnectionLost
from tests.fakes import VirtualClock
from tests.shared.http2.loopback import (
    PATIENCE_S,
    Silent,
    client,
    endpoints,
    hello,
    listening,
    serving,
    until,
)


class Deaf(asyncio.Protocol):
    """Greets as an HTTP/2 server, if told to, and then does not read."""

    def __init__(self, greeting: bytes = b"") -> None:
        self.greeting = greeting
        self.heard = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        if self.greeting:
            transport.write(self.greeting)

    def data_received(self, data: bytes) -> None:
        self.heard += data


async def test_a_server_that_sends_no_settings_is_a_connect_timeout() -> None:
    async with listening(Deaf) as listener, client(Http2Transport()) as http:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises(NoConnectionInTime):
            await http.get(url, timeout=httpx.Timeout(None, connect=0.01))


async def test_a_longer_connect_timeout_waits_longer_for_settings() -> None:
    """The connection's own limit is for those who say nothing of their own."""
    loop = asyncio.get_running_loop()
    greeted_by = loop.time() + 0.05
    deaf: list[Deaf] = []

    def slow() -> Deaf:
        deaf.append(Deaf())
        return deaf[-1]

    transport = Http2Transport(watch=WatchConfig(greeting_timeout_s=0.01))
    async with listening(slow) as listener, client(transport) as http:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises((NoConnectionInTime, NotHttp2)):
            await http.get(url)
        refused = len(deaf)
        call = asyncio.create_task(http.get(url, timeout=httpx.Timeout(None, connect=PATIENCE_S)))
        await until(lambda: loop.time() > greeted_by and len(deaf) > refused)
        assert not call.done()
        deaf[-1].transport.write(frames.settings({0x3: 100}))
        await until(lambda: any(endpoint.connection.streams for endpoint in endpoints(transport)))
        call.cancel()


async def test_an_http_1_server_is_a_connect_error_that_says_so() -> None:
    def http1() -> Deaf:
        return Deaf(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")

    async with listening(http1) as listener, client(Http2Transport()) as http:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises(NotHttp2, match="does not serve HTTP/2"):
            await http.get(url)


async def test_a_refused_connection_and_an_unknown_host_are_connect_errors() -> None:
    async with listening(Deaf) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with client(Http2Transport()) as http:
        errors = await asyncio.gather(*(http.get(url) for _ in range(20)), return_exceptions=True)
        assert {type(error) for error in errors} == {NoConnection}
        assert len({id(error) for error in errors}) == 20, "tracebacks are not shared"
        with pytest.raises(NoConnection):
            await http.get("http://" + "a" * 70 + ".invalid/")
        with pytest.raises(Unsendable):
            await http.get("ftp://127.0.0.1/")


async def test_an_unsendable_header_harms_no_other_stream() -> None:
    async with serving(hello) as served, client(Http2Transport()) as http:
        for value in ("two\nlines", "x" * limits.SENT_HEADER_LIST_LEN_MAX):
            with pytest.raises(Unsendable):
                await http.get(served.url, headers={"x-bad": value})
        assert (await http.get(served.url)).status_code == 200


async def tick(clock: VirtualClock, seconds: float) -> None:
    await until(lambda: clock.sleeping == 1)
    clock.advance(seconds)


async def test_an_unanswered_ping_times_out_the_connection() -> None:
    clock = VirtualClock()
    greeting = frames.settings({0x3: 100})
    transport = Http2Transport(clock=clock)
    async with listening(lambda: Deaf(greeting)) as listener, client(transport) as http:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        call = asyncio.create_task(http.get(url))
        await until(
            lambda: len(endpoints(transport)) == 1 and bool(endpoints(transport)[0].connection.streams)
        )
        await tick(clock, 10.0)
        await tick(clock, 4.9)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not call.done()
        await tick(clock, 0.2)
        with pytest.raises(ConnectionLost, match="PING"):
            await call


async def test_an_idle_connection_expires_and_a_busy_one_does_not() -> None:
    clock = VirtualClock()
    transport = Http2Transport(clock=clock)
    silent = Silent()
    async with serving(silent) as served, client(transport) as http:
        call = asyncio.create_task(http.get(served.url))
        await until(lambda: silent.running == 1)
        (endpoint,) = endpoints(transport)
        connection = endpoint.connection
        await tick(clock, 10.0)

        async def beat(heard: int) -> int:
            """From one PING's answer to the next PING."""
            await until(lambda: connection.receives > heard or connection.phase is ConnectionPhase.CLOSED)
            for _ in range(2):
                await until(lambda: clock.sleeping == 1 or not endpoints(transport))
                heard = connection.receives
                clock.advance(5.0)
            return heard

        heard = connection.receives
        for _ in range(20):
            heard = await beat(heard)
        assert endpoints(transport) == [endpoint]
        call.cancel()
        await until(lambda: silent.cancelled == 1)
        for _ in range(20):
            if endpoints(transport):
                heard = await beat(heard)
        await until(lambda: not endpoints(transport) and not served.server.endpoints)


async def test_closing_the_transport_fails_waiting_requests() -> None:
    silent = Silent()
    transport = Http2Transport(connections_max=1)
    async with serving(silent, streams_max=1) as served:
        http = client(transport)
        running = asyncio.create_task(http.get(served.url))
        await until(lambda: silent.running == 1)
        waiting = asyncio.create_task(http.get(served.url))
        (pool,) = transport._pools.values()
        await until(lambda: pool.waiting == 1)
        await http.aclose()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ConnectionLost):
                await running
            with pytest.raises(NoConnection):
                await waiting
        await until(lambda: silent.cancelled == 1)
