"""A server tells its load on its connections: to peers that take it and read, and to nobody's harm."""

from __future__ import annotations

import asyncio

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from engine.api.http.http2_server import ServerRequest, ServerResponder
from gateway.relay.http2_client import Http2Transport, Origin
from shared.http2 import frames, limits
from shared.http2.connection_errors import ProtocolViolation
from shared.http2.stream import Report
from tests.shared.http2.loopback import PATIENCE_S, Silent, hello, serving, until
from tests.shared.http2.pair import REQUEST, Pair


async def test_a_pushed_load_reaches_the_client_with_its_origin() -> None:
    told: list[tuple[Origin, bytes]] = []
    async with serving(hello) as served:
        transport = Http2Transport(on_load=lambda origin, payload: told.append((origin, payload)))
        answer = await transport.exchange("GET", served.url + "/", [], b"")
        assert await answer.read() is not None
        served.server.push_load(b"busy")
        await until(lambda: bool(told))
        assert told == [(("http", "127.0.0.1", served.port), b"busy")]
        await transport.aclose()


async def test_a_request_learns_when_the_load_has_it() -> None:
    told: list[bytes] = []
    order: list[str] = []
    goes_on = asyncio.Event()

    async def queued(_: ServerRequest, responder: ServerResponder) -> None:
        responder.tell_load(b"with it")
        await goes_on.wait()
        await responder.send(200, {}, b"done")

    async with serving(queued) as served:
        transport = Http2Transport(on_load=lambda _, payload: told.append(payload))
        report = Report(lambda: order.append("counted"))
        call = asyncio.create_task(transport.exchange("GET", served.url + "/", [], b"", report=report))
        await until(lambda: bool(order))
        assert told == [b"with it"]
        assert not call.done()
        assert report.payload is None, "it is no report on what the stream has cost"
        goes_on.set()
        assert await (await call).read() == b"done"
        await transport.aclose()


def test_a_load_of_a_stream_that_is_over_is_a_load_all_the_same() -> None:
    pair = Pair()
    stream = pair.client.connection.open(REQUEST, end=True)
    stream.report = report = Report(lambda: pytest.fail("the stream is over"))
    pair.settle()
    pair.server.connection.report(stream.id, b"late", frames.OF_LOAD)
    stream.reset()
    pair.settle()
    assert pair.client.loads == [b"late"]
    assert report.is_due, "what it has cost is still to come"


async def test_a_peer_that_does_not_read_is_not_told_and_nothing_piles_up() -> None:
    silent = Silent()
    async with serving(silent) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        greeting = Pair().client.connection.h2.greeting
        writer.write(greeting)
        await until(lambda: any(one.connection._takes_reports for one in served.server.endpoints))
        [endpoint] = served.server.endpoints
        for _ in range(10_000):  # far more than the kernel and the transport hold
            served.server.push_load(b"x" * 2_000)
            await asyncio.sleep(0)
            if endpoint.connection.paused:
                break
        else:
            raise AssertionError("it never was full")
        endpoint._flush()
        held = len(endpoint.connection._out)
        for _ in range(1_000):
            served.server.push_load(b"x" * 2_000)
        assert len(endpoint.connection._out) == held
        assert held < limits.OUT_LEN_SOFT + 4_000
        writer.close()
        del reader


async def test_a_client_of_another_make_is_sent_no_such_frame() -> None:
    async with serving(hello) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        foreign = H2Connection(H2Configuration(client_side=True))
        foreign.initiate_connection()
        head = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/")]
        foreign.send_headers(1, head, end_stream=True)
        writer.write(foreign.data_to_send())
        await until(lambda: any(one.connection.greeted for one in served.server.endpoints))
        for _ in range(20):
            served.server.push_load(b"busy")
        received = b""
        async with asyncio.timeout(PATIENCE_S):
            while b"hello from" not in received:
                received += await reader.read(65_536)
        kinds, at = set(), 0
        while at < len(received):
            kinds.add(received[at + 3])
            at += 9 + int.from_bytes(received[at : at + 3], "big")
        assert frames.DATA in kinds
        assert frames.REPORT not in kinds
        writer.close()


def test_a_malformed_load_ends_the_connection() -> None:
    pair = Pair()
    with pytest.raises(ProtocolViolation, match="REPORT is too short"):
        pair.client.connection.receive(frames.frame(frames.REPORT, frames.OF_LOAD, 0, b"abc"))


def test_a_server_that_pushes_without_end_is_cut_off() -> None:
    pair = Pair()
    told = frames.report(0, b"{}", frames.OF_LOAD)
    for _ in range(limits.REPORTS.burst):
        pair.client.connection.receive(told)
    with pytest.raises(ProtocolViolation, match="too many REPORTs"):
        pair.client.connection.receive(told)
    assert len(pair.client.loads) == limits.REPORTS.burst


def test_a_client_that_sends_such_frames_is_one_that_floods() -> None:
    pair = Pair()
    told = frames.report(0, b"{}", frames.OF_LOAD)
    for _ in range(limits.EMPTY_FRAMES.burst):
        pair.server.connection.receive(told)
    with pytest.raises(ProtocolViolation, match="too many empty frames"):
        pair.server.connection.receive(told)
    assert pair.server.loads == []
