"""An engine with no model in it: answers paced streams, for measuring what stands in front of it.

All streams emit on one clock tick, as a real engine's do when a step ends. It speaks the hop (the
tokenizer endpoint, the closing comment), so that a gateway in front does all of its work. The number
of events is the request's `max_tokens`. Run as `python -m shared.bench.paced_engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Final, cast

import msgspec

from shared.openai import Model, ModelList
from shared.sse import DONE, Closing, closing_comment
from shared.tokenizer import TokenizerBundle

MODEL: Final = "paced"
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"paced","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
_SSE_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class _Wants(msgspec.Struct):
    stream: bool | None = None
    max_tokens: int | None = None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _closing(completion_tokens: int) -> Closing:
    return Closing(
        end_reason="ok",
        prompt_tokens=16,
        completion_tokens=completion_tokens,
        cached_tokens=0,
        queue_ms=0.0,
        prefill_ms=0.0,
        decode_ms=0.0,
        preempted_ms=0.0,
        preemptions=0,
    )


def _usage(completion_tokens: int) -> dict[str, object]:
    total = 16 + completion_tokens
    return {"prompt_tokens": 16, "completion_tokens": completion_tokens, "total_tokens": total}


class Ticker:
    """Emits one event on every open stream at each tick."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.streams: dict[PacedConnection, int] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        event = _chunk(_EVENT)
        while True:
            due = max(due + self.interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            for connection, left in list(self.streams.items()):
                connection.write(event)
                self.streams[connection] = left - 1
                if left == 1:
                    del self.streams[connection]
                    connection.end_stream()


class PacedConnection(asyncio.Protocol):
    def __init__(self, ticker: Ticker, tokenizer: bytes) -> None:
        self._ticker = ticker
        self._tokenizer = tokenizer
        self._buffer = b""
        self._events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticker.streams.pop(self, None)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def end_stream(self) -> None:
        tail = DONE + closing_comment(_closing(self._events))
        self._transport.write(_chunk(tail) + b"0\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            ),
            0,
        )
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._answer(head.split(b" ", 2)[1], rest[:length])

    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/penstock/tokenizer":
            self._send(self._tokenizer)
        elif path == b"/v1/models":
            model = Model(id=MODEL, created=1700000000, max_model_len=4096)
            self._send(msgspec.json.encode(ModelList(data=[model])))
        elif not body:
            self._send(b"{}")
        else:
            wants = msgspec.json.decode(body, type=_Wants)
            self._events = wants.max_tokens or 16
            if wants.stream:
                self._transport.write(_SSE_HEAD)
                self._ticker.streams[self] = self._events
            else:
                self._send_unary()

    def _send_unary(self) -> None:
        closing = msgspec.json.encode(_closing(self._events))
        message = {"role": "assistant", "content": " token" * self._events}
        answer = {
            "id": "chatcmpl-0123456789abcdef",
            "object": "chat.completion",
            "created": 1700000000,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": _usage(self._events),
        }
        self._send(json.dumps(answer).encode(), b"x-penstock-closing: " + closing + b"\r\n")

    def _send(self, body: bytes, headers: bytes = b"") -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self._transport.write(head + headers + b"\r\n" + body)


async def serve(port: int, interval_s: float, model_dir: Path) -> None:
    tokenizer = msgspec.json.encode(TokenizerBundle.from_dir(model_dir))
    ticker = Ticker(interval_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: PacedConnection(ticker, tokenizer), "127.0.0.1", port, backlog=2048
    )
    async with server:
        await ticker.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between two events of a stream")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="model directory whose tokenizer is served"
    )
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.interval_ms / 1000, options.tokenizer))


if __name__ == "__main__":
    main()
