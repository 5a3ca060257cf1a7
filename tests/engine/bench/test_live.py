"""The live bench, with a server in place of its engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.bench.client import ApiServer
from tests.bench.engine import live
from tests.bench.engine.live import LIVE, Served
from tests.bench.engine.virtual import Request
from tests.bench.streams import BenchFailed

SHORT, LONG = Request(0.0, 50, 16), Request(0.0, 1000, 32)


@asynccontextmanager
async def server(status: str = "200 OK") -> AsyncIterator[tuple[ApiServer, list[dict[str, object]]]]:
    """A server that answers every request with three events; yields its endpoint and the bodies that it
    received."""
    bodies: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line]
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\n".encode())
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for event in (b"data: {}\n\n", b"data: {}\n\n", b"data: {}\n\n", b"data: [DONE]\n\n"):
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        yield ApiServer(f"http://127.0.0.1:{port}/v1"), bodies


async def test_each_request_is_sent_and_timed() -> None:
    async with server() as (endpoint, bodies):
        served = await live.serve(endpoint, [SHORT, LONG], seed=1)
    assert [one.request for one in served] == [SHORT, LONG]
    assert sorted(len(body["prompt"]) for body in bodies) == [50, 1000]  # type: ignore[arg-type]
    assert {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in bodies} == {
        (16, True, True),
        (32, True, True),
    }
    for one in served:
        assert 0.0 < one.first_token_s <= one.ended_at_s
        assert len(one.gaps_s) == 2


async def test_a_failed_request_fails_the_bench() -> None:
    async with server("503 Busy") as (endpoint, _):
        with pytest.raises(BenchFailed, match="503"):
            await live.serve(endpoint, [SHORT], seed=1)


def test_exact_shares_have_the_exact_number_of_requests() -> None:
    requests = LIVE.traffic(1, 200, 10.0)
    assert sum(LIVE.is_long(request) for request in requests) == 30
    assert len(requests) == 200


def test_ratios_are_penstocks_over_fifos() -> None:
    fifo = [[Served(SHORT, 2.0, 10.0, [0.1]), Served(LONG, 4.0, 20.0, [0.2])]]
    ours = [[Served(SHORT, 0.2, 9.0, [0.1]), Served(LONG, 6.0, 21.0, [0.1])]]
    by_name = {figure.name: figure for figure in live.figures(5.0, fifo, ours)}
    assert by_name["live: short TTFT p99 / FIFO's"].value == pytest.approx(0.1)
    assert by_name["live: short TTFT p99 / FIFO's"].ok
    assert by_name["live: long TTFT p99 / FIFO's"].value == pytest.approx(1.5)
    assert not by_name["live: long TTFT p99 / FIFO's"].ok
    assert by_name["live: makespan / FIFO's"].value == pytest.approx(1.05)
    assert by_name["live: gap p99 / FIFO's"].value == pytest.approx(0.5)
    assert by_name["live: short TTFT p99, penstock"].value == pytest.approx(200.0)
