"""Errors let go of the streams that they ended: no garbage collection is needed for any of them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from engine.api.http.http2_server import ServerRequest, ServerResponder
from gateway.relay.hop_errors import NoConnection
from gateway.relay.http2_client import Http2Transport, QueuePlace
from shared.http2.connection_errors import StreamRefused, StreamReset
from shared.http2.stream import Stream
from shared.wire.http import ClientGone
from tests.shared.http2.loopback import EVENTS, Silent, serving, until
from tests.uncollected import uncollected


@pytest.mark.parametrize("error", [StreamReset(8, by_peer=True), StreamRefused("GOAWAY")])
def test_an_error_is_copied_with_all_that_it_says(error: StreamReset | StreamRefused) -> None:
    copied = error.copy()
    assert copied is not error
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


async def test_a_reset_stream_leaves_its_reader_without_a_reference_cycle() -> None:
    async def abort(_: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        responder.abort()

    async with serving(abort) as served, Http2Transport() as transport:
        with uncollected(Stream) as left:
            answer = await transport.exchange("GET", served.url + "/", [], b"")
            with pytest.raises(StreamReset):
                await answer.read()
            await answer.aclose()
            del answer
            await until(lambda: not left())


async def test_a_disconnect_leaves_the_writer_without_a_reference_cycle() -> None:
    gone = asyncio.Event()

    async def endless(_: ServerRequest, responder: ServerResponder) -> None:
        try:
            await responder.start_stream(200, EVENTS)
            while True:
                try:
                    await responder.write(b"data: {}\n\n")
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    pass  # to meet the error of a write that comes too late
        except ClientGone:
            gone.set()
            raise

    async with serving(endless) as served, Http2Transport() as transport:
        with uncollected(Stream) as left:
            answer = await transport.exchange("GET", served.url + "/", [], b"")
            await answer.read()
            await answer.aclose()
            del answer
            await gone.wait()
            await until(lambda: not left())


async def test_a_failing_accept_function_leaves_no_reference_cycle() -> None:
    class Full(Exception):
        pass

    pieces = []

    def accept(data: bytes) -> bool:
        pieces.append(data)
        if len(pieces) > 1:
            raise Full
        return True

    async with serving(Silent(start=True, events=True)) as served, Http2Transport() as transport:
        with uncollected(Stream, Full) as left:
            answer = await transport.exchange("GET", served.url + "/", [], b"")
            with pytest.raises(Full):
                await answer.pass_on(accept)
            await answer.aclose()
            del answer
            await until(lambda: not left())


async def test_a_failed_connect_leaves_waiting_requests_without_a_reference_cycle() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        async with Http2Transport() as transport:
            with uncollected(QueuePlace) as left:
                with pytest.raises(NoConnection):
                    await transport.exchange("GET", url, [], b"")
                await until(lambda: not left())


async def test_a_handler_that_raises_client_gone_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def resigned(_: ServerRequest, responder: ServerResponder) -> None:
        await responder.start_stream(200, EVENTS)
        responder.abort()

    async with serving(resigned) as served, Http2Transport() as transport:
        answer = await transport.exchange("GET", served.url + "/", [], b"")
        await answer.aclose()
    assert not caplog.records
