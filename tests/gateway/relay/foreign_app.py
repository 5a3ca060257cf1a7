"""An engine of somebody else's: OpenAI's API as an ASGI app, and nothing of ours.

No closing comment, no tokenizer endpoint, errors in an envelope of its own. The prompt says what to do:

    endless     stream until the client is gone
    mute        tell no usage
    absurd      tell one that no request can have
    crlf        end lines with CRLF
    long N      answer with N characters, unless in a stream; `first`: its usage comes before them
    bad, busy   refuse, flat and with a number for a code
    ...         an answer of three tokens
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MODEL = "their-model"
WORDS = ("one", " two", " three")
USAGE = {"prompt_tokens": 21, "completion_tokens": 4, "total_tokens": 25, "prompt_tokens_details": None}
ABSURD = {**USAGE, "prompt_tokens": 10**30}
REFUSALS = {"bad": (400, "temperature is too hot"), "busy": (503, "come back later")}

left = 0
"""Streams whose client went away; told at `/left`."""


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    match scope["path"]:
        case "/v1/models":
            await answer(send, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        case "/v1/chat/completions":
            await chat(json.loads(await body_of(receive)), receive, send)
        case "/left":
            await answer(send, 200, left)
        case _:
            await answer(send, 404, {"detail": "Not Found"})


async def chat(body: Message, receive: Receive, send: Send) -> None:
    prompt = body["messages"][-1]["content"]
    if prompt in REFUSALS:
        status, message = REFUSALS[prompt]
        await answer(send, status, {"object": "error", "message": message, "code": status})
    elif not body.get("stream"):
        _, length, *first = prompt.split() if prompt.startswith("long ") else ("", "")
        said = {"role": "assistant", "content": "y" * int(length) if length else "".join(WORDS)}
        choices = [{"index": 0, "message": said, "finish_reason": "stop"}]
        told = {"usage": ABSURD if prompt == "absurd" else USAGE}
        begins = told if first else {}
        await answer(send, 200, {"id": "x", "model": MODEL, **begins, "choices": choices, **told})
    else:
        await begin(send, 200, b"text/event-stream")
        await (endless(receive, send) if prompt == "endless" else stream(body, prompt, send))


async def stream(body: Message, prompt: str, send: Send) -> None:
    events: list[Message] = [
        {"choices": [{"index": 0, "delta": {"content": word}}], "usage": None} for word in WORDS
    ]
    if (body.get("stream_options") or {}).get("include_usage") and prompt != "mute":
        events.append({"choices": [], "usage": ABSURD if prompt == "absurd" else USAGE})
    end = b"\r\n\r\n" if prompt == "crlf" else b"\n\n"
    for event in (*map(json.dumps, events), "[DONE]"):
        await send(
            {"type": "http.response.body", "body": b"data: " + event.encode() + end, "more_body": True}
        )
    await send({"type": "http.response.body", "body": b""})


async def endless(receive: Receive, send: Send) -> None:
    global left
    gone = asyncio.ensure_future(receive())
    while not gone.done():
        event = b'data: {"choices": [{"index": 0, "delta": {"content": "more"}}]}\n\n'
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0)
    left += 1


async def answer(send: Send, status: int, value: Any) -> None:
    await begin(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


async def begin(send: Send, status: int, content_type: bytes) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}
    )


async def body_of(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body
