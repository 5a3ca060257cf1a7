"""What the foreign server serves: echo, a stream of events, a stream without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
cancelled = 0


async def read_all(receive: Callable[[], Awaitable[Message]]) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    if scope["type"] != "http":
        return
    body = await read_all(receive)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    )
    if scope["path"] == "/echo":
        await send({"type": "http.response.body", "body": body})
    elif scope["path"] == "/cancelled":
        await send({"type": "http.response.body", "body": b"%d" % cancelled})
    else:
        await stream(scope["path"], receive, send)


async def stream(
    path: str, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    global cancelled
    gone = asyncio.ensure_future(receive())
    count = 0
    while not gone.done() and (count < 20 or path == "/endless"):
        await send({"type": "http.response.body", "body": b"data: %0150d\n\n" % count, "more_body": True})
        count += 1
    if gone.done():
        cancelled += 1
    else:
        gone.cancel()
        await send({"type": "http.response.body", "body": b""})
