"""What a server says of a stream after it was reset reaches the client, and nobody waits for long."""

from __future__ import annotations

import asyncio

import pytest

from engine.api.http.http2_server import ServerRequest, ServerResponder
from gateway.relay import http2_client
from gateway.relay.http2_client import Http2Transport
from shared.http2 import frames, limits
from shared.http2.connection import ConnectionPhase
from shared.http2.connection_errors import ConnectionLost, ProtocolViolation
from shared.http2.stream import Report
from tests.shared.http2.loopback import EVENTS, PATIENCE_S, Silent, endpoints, serving, until
from tests.shared.http2.pair import REQUEST, RESPONSE, Pair


class Counting:
    """A handler that writes until it is cut off, and then says how much it wrote."""

    def __init__(self) -> None:
        self.silent = Silent(start=True)

    async def __call__(self, request: ServerRequest, responder: ServerResponder) -> None:
        written = 0
        try:
            if request.path == "/silent":
                await self.silent(request, responder)
            await responder.start_stream(200, EVENTS)
            while request.path == "/endless" or not written:
                await responder.write(b"data: {}\n\n")
                written += 1
                await asyncio.sleep(0)
            await responder.finish()
        finally:
            responder.report(b"wrote %d" % written)


async def test_the_report_of_a_stream_that_the_client_reset() -> None:
    async with serving(Counting()) as served:
        transport = Http2Transport()
        report = Report()
        answer = await transport.exchange("GET", served.url + "/endless", [], b"", report=report)
        await answer.read()
        assert report.payload is None
        await answer.aclose()
        said = await report.wait(PATIENCE_S)
        assert said is not None
        assert said.startswith(b"wrote ")
        await transport.aclose()


async def test_the_report_of_a_call_that_was_cancelled_before_its_headers() -> None:
    handler = Counting()
    handler.silent.start = False
    async with serving(handler) as served:
        transport, report = Http2Transport(), Report()
        call = asyncio.create_task(transport.exchange("GET", served.url + "/silent", [], b"", report=report))
        await until(lambda: handler.silent.running == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await report.wait(PATIENCE_S) == b"wrote 0"
        await transport.aclose()


async def test_the_report_of_a_stream_that_ended_unread() -> None:
    async with serving(Counting()) as served:
        transport, report = Http2Transport(), Report()
        answer = await transport.exchange("GET", served.url + "/short", [], b"", report=report)
        await answer.aclose()
        assert await report.wait(PATIENCE_S) == b"wrote 1"
        await transport.aclose()


async def test_the_report_of_a_stream_that_the_server_reset() -> None:
    async def abort(_: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        responder.abort()
        responder.report(b"aborted")

    async with serving(abort) as served:
        transport, report = Http2Transport(), Report()
        answer = await transport.exchange("GET", served.url + "/", [], b"", report=report)
        await until(lambda: answer._stream.error is not None)
        assert await report.wait(PATIENCE_S) == b"aborted"
        await transport.aclose()


def test_a_report_crosses_the_reset_of_a_stream_that_has_just_ended() -> None:
    pair = Pair()
    stream = pair.client.connection.open(REQUEST, end=True)
    stream.report = report = Report()
    pair.settle()
    (served,) = pair.server.opened
    pair.server.connection.respond(served, RESPONSE, end=True)
    pair.server.connection.report(served.id, b"whole")
    stream.reset()  # before any of that has arrived
    assert report.is_due
    pair.settle()
    assert report.payload == b"whole"
    assert not report.is_due


async def test_a_connection_that_retires_waits_for_the_report_of_its_last_stream() -> None:
    """The engine drains, and a client leaves: what that answer has cost is still said."""
    handler = Counting()
    handler.silent.start = False
    async with serving(handler) as served:
        transport, report = Http2Transport(), Report()
        call = asyncio.create_task(transport.exchange("GET", served.url + "/silent", [], b"", report=report))
        await until(lambda: handler.silent.running == 1)
        [endpoint] = endpoints(transport)
        served.server.retire()
        await until(lambda: endpoint.connection.phase is ConnectionPhase.RETIRING)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await report.wait(PATIENCE_S) == b"wrote 0"
        await transport.aclose()


async def test_a_connection_that_retires_waits_for_reports_no_longer_than_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http2_client, "REPORTS_S", 0.01)
    async with serving(Silent(start=True)) as served:
        transport, report = Http2Transport(), Report()
        answer = await transport.exchange("GET", served.url + "/", [], b"", report=report)
        [endpoint] = endpoints(transport)
        endpoint.connection.retire()
        await answer.aclose()
        assert report.is_due
        await until(lambda: endpoint.connection.phase is ConnectionPhase.CLOSED)
        assert not report.is_due
        await transport.aclose()


def test_a_lost_connection_brings_no_report() -> None:
    pair = Pair()
    stream = pair.client.connection.open(REQUEST, end=True)
    stream.report = report = Report()
    pair.settle()
    stream.reset()
    assert report.is_due
    pair.client.connection.close(ConnectionLost("gone"))
    assert not report.is_due


async def test_nothing_is_waited_for_without_a_reset_or_from_a_server_that_reports_nothing() -> None:
    assert await Report().wait(PATIENCE_S) is None
    pair = Pair()
    pair.client.connection._takes_reports = False
    stream = pair.client.connection.open(REQUEST, end=True)
    stream.report = report = Report()
    stream.reset()
    assert await report.wait(PATIENCE_S) is None


async def test_the_wait_for_a_report_times_out() -> None:
    report = Report()
    report.expect()
    assert await report.wait(0.0) is None
    assert not report.is_due


def test_reports_go_only_to_peers_that_take_them() -> None:
    pair = Pair()
    stream = pair.client.connection.open(REQUEST, end=True)
    pair.settle()
    pair.server.connection._takes_reports = False
    pair.server.connection.report(stream.id, b"said")
    pair.server.flush()
    assert not pair.server.wire


def test_reports_that_are_awaited_are_bounded() -> None:
    pair = Pair()
    reports = []
    for _ in range(limits.RESET_IDS_MAX + 2):
        stream = pair.client.connection.open(REQUEST, end=True)
        stream.report = Report()
        reports.append(stream.report)
        stream.reset()
    due = [report.is_due for report in reports]
    assert due == [False, False, *[True] * limits.RESET_IDS_MAX]


def test_a_malformed_report_ends_the_connection_and_one_of_no_stream_does_not() -> None:
    pair = Pair()
    pair.client.connection.receive(frames.report(77, b"whose?"))
    with pytest.raises(ProtocolViolation, match="REPORT is too short"):
        pair.client.connection.receive(frames.frame(frames.REPORT, 0, 0, b"abc"))
