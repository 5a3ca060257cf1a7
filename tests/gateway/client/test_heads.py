"""A head that does not end is bounded in time, in bytes and in number, wherever in a packet it begins."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.client.connection import (
    HEAD_LEN_MAX,
    HEAD_PARSED_MAX,
    BoundedConnection,
    Connections,
    is_one_request,
)
from gateway.listen import listener
from shared.fairness.fair_turns import FairTurns
from shared.process.listening import http1_options
from tests.effort import drawn
from tests.gateway.client.test_hygiene import HALF, answered
from tests.gateway.conftest import PATIENCE_S, House, Open, until
from tests.gateway.fake_engine import chunk, stream
from tests.gateway.request.test_disconnect import RawClient, body

WHOLE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
SOON_S = 0.05

bodies = st.one_of(
    st.binary(max_size=60), st.sampled_from([b"\r\n\r\n", b"a\r\n\r\nb\r\n\r\n", b"0\r\n\r\n"])
)


def with_length(content: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content


def in_chunks(contents: list[bytes]) -> bytes:
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in contents if each)
    return b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


requests = st.one_of(
    st.just(WHOLE), st.builds(with_length, bodies), st.builds(in_chunks, st.lists(bodies, max_size=3))
)
beginnings = st.integers(0, len(HALF)).map(lambda n: HALF[:n])


def connection() -> BoundedConnection:
    """A connection whose requests nobody answers."""
    nobody: Any = None
    server = SimpleNamespace(
        request_handler=nobody,
        request_factory=nobody,
        turns=FairTurns(),
        note=lambda _: None,
        grew=lambda _: None,
    )
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {"unread_s": 60.0, "are_handlers_timed": True, **http1_options(60)}
    return BoundedConnection(
        cast(web.Server, server), cast(Connections, server), nobody, 60.0, loop=loop, **options
    )


@settings(max_examples=drawn(125, whole=2500))
@given(st.lists(requests, max_size=4), beginnings, st.data())
def test_what_is_incomplete_is_known_to_the_byte_however_it_came(
    whole: list[bytes], half: bytes, data: st.DataObject
) -> None:
    """Behind chunks, whose end may lie in two packets, to three bytes; and not less than that where more
    requests come in their packet."""
    sent = b"".join(whole) + half
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sent)), max_size=6)))
    pieces = [sent[begin:end] for begin, end in pairwise([0, *cuts, len(sent)])]
    are_taken = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))

    async def receive() -> None:
        protocol, begun = connection(), 0
        for piece, is_taken in zip(pieces, are_taken, strict=True):
            protocol.data_received(piece)
            if is_taken:  # as by the handler, once it has answered what came before
                begun += len(protocol._messages)
                protocol._messages.clear()
        found, is_timed = protocol._head_len, protocol._head_timer is not None
        protocol._end_head()
        assert begun + len(protocol._messages) == len(whole)
        assert is_timed == (found > 0)
        if any(b"chunked" in each for each in whole):
            assert found >= len(half) - 3
        else:
            assert found == len(half)

    asyncio.run(receive())


@pytest.mark.parametrize(
    ("sent", "is_one"),
    [
        (WHOLE, True),
        (with_length(b"{}"), True),
        (with_length(b"a\r\n\r\nb"), True),
        (b"\r\n\r\n", True),  # a malformed one
        (with_length(b"{}") + b"G", False),
        (with_length(b"{}")[:-1], False),
        (WHOLE + WHOLE, False),
        (in_chunks([b"{}"]), False),
        (HALF, False),
        (b"abc", False),
        (b"GET / HTTP/1.1\r\nx: %b\r\n\r\n" % (b"y" * HEAD_LEN_MAX), False),
    ],
)
def test_a_packet_is_one_request_if_it_ends_where_its_head_says(sent: bytes, is_one: bool) -> None:
    assert is_one_request(sent) is is_one


BEFORE = pytest.mark.parametrize(
    "before", [b"", WHOLE, WHOLE * 3], ids=["at first", "behind one", "behind three"]
)


@BEFORE
async def test_a_head_that_stops_is_ended_after_its_time(open_house: Open, before: bytes) -> None:
    """All in one packet, and however long an idle connection may live."""
    house = await open_house(timeouts={"head_s": SOON_S, "idle_s": 600})
    client = await RawClient.of(house)
    client.writer.write(before + HALF)
    async with asyncio.timeout(PATIENCE_S):
        assert (await client.reader.read()).count(b"HTTP/1.1 200") == len(before) // len(WHOLE)
    client.leave()


@BEFORE
async def test_heads_that_stop_are_bounded_in_number(
    house: House, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(listener, "HOLDING_MAX", 3)
    held = []
    for _ in range(6):
        held.append(await asyncio.open_connection("127.0.0.1", house.gateway.port))
        held[-1][1].write(before + HALF)
        async with house.get("/v1/models") as answer:
            assert answer.status == 200
    async with asyncio.timeout(PATIENCE_S):
        for reader, _ in held[:3]:
            await reader.read()
    assert not any(reader.at_eof() for reader, _ in held[3:])
    for _, writer in held:
        writer.close()
    await until(lambda: "gateway.heads_full" in house.log.getvalue())


@pytest.mark.parametrize("before", [b"", WHOLE], ids=["at first", "behind one"])
async def test_a_head_that_is_too_long_is_refused_though_it_has_no_end(house: House, before: bytes) -> None:
    lines = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 8000) for i in range(6))
    assert HEAD_LEN_MAX < len(lines) < HEAD_PARSED_MAX
    reader, writer = await asyncio.open_connection("127.0.0.1", house.gateway.port)
    async with asyncio.timeout(PATIENCE_S):
        writer.write(before + HALF + b"\r\n" + lines)
        answers = await reader.read()
    assert (answers.count(b" 200 OK"), answers.count(b" 400 Bad")) == (len(before) > 0, 1)
    writer.close()


CHUNKS = b"1\r\na\r\n" * 20_000
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_connections_first_packet_of_tiny_chunks_is_refused(house: House) -> None:
    status, _ = await answered(house, CHUNKED + CHUNKS)
    assert status == 400


async def test_tiny_chunks_are_refused_wherever_their_request_is() -> None:
    """Its head may have come a moment ago, behind a request that has no chunks."""
    for sent in ([CHUNKED, CHUNKS], [WHOLE + CHUNKED, CHUNKS], [WHOLE, CHUNKED + CHUNKS]):
        protocol = connection()
        for piece in sent:
            protocol.data_received(piece)
        assert protocol._is_refused


async def test_a_stream_outlives_half_a_head_behind_it(
    open_house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await open_house(timeouts={"head_s": SOON_S, "idle_s": 600})
    late, is_late = [], BoundedConnection._head_is_late

    def count(protocol: BoundedConnection) -> None:
        late.append(protocol)
        is_late(protocol)

    monkeypatch.setattr(BoundedConnection, "_head_is_late", count)
    ends = asyncio.Event()
    house.engine.script = lambda _: stream(chunk("a"), ends, chunk("b"))
    client = await RawClient.posting(house, body(stream=True))
    client.writer.write(HALF)
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: len(late) > 2)
        ends.set()
        assert b"[DONE]" in await client.reader.read()
    client.leave()
