"""Heads of requests with a canary, a text that nothing else contains, wherever a caller can write."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from tests.waiting import PATIENCE_S

NAMES: Final = (
    *("accept", "accept-encoding", "accept-language", "baggage", "b3", "cache-control", "connection"),
    *("content-encoding", "content-length", "content-type", "cookie", "date", "expect", "forwarded", "from"),
    *("host", "if-match", "if-none-match", "keep-alive", "origin", "proxy-authorization", "range", "te"),
    *("referer", "tracestate", "trailer", "transfer-encoding", "upgrade", "user-agent", "via", "zzz"),
    *("x-forwarded-for", "x-queue-timeout", "x-request-timeout", "x-stainless-retry-count"),
)
SAMPLED: Final = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n"


def heads_with(canary: str, key: str) -> Iterator[bytes]:
    """The heads. Each is sent on a connection of its own."""
    get = f"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
    for name in NAMES:
        yield f"{get}{SAMPLED}{name}: {canary}\r\n\r\n".encode()
    yield f"{get}x-request-id: {canary} is no id\r\n\r\n".encode()
    states = (f"a={canary},=", f"{canary.upper()}=1", f"a={canary},a=1", f"1{canary}=1", f"a={canary}=")
    many = ",".join(f"{canary}{number}=1" for number in range(20))
    for state in (*states, f"{canary} {canary}=1", many, f"a={canary}\t"):
        yield f"{get}{SAMPLED}tracestate: {state}\r\n\r\n".encode()
    for parent in (canary, f"00-{canary}", f"01{SAMPLED[15:-2]}-{canary}"):
        yield f"{get}traceparent: {parent}\r\n\r\n".encode()
    yield f"{canary}\r\n\r\n".encode()
    yield f"GET /{canary} HTTP/9.9\r\nhost: a\r\n\r\n".encode()
    yield f"{canary} / HTTP/1.1\r\nhost: a\r\n\r\n".encode()
    for line in (canary, f"{canary} : x", f"{canary}\0: x", f"x: {canary}\0", f"x: {canary}\n y"):
        yield f"{get}{line}\r\n\r\n".encode()
    yield f"{get}content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n{canary}\r\n".encode()
    yield f"{get}x: {canary * 2000}\r\n\r\n".encode()


async def answered(port: int, head: bytes) -> bytes:
    """The beginning of the answer to a head, on a connection that is then left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read(64)
    finally:
        writer.close()
