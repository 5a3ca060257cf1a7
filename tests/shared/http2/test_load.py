"""Many streams at once on one connection: all move on, nobody stalls for another, nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from engine.api.http.http2_server import ServerRequest, ServerResponder
from gateway.relay.http2_client import Http2Transport
from shared.http2 import limits
from shared.http2.connection import Connection, ConnectionPhase
from shared.wire.http import ClientGone
from tests.shared.http2.loopback import EVENTS, STREAM, OverHttp2, endpoints, serving, until

EVENT = b"data: " + b"x" * 152 + b"\n\n"


def client(transport: Http2Transport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=OverHttp2(transport), timeout=None)


def assert_whole(connection: Connection) -> None:
    """No stream, no waiter, no credit is left behind."""
    assert connection.phase is ConnectionPhase.OPEN
    assert not connection.streams
    assert not connection._backlog
    assert connection.path.window + connection.path.uncredited == connection.config.connection_window_len


def room_is_whole(sender: Connection, receiver: Connection) -> bool:
    """With nothing on its way, what the sender may send is all but what is not worth a frame yet."""
    size = receiver.config.connection_window_len
    return sender.path.connection_room + receiver.path.uncredited == size


@pytest.mark.parametrize("count", [256, 1_000])
async def test_concurrent_streams_all_progress(count: int) -> None:
    """Every stream gets its first event while all are open, and then its last."""
    go_on = asyncio.Event()
    begun = 0

    async def events(request: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        await responder.write(EVENT)
        await go_on.wait()
        for _ in range(5):
            await responder.write(EVENT)
        await responder.finish()

    async def read(http: httpx.AsyncClient, url: str) -> int:
        nonlocal begun
        async with http.stream("GET", url) as answer:
            stream = answer.extensions[STREAM]
            size = len(await stream.read())
            begun += 1
            while (data := await stream.read()) is not None:
                size += len(data)
            return size

    transport = Http2Transport()
    async with serving(events) as served, client(transport) as http:
        reads = [asyncio.create_task(read(http, served.url)) for _ in range(count)]
        await until(lambda: begun == count)
        assert len(endpoints(transport)) == 1
        go_on.set()
        assert {await one for one in reads} == {6 * len(EVENT)}
        (near,), (far,) = endpoints(transport), served.server.endpoints
        await until(lambda: not far.connection.streams)
        assert_whole(near.connection)
        assert_whole(far.connection)
        await until(lambda: room_is_whole(far.connection, near.connection))


@pytest.mark.slow
async def test_backpressure_stalled_streams_hold_one_window_each_and_stall_no_other() -> None:
    stalled_written: dict[str, int] = {}

    async def pour(request: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        try:
            while True:
                await responder.write(EVENT)
                stalled_written[request.path] = stalled_written.get(request.path, 0) + len(EVENT)
                await asyncio.sleep(0)
        except ClientGone:
            return

    async def live(http: httpx.AsyncClient, url: str) -> int:
        async with http.stream("GET", url) as answer:
            stream = answer.extensions[STREAM]
            size = 0
            while size < 2 * limits.STREAM_WINDOW_LEN:
                size += len(await stream.read())
            return size

    transport = Http2Transport()
    async with serving(pour) as served, client(transport) as http:
        async with asyncio.TaskGroup() as group:
            opening = [
                group.create_task(
                    http.send(http.build_request("GET", f"{served.url}/stalled/{i}"), stream=True)
                )
                for i in range(120)
            ]
        stalled = [one.result() for one in opening]
        await until(lambda: sum(stalled_written.values()) > 120 * (limits.STREAM_WINDOW_LEN - len(EVENT)))
        frozen = dict(stalled_written)
        sizes = await asyncio.gather(*(live(http, f"{served.url}/live/{i}") for i in range(16)))
        assert min(sizes) >= 2 * limits.STREAM_WINDOW_LEN
        for path, written in frozen.items():
            assert stalled_written[path] == written <= limits.STREAM_WINDOW_LEN
        for answer in stalled:
            await answer.aclose()
        (near,), (far,) = endpoints(transport), served.server.endpoints
        await until(lambda: not far.busy)
        assert_whole(near.connection)
        assert_whole(far.connection)


class Moody:
    """A server whose handlers wait for ever, read, pour, or answer well, as the path says."""

    running = 0

    async def __call__(self, request: ServerRequest, responder: ServerResponder) -> None:
        self.running += 1
        try:
            if request.path == "/silent":
                await asyncio.Event().wait()
            if request.path == "/upload":
                await request.body(len_max=1 << 30, deadline_s=60)
            await responder.start_stream(200, EVENTS)
            for _ in range(50):
                await responder.write(EVENT * 20)
            if request.path == "/endless":
                await asyncio.Event().wait()
            await responder.finish()
        finally:
            self.running -= 1


async def read_some(http: httpx.AsyncClient, url: str, rng: random.Random) -> None:
    path = rng.choice(["/silent", "/upload", "/endless", "/fine", "/fine"])
    content = bytes(rng.choice([0, 10, 200_000]))
    async with http.stream("POST", url + path, content=content) as answer:
        stream = answer.extensions[STREAM]
        for _ in range(rng.randrange(20)):
            if await stream.read() is None:
                return


async def leave(http: httpx.AsyncClient, url: str, rng: random.Random) -> None:
    """Cancels a call after some turns of the event loop, unless it has come to an end of its own."""
    call = asyncio.create_task(read_some(http, url, rng))
    for _ in range(rng.choice([5, 20, 60, 1_000])):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])


async def test_a_thousand_random_ends_of_streams_leak_nothing() -> None:
    """Calls end before headers, during the stream, during the upload, or well."""
    rng = random.Random(7)
    moody = Moody()
    transport = Http2Transport(connections_max=1)
    async with serving(moody) as served, client(transport) as http:
        for _ in range(10):
            await asyncio.gather(*(leave(http, served.url, rng) for _ in range(100)))
        (near,), (far,) = endpoints(transport), served.server.endpoints
        await until(lambda: not far.busy and not moody.running)
        assert (await http.post(served.url + "/fine", content=bytes(200_000))).status_code == 200
        await until(lambda: not far.busy)
        assert_whole(near.connection)
        assert_whole(far.connection)
        await until(lambda: room_is_whole(far.connection, near.connection))
        await until(lambda: room_is_whole(near.connection, far.connection))
        assert not any(pool.waiting for pool in transport._pools.values())
