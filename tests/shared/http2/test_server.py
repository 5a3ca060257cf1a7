from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import cast

import hpack
import httpx
import pytest

from engine.api.http.http2_server import Http2Server, ServerRequest, ServerResponder
from gateway.relay.hop_errors import NoConnection
from gateway.relay.http2_client import Http2Transport
from shared.http2 import frames, limits
from shared.http2.connection import ConnectionPhase
from shared.http2.connection_config import ConnectionConfig
from shared.http2.connection_errors import ConnectionLost, ErrorCode, StreamReset
from shared.process.listening import bound_socket
from shared.process.sockets import SEND_BUFFER_LEN, UNSENT_LEN_MAX, bound_transport
from shared.wire.errors import BodyTimeout, BodyTooLarge, InvalidRequest
from shared.wire.http import ClientGone
from tests.fakes import VirtualClock
from tests.shared.http2.loopback import (
    EVENTS,
    PATIENCE_S,
    STREAM,
    Handler,
    OverHttp2,
    Silent,
    drained_server,
    hello,
    serving,
    until,
)
from tests.shared.http2.pair import REQUEST, End


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=OverHttp2(Http2Transport()), timeout=None)


async def test_what_a_handler_sees_of_a_request() -> None:
    seen: list[ServerRequest] = []

    async def look(request: ServerRequest, responder: ServerResponder) -> None:
        seen.append(request)
        await responder.send(204, {"X-Answer": "yes"}, b"")

    async with serving(look) as served, client() as http:
        answer = await http.get(
            served.url + "/a%20b?q=%20",
            headers=[("X-Two", "1"), ("x-two", "2"), ("Cookie", "a=b"), ("cookie", "c=d")],
        )
        assert answer.status_code == 204
        assert answer.headers["x-answer"] == "yes"
        assert "content-length" not in answer.headers
    (request,) = seen
    assert (request.method, request.path) == ("GET", "/a b")
    assert request.headers["x-two"] == "1, 2"
    assert request.headers["cookie"] == "a=b; c=d"
    assert request.headers["host"] == str(answer.request.url.netloc, "ascii")
    assert "x-none" not in request.headers
    assert not any(name.startswith(":") for name in request.headers)


async def test_head_has_headers_and_no_body() -> None:
    async with serving(hello) as served, client() as http:
        answer = await http.head(served.url + "/x")
        assert (answer.headers["content-length"], answer.content) == ("13", b"")


@pytest.mark.parametrize(
    ("content", "headers", "deadline_s", "expected"),
    [
        (bytes(11), {}, 5.0, BodyTooLarge),
        (bytes(11), {"content-encoding": "gzip"}, 5.0, InvalidRequest),
        (None, {}, 0.0, BodyTimeout),
        (None, {}, 5.0, BodyTooLarge),
    ],
    ids=["declared too large", "compressed", "late", "too large"],
)
async def test_bodies_that_are_not_accepted(
    content: bytes | None, headers: dict[str, str], deadline_s: float, expected: type[Exception]
) -> None:
    caught: list[Exception] = []

    async def read(request: ServerRequest, responder: ServerResponder) -> None:
        try:
            await request.body(len_max=10, deadline_s=deadline_s)
        except Exception as error:
            caught.append(error)
        await responder.send(400, {}, b"")

    async def endless() -> AsyncIterator[bytes]:
        while not caught:
            yield b"" if deadline_s == 0 else b"12345"
            await asyncio.sleep(0)

    async with serving(read) as served, client() as http:
        answer = await http.post(served.url, content=content or endless(), headers=headers)
        assert answer.status_code == 400
    assert [type(error) for error in caught] == [expected]


