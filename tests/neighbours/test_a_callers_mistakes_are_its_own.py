"""Requests that no client of ours sends: each is its caller's mistake, is told so, and raises no alarm."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from shared.apis.holding import DEPTH_MAX
from tests.bench.gateway.attack import Who, chat
from tests.neighbours.conftest import House
from tests.services import PATIENCE_S, until

BODY = chat(max_tokens=4)()
LENGTH = b"content-length: %d\r\n" % len(BODY)
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
KEY = b"authorization: Bearer %b\r\n" % Who.ATTACKER.encode()
HOST = b"host: here\r\n"

VECTORS: dict[str, tuple[bytes, set[int]]] = {
    "a length of 5,000 digits": (LINE + HOST + KEY + b"content-length: " + b"9" * 5000 + b"\r\n", {400, 413}),
    "a length with 5,000 zeros before it": (
        LINE + HOST + KEY + b"content-length: %b%d\r\n" % (b"0" * 5000, len(BODY)),
        {200, 400},
    ),
    "a queue timeout that is no text": (LINE + HOST + KEY + LENGTH + b"x-queue-timeout: \xff\r\n", {400}),
    "a deadline that is no text": (LINE + HOST + KEY + LENGTH + b"x-request-timeout: \x80\r\n", {400}),
    "deadlines of 8,000 digits": (
        LINE + HOST + KEY + LENGTH + b"x-queue-timeout: %b\r\n" % (b"9" * 8000),
        {400},
    ),
    "a deadline that nobody can keep": (LINE + HOST + KEY + LENGTH + b"x-request-timeout: 1e-300\r\n", {504}),
    "two keys": (LINE + HOST + KEY + b"authorization: Bearer other\r\n" + LENGTH, {400}),
    "a body that is compressed and chunked": (
        LINE + HOST + KEY + b"transfer-encoding: gzip, chunked\r\n",
        {400},
    ),
    "a host that is a path": (LINE + b"host: a/x?y\r\n" + KEY + LENGTH, {400}),
    "another version": (LINE.replace(b"1.1", b"2.0") + HOST + KEY + LENGTH, {400, 505}),
    "a version before all others": (LINE.replace(b"1.1", b"0.9") + HOST + KEY + LENGTH, {400, 505}),
    "10,000 headers": (LINE + HOST + KEY + LENGTH + b"x: y\r\n" * 10_000, {400}),
    "a path with an escaped letter": (LINE.replace(b"chat/", b"%63hat/") + HOST + KEY + LENGTH, {404}),
    "a path with an escaped slash": (LINE.replace(b"chat/", b"chat%2f") + HOST + KEY + LENGTH, {404}),
}
ALARMS = {"upstream_failed", "engine_failed", "internal_error"}


async def answered(house: House, head: bytes, body: bytes = BODY) -> bytes:
    """All that comes back, until the gateway closes the connection."""
    address = urlsplit(house.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(head + b"connection: close\r\n\r\n" + body)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(("head", "statuses"), VECTORS.values(), ids=VECTORS.keys())
async def test_a_mistake_is_answered_as_one_and_raises_no_alarm(
    house: House, head: bytes, statuses: set[int]
) -> None:
    seen = len(house.gateway.completed)
    answer = await answered(house, head)
    assert int(answer.split(b" ", 2)[1]) in statuses, answer[:500]
    assert b"aiohttp" not in answer
    await asyncio.to_thread(until, lambda: len(house.gateway.completed) > seen)
    assert not ALARMS & {line["end_reason"] for line in house.gateway.completed[seen:]}
    await house.victim.alone(1)


@pytest.mark.parametrize("levels", [DEPTH_MAX + 1, 50_000, 4_000_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
async def test_a_body_of_many_levels_is_refused_before_it_is_decoded(
    house: House, levels: int, opening: str, closing: str
) -> None:
    """A decoder goes down them on the stack of its thread."""
    deep = opening * levels + "0" + closing * levels
    body = BODY.replace(b'"max_tokens"', f'"x_deep":{deep},"max_tokens"'.encode(), 1)
    assert len(body) > len(BODY)
    head = LINE + HOST + KEY + b"content-length: %d\r\n" % len(body)
    answer = await answered(house, head, body)
    assert answer.startswith(b"HTTP/1.1 4"), answer[:500]
    assert int(answer.split(b" ", 2)[1]) in (400, 413)
    await house.victim.alone(1)
