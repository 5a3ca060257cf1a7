from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.api.http.http2_server import Http2Server, ServerEndpoint, ServerRequest, ServerResponder
from gateway.relay.hop_errors import NoConnection, NoConnectionInTime, NotHttp2, Unsendable
from gateway.relay.http2_client import CONNECTIONS_MAX, Http2Transport
from shared.http2 import frames, limits
from shared.http2.connection import ConnectionPhase
from shared.http2.connection_config import WatchConfig
from shared.http2.connection_errors import ConnectionLost, ErrorCode, StreamRefused
from shared.http2.stream import Stream
from tests.fakes import VirtualClock
from tests.shared.http2.loopback import (
    EVENTS,
    PATIENCE_S,
    STREAM,
    Silent,
    client,
    drained_server,
    echo,
    endpoints,
    hello,
    listening,
    serving,
    until,
)


async def test_a_request_and_its_answer() -> None:
    async with serving(echo) as served:
        transport = Http2Transport()
        async with client(transport) as http:
            answer = await http.post(served.url + "/a?b=c", content=b"question", headers={"X-Name": " v "})
            assert (answer.status_code, answer.content) == (200, b"question")
            assert answer.http_version == "HTTP/2"
            assert (await http.get(served.url)).content == b""
            assert len(endpoints(transport)) == 1


async def test_a_request_of_the_gateways_own() -> None:
    async with serving(echo) as served:
        transport = Http2Transport()
        async with transport:
            url = served.url + "/a?b=c"
            headers = [(b"X-Name", b" v "), (b"connection", b"close"), (b"Host", b"engine")]
            answer = await transport.exchange("POST", url, headers, b"question")
            assert answer.status == 200
            assert answer.headers["content-length"] == "8"
            assert [await answer.read(), await answer.read()] == [b"question", None]
            await answer.aclose()
            with pytest.raises(Unsendable):
                await transport.exchange("GET", url, [(b"x-bad", b"two\nlines")], b"")
            unread = await transport.exchange("POST", url, [], bytes(1_000_000))
            await unread.aclose()
            assert not endpoints(transport)[0].connection.streams