async def test_a_handler_that_fails_resets_its_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: ServerRequest, responder: ServerResponder) -> None:
        if request.path == "/late":
            await responder.start_stream(200, EVENTS)
        if request.path == "/unfinished":
            return
        if request.path != "/fine":
            raise RuntimeError("a bug")
        await responder.send(200, {}, b"fine")

    async with serving(fail) as served, client() as http:
        with caplog.at_level(logging.CRITICAL):
            for path in ("/early", "/late", "/unfinished"):
                with pytest.raises(StreamReset, match="INTERNAL_ERROR"):
                    await http.get(served.url + path)
        assert (await http.get(served.url + "/fine")).content == b"fine"


async def test_backpressure_write_waits_while_the_client_does_not_read() -> None:
    written = 0

    async def pour(request: ServerRequest, responder: ServerResponder) -> None:
        nonlocal written
        await responder.start_stream(200, EVENTS)
        while True:
            await responder.write(bytes(1_000))
            written += 1_000

    async with serving(pour) as served, client() as http, http.stream("GET", served.url) as answer:
        await until(lambda: written > limits.STREAM_WINDOW_LEN - 1_000)
        for _ in range(100):
            await asyncio.sleep(0)
        assert written <= limits.STREAM_WINDOW_LEN
        stream = answer.extensions[STREAM]
        read = 0
        while read < 10 * limits.STREAM_WINDOW_LEN:
            read += len(await stream.read())
        assert written <= read + limits.STREAM_WINDOW_LEN