@pytest.mark.parametrize("size", [1, limits.STREAM_WINDOW_LEN, 5_000_001])
async def test_large_bodies_both_ways(size: int) -> None:
    body = bytes(i % 251 for i in range(1_000)) * (size // 1_000) + b"x" * (size % 1_000)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, 70_000):
            yield body[start : start + 70_000]

    transport = Http2Transport()
    async with serving(echo) as served, client(transport) as http:
        assert (await http.post(served.url, content=body)).content == body
        assert (await http.post(served.url, content=pieces())).content == body


async def test_an_upload_waits_for_a_handler_that_does_not_read() -> None:
    read_on = asyncio.Event()
    sent = 0

    async def slow(request: ServerRequest, responder: ServerResponder) -> None:
        await read_on.wait()
        await echo(request, responder)

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 10_000
            yield bytes(10_000)

    async with serving(slow) as served, client(Http2Transport()) as http:
        answer = asyncio.create_task(http.post(served.url, content=pieces()))
        await until(lambda: sent > limits.STREAM_WINDOW_LEN)
        for _ in range(100):
            await asyncio.sleep(0)
        assert sent <= limits.STREAM_WINDOW_LEN + 10_000
        read_on.set()
        assert len((await answer).content) == 1_000_000


async def test_an_answer_may_come_before_the_request_is_complete() -> None:
    async def refuse(request: ServerRequest, responder: ServerResponder) -> None:
        await responder.send(413, {}, b"too large")

    async with serving(refuse) as served:
        transport = Http2Transport()
        async with client(transport) as http:
            answer = await http.post(served.url, content=bytes(10_000_000))
            assert (answer.status_code, answer.content) == (413, b"too large")
            await until(lambda: not endpoints(transport)[0].connection.streams)


async def test_the_raw_stream_returns_all_that_is_queued() -> None:
    async def events(request: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        for i in range(100):
            await responder.write(b"%d\n" % i)
        await responder.finish()

    async with serving(events) as served, client(Http2Transport()) as http:
        async with http.stream("GET", served.url) as answer:
            stream = answer.extensions[STREAM]
            reads = []
            while (data := await stream.read()) is not None:
                reads.append(data)
        assert b"".join(reads) == b"".join(b"%d\n" % i for i in range(100))
        assert len(reads) < 10


async def test_the_caller_is_told_when_a_request_is_dispatched() -> None:
    told: list[str] = []

    def connected() -> None:
        told.append("connected")

    async with Http2Transport() as transport:
        async with serving(hello) as served:
            answer = await transport.exchange("GET", served.url, [], b"", connected=connected)
            assert told == ["connected"]
            await answer.aclose()
        with pytest.raises(NoConnection):
            await transport.exchange("GET", "http://127.0.0.1:1/", [], b"", connected=connected)
        assert len(told) == 1


async def test_pools_of_unused_origins_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.relay.http2_client.ORIGINS_MAX", 2)
    transport = Http2Transport()
    async with client(transport) as http, serving(hello) as first, serving(hello) as third:
        async with serving(hello) as second:
            for served in (first, second):
                assert (await http.get(served.url)).status_code == 200
            with pytest.raises(NoConnectionInTime):
                await http.get(third.url)
        await until(lambda: len(endpoints(transport)) == 1)
        assert (await http.get(third.url)).status_code == 200


# -- leaving --------------------------------------------------------------------------------------


async def test_a_call_cancelled_before_headers_cancels_the_handler() -> None:
    silent = Silent()
    transport = Http2Transport()
    async with serving(silent) as served, client(transport) as http:
        call = asyncio.create_task(http.get(served.url))
        await until(lambda: silent.running == 1)
        call.cancel()
        await until(lambda: silent.cancelled == 1)
        assert not endpoints(transport)[0].connection.streams


@pytest.mark.parametrize("events", [False, True], ids=["silent", "streaming"])
async def test_a_response_left_unfinished_cancels_the_handler(events: bool) -> None:
    silent = Silent(start=True, events=events)
    transport = Http2Transport()
    async with serving(silent) as served, client(transport) as http:
        async with http.stream("GET", served.url) as answer:
            assert await answer.extensions[STREAM].read()
        await until(lambda: silent.cancelled == 1)
        (endpoint,) = endpoints(transport)
        assert endpoint.connection.phase is ConnectionPhase.OPEN
        assert not endpoint.connection.streams


async def test_a_request_cancelled_while_it_waits_for_a_stream_leaves_the_queue() -> None:
    silent = Silent()
    transport = Http2Transport(connections_max=1)
    async with serving(silent, streams_max=1) as served, client(transport) as http:
        first = asyncio.create_task(http.get(served.url))
        await until(lambda: silent.running == 1)
        second = asyncio.create_task(http.get(served.url))
        (pool,) = transport._pools.values()
        await until(lambda: pool.waiting == 1)
        second.cancel()
        await until(lambda: pool.waiting == 0)
        first.cancel()
        await until(lambda: silent.cancelled == 1)
        assert silent.running == 0


# -- the pool -------------------------------------------------------------------------------------


async def test_a_full_connection_opens_further_ones() -> None:
    silent = Silent()
    transport = Http2Transport()
    async with serving(silent, streams_max=10) as served, client(transport) as http:
        calls = [asyncio.create_task(http.get(served.url)) for _ in range(35)]
        await until(lambda: silent.running == 35)
        assert sorted(len(one.connection.streams) for one in endpoints(transport)) == [5, 10, 10, 10]
        for call in calls:
            call.cancel()
        await until(lambda: silent.cancelled == 35)


async def test_requests_queue_when_all_connections_are_full() -> None:
    gate = asyncio.Event()

    async def gated(request: ServerRequest, responder: ServerResponder) -> None:
        await gate.wait()
        await hello(request, responder)

    transport = Http2Transport(connections_max=2)
    async with serving(gated, streams_max=3) as served, client(transport) as http:
        calls = [asyncio.create_task(http.get(served.url)) for _ in range(20)]
        await until(lambda: len(endpoints(transport)) == 2)
        (pool,) = transport._pools.values()
        await until(lambda: pool.waiting == 14)
        with pytest.raises(NoConnectionInTime):
            await http.get(served.url, timeout=httpx.Timeout(None, connect=0))
        gate.set()
        assert {(await call).status_code for call in calls} == {200}


async def test_connections_and_those_who_wait_for_one_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.relay.http2_client.WAITING_MAX", 2)
    silent, transport = Silent(), Http2Transport()
    async with serving(silent, streams_max=1) as served, client(transport) as http:
        calls = [asyncio.create_task(http.get(served.url))]
        await until(lambda: silent.running == 1)
        for running in range(2, CONNECTIONS_MAX + 1):
            calls.append(asyncio.create_task(http.get(served.url)))
            await until(lambda: silent.running == running)  # noqa: B023 -- it is awaited here
        calls += [asyncio.create_task(http.get(served.url)) for _ in range(2)]
        (pool,) = transport._pools.values()
        await until(lambda: pool.waiting == 2)
        assert len(endpoints(transport)) == transport._connections_max == CONNECTIONS_MAX
        with pytest.raises(NoConnectionInTime, match="too many"):
            await asyncio.wait_for(http.get(served.url), PATIENCE_S)
        for call in calls:
            call.cancel()
        await until(lambda: silent.cancelled == CONNECTIONS_MAX)


async def test_goaway_under_load_moves_requests_to_another_connection() -> None:
    """Two servers behind one port, one after the other; the first drains in the middle of the load."""
    async with serving(hello) as first:
        second = Http2Server(hello)
        current = [first.server]
        async with listening(lambda: current[0].protocol()) as listener:
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            transport = Http2Transport()
            async with client(transport) as http:
                answers = []

                async def load() -> None:
                    for _ in range(20):
                        answers.append((await http.get(url)).status_code)
                        if len(answers) == 100:
                            current[0] = second
                            drained.append(asyncio.create_task(drained_server(first.server)))

                drained: list[asyncio.Task[None]] = []
                await asyncio.gather(*(load() for _ in range(20)))
                assert answers == [200] * 400
                await drained[0]
                assert len(endpoints(transport)) == 1
            await second.close()


class Refusing(ServerEndpoint):
    """Refuses its first streams without having looked at them."""

    def stream_opened(self, stream: Stream) -> None:
        server = self._server
        assert isinstance(server, RefusingServer)
        if server.refusals:
            server.refusals -= 1
            self._loop.call_soon(stream.reset, ErrorCode.REFUSED_STREAM)
        else:
            super().stream_opened(stream)


class RefusingServer(Http2Server):
    refusals = 0

    def protocol(self) -> ServerEndpoint:
        return Refusing(self)


async def test_a_refused_stream_is_retried_a_few_times() -> None:
    server = RefusingServer(echo)

    async with listening(server.protocol) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with client(Http2Transport()) as http:
            server.refusals = 2
            assert (await http.post(url, content=b"again")).content == b"again"
            server.refusals = 3
            with pytest.raises(StreamRefused):
                await http.post(url, content=b"again")
        await server.close()


async def test_a_restarted_server_is_connected_to_again() -> None:
    transport = Http2Transport()
    async with client(transport) as http:
        async with serving(hello) as served:
            url, port = served.url, served.port
            assert (await http.get(url)).status_code == 200
        await until(lambda: not endpoints(transport))
        with pytest.raises(NoConnection):
            await http.get(url)
        async with serving(hello, port=port):
            assert (await http.get(url)).status_code == 200


async def test_a_lost_connection_fails_open_streams() -> None:
    silent = Silent(start=True)
    async with serving(silent) as served, client(Http2Transport()) as http:
        unanswered = Silent()
        async with http.stream("GET", served.url) as answer:
            stream = answer.extensions[STREAM]
            assert await stream.read()
            served.server.handler = unanswered
            call = asyncio.create_task(http.get(served.url))
            await until(lambda: unanswered.running == 1)
            for endpoint in served.server.endpoints:
                assert endpoint._transport is not None
                endpoint._transport.abort()
            with pytest.raises(ConnectionLost):
                await stream.read()
            with pytest.raises(ConnectionLost):
                await call
        await until(lambda: silent.cancelled == unanswered.cancelled == 1)


class Deaf(asyncio.Protocol):
    """Greets as an HTTP/2 server, if told to, and then does not read."""

    def __init__(self, greeting: bytes = b"") -> None:
        self.greeting = greeting
        self.heard = b""
        self.transport: Any = None

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
        await until(lambda: loop.time() > greeted_by and len(deaf) > refused and deaf[-1].transport)
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