async def test_a_disconnect_ends_a_blocked_write() -> None:
    ends: list[str] = []

    async def pour(request: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        try:
            while True:
                await responder.write(bytes(10_000))
        except asyncio.CancelledError:
            ends.append("cancelled")
            with pytest.raises(ClientGone):
                await responder.write(b"more")
            raise

    async with serving(pour) as served, client() as http:
        async with http.stream("GET", served.url) as answer:
            await answer.extensions[STREAM].read()
        await until(lambda: ends == ["cancelled"])


# -- draining -------------------------------------------------------------------------------------


async def test_drain_finishes_open_streams_and_then_closes() -> None:
    finish = asyncio.Event()

    async def slow(request: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        await responder.write(b"first;")
        await finish.wait()
        await responder.write(b"last")
        await responder.finish()

    async with serving(slow) as served, client() as http:
        calls = [asyncio.create_task(http.get(served.url)) for _ in range(50)]
        await until(lambda: sum(len(one.connection.streams) for one in served.server.endpoints) == 50)
        drain = asyncio.create_task(drained_server(served.server))
        await until(
            lambda: all(one.connection.phase is ConnectionPhase.RETIRING for one in served.server.endpoints)
        )
        for _ in range(50):
            await asyncio.sleep(0)
        assert not drain.done()
        finish.set()
        assert {(await call).content for call in calls} == {b"first;last"}
        async with asyncio.timeout(PATIENCE_S):
            await drain
        assert not served.server.endpoints


async def test_drain_with_nothing_open_ends_and_a_new_connection_is_turned_away() -> None:
    async with serving(hello) as served, client() as http:
        assert (await http.get(served.url)).status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            await drained_server(served.server)
        with pytest.raises(NoConnection):
            await http.get(served.url)


async def test_close_cancels_handlers_and_waits_for_them() -> None:
    silent = Silent(start=True)
    async with serving(silent) as served, client() as http:
        call = asyncio.create_task(http.get(served.url))
        await until(lambda: silent.running == 1)
        await served.server.close()
        assert silent.running == 0
        with pytest.raises((ConnectionLost, StreamReset)):
            await call


# -- slow, silent and hostile peers ---------------------------------------------------------------


class RawPeer(asyncio.Protocol):
    """A peer made of bytes."""

    def __init__(self) -> None:
        self.received = b""
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def raw(port: int) -> RawPeer:
    _, peer = await asyncio.get_running_loop().create_connection(RawPeer, "127.0.0.1", port)
    return peer


async def clocked(handler: Handler, clock: VirtualClock) -> tuple[Http2Server, asyncio.Server]:
    server = Http2Server(handler, clock=clock)
    return server, await asyncio.get_running_loop().create_server(server.protocol, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("says", "waits_s"),
    [
        (b"", [10.0]),
        (frames.PREFACE[:10], [10.0]),
        (frames.PREFACE + frames.settings({}), [10.0, 5.0]),
        (frames.PREFACE + frames.settings({}) + b"\0\0\x08\x06\0", [10.0, 5.0]),
    ],
    ids=["silent", "half a preface", "never answers a PING", "half a frame"],
)
async def test_a_silent_peer_is_disconnected_after_a_timeout(says: bytes, waits_s: list[float]) -> None:
    clock = VirtualClock()
    server, listener = await clocked(hello, clock)
    peer = await raw(listener.sockets[0].getsockname()[1])
    peer.transport.write(says)
    await until(lambda: len(server.endpoints) == 1)
    (endpoint,) = server.endpoints
    await until(lambda: not says or endpoint.connection.receives > 0)
    for wait_s in waits_s:
        await until(lambda: clock.sleeping == 1)
        assert not peer.lost.is_set()
        clock.advance(wait_s)
    async with asyncio.timeout(PATIENCE_S):
        await peer.lost.wait()
    listener.close()


@pytest.mark.parametrize(
    ("begins", "drop"),
    [
        (b"\0\x20\0\x01\x04\0\0\0\x01", b"\0"),
        (frames.frame(frames.HEADERS, 0, 1, b"\x82"), frames.frame(frames.CONTINUATION, 0, 1, b"\x84")),
    ],
    ids=["frame", "header block"],
)
async def test_a_peer_that_drips_a_frame_or_a_header_block_is_disconnected(
    begins: bytes, drop: bytes
) -> None:
    clock = VirtualClock()
    server, listener = await clocked(hello, clock)
    peer = await raw(listener.sockets[0].getsockname()[1])
    peer.transport.write(frames.PREFACE + frames.settings({}) + begins)
    await until(lambda: len(server.endpoints) == 1)
    (endpoint,) = server.endpoints
    for wait_s in (10.0, 5.0, 5.0):
        heard = endpoint.connection.receives + 1
        peer.transport.write(drop)
        await until(lambda: endpoint.connection.receives == heard and clock.sleeping == 1)  # noqa: B023
        clock.advance(wait_s)
    async with asyncio.timeout(PATIENCE_S):
        await peer.lost.wait()
    listener.close()


async def test_handlers_that_unwind_slowly_count_against_the_limit() -> None:
    """Resetting a stream frees its place only when its handler is gone."""
    unwind = asyncio.Event()
    running = 0

    async def stubborn(request: ServerRequest, responder: ServerResponder) -> None:
        nonlocal running
        running += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(unwind.wait())
            running -= 1

    async with serving(stubborn, streams_max=5) as served:
        peer = await raw(served.port)
        attacker = End(client=True, config=ConnectionConfig())
        attacker.connection.receive(frames.settings({0x3: 1024}))
        first = [attacker.connection.open(REQUEST, end=True) for _ in range(5)]
        attacker.flush()
        peer.transport.write(attacker.wire)
        await until(lambda: running == 5)
        for stream in first:
            stream.reset()
        refused = attacker.connection.open(REQUEST, end=True)
        attacker.wire = b""
        attacker.flush()
        peer.transport.write(attacker.wire)
        reset = frames.frame(frames.RST_STREAM, 0, refused.id, ErrorCode.REFUSED_STREAM.to_bytes(4, "big"))
        await until(lambda: reset in peer.received)
        for _ in range(50):
            await asyncio.sleep(0)
        assert running == 5
        unwind.set()
        peer.transport.abort()
        await until(lambda: running == 0)


async def test_a_protocol_error_is_answered_with_goaway_and_cancels_handlers() -> None:
    silent = Silent()
    async with serving(silent) as served:
        peer = await raw(served.port)
        attacker = End(client=True, config=ConnectionConfig())
        attacker.connection.receive(frames.settings({0x3: 1024}))
        attacker.connection.open(REQUEST, end=True)
        attacker.flush()
        peer.transport.write(attacker.wire)
        await until(lambda: silent.running == 1)
        peer.transport.write(frames.frame(frames.CONTINUATION, 0, 1, b""))
        await until(peer.lost.is_set)
        assert frames.goaway(1, ErrorCode.PROTOCOL_ERROR) in peer.received
        await until(lambda: silent.cancelled == 1)


async def test_a_peer_that_grants_every_window_and_reads_nothing_blocks_its_writers() -> None:
    written = 0

    async def pour(request: ServerRequest, responder: ServerResponder) -> None:
        nonlocal written
        await responder.start_stream(200, EVENTS)
        while True:
            await responder.write(bytes(limits.FRAME_LEN_MAX))
            written += limits.FRAME_LEN_MAX

    async with serving(pour) as served:
        peer = await raw(served.port)
        peer.transport.pause_reading()
        attacker = End(client=True, config=ConnectionConfig(stream_window_len=limits.WINDOW_LEN_MAX))
        attacker.connection.receive(frames.settings({0x3: 1024}))
        attacker.connection.put(frames.window_update(0, 2**30))
        for _ in range(20):
            attacker.connection.open(REQUEST, end=True)
        attacker.flush()
        peer.transport.write(attacker.wire)
        await until(lambda: any(one.connection.paused for one in served.server.endpoints))
        before = -1
        while before != written:
            before = written
            for _ in range(100):
                await asyncio.sleep(0)
        (endpoint,) = served.server.endpoints
        assert endpoint._transport is not None
        kept = endpoint._transport.get_write_buffer_size() + len(endpoint.connection._out)
        assert kept <= 3 * limits.OUT_LEN_SOFT
        peer.transport.abort()


def heads(received: bytes) -> list[list[tuple[bytes, bytes]]]:
    decoder = hpack.Decoder()
    data, whole = frames.Splitter(b"").feed(received)
    payloads = [data[start + 9 : stop] for kind, _, _, start, stop in whole if kind == frames.HEADERS]
    return [list(decoder.decode(payload, raw=True)) for payload in payloads]


async def test_an_expectation_is_answered_when_the_body_is_wanted() -> None:
    async def read(request: ServerRequest, responder: ServerResponder) -> None:
        body = await request.body(len_max=100, deadline_s=PATIENCE_S)
        await responder.send(200, {}, body)

    async with serving(read) as served:
        peer = await raw(served.port)
        attacker = End(client=True, config=ConnectionConfig())
        attacker.connection.receive(frames.settings({0x3: 1024}))
        stream = attacker.connection.open([*REQUEST, (b"expect", b"100-continue")], end=False)
        attacker.flush()
        peer.transport.write(attacker.wire)
        await until(lambda: heads(peer.received) == [[(b":status", b"100")]])
        attacker.wire = b""
        attacker.write(stream, b"body")
        stream.finish()
        attacker.flush()
        peer.transport.write(attacker.wire)
        await until(lambda: b"body" in peer.received)
        assert heads(peer.received)[1][0] == (b":status", b"200")
        peer.transport.abort()


async def test_kernel_buffers_are_bounded() -> None:
    import socket

    server = Http2Server(hello)
    sock = bound_socket("127.0.0.1", 0)
    listener = await asyncio.get_running_loop().create_server(server.protocol, sock=sock)
    peer = await raw(sock.getsockname()[1])
    await until(lambda: len(server.endpoints) == 1)
    (endpoint,) = server.endpoints
    assert endpoint._transport is not None
    bound_transport(endpoint._transport)
    accepted = endpoint._transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * SEND_BUFFER_LEN
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_LEN_MAX
    peer.transport.abort()
    await until(lambda: not server.endpoints)
    listener.close()
