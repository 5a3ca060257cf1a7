"""An engine with no model in it: answers paced streams, for measuring what stands in front of it.

All streams emit on one clock tick, as a real engine's do when a step ends. It speaks the hop, HTTP/2 and
HTTP/1.1 on one port, with the tokenizer endpoint and the closing comment, so that a gateway in front does
all of its work. The number of events is the request's `max_tokens`. HTTP/1.1 is the least that a load
needs: no pipelining, no chunked requests. Run as `python -m shared.bench.paced_engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec

from shared.http import ClientGone
from shared.http2.server import Http2Server, ServerRequest, ServerResponder
from shared.http2.sniff import SniffingProtocol
from shared.openai import (
    BODY_LEN_MAX,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Model,
    ModelList,
    PromptTokensDetails,
    Usage,
)
from shared.sse import CLOSING_HEADER, DONE, Closing, closing_comment, encode_closing
from shared.tokenizer import TokenizerBundle

MODEL: Final = "paced"
PROMPT_TOKENS: Final = 16
CREATED: Final = 1_700_000_000
BODY_DEADLINE_S: Final = 60.0
_EVENT: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"paced","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
_SSE: Final = {"content-type": "text/event-stream", "cache-control": "no-cache"}
_JSON: Final = {"content-type": "application/json"}


class _Wants(msgspec.Struct):
    stream: bool | None = None
    max_tokens: int | None = None


class Ticking(Protocol):
    def tick(self) -> None:
        """Emit one event. Must not wait."""
        ...


class Ticker:
    """Lets every open stream emit one event at each tick."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.streams: set[Ticking] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            for stream in list(self.streams):
                stream.tick()


class PacedEngine:
    """What is answered, whichever protocol asks."""

    def __init__(self, ticker: Ticker, model_dir: Path) -> None:
        model = Model(id=MODEL, created=CREATED, max_model_len=4096)
        self.ticker = ticker
        self._fixed = {
            "/penstock/tokenizer": msgspec.json.encode(TokenizerBundle.from_dir(model_dir)),
            "/v1/models": msgspec.json.encode(ModelList(data=[model])),
        }

    def fixed(self, path: str) -> bytes:
        """The answer to a GET."""
        return self._fixed.get(path, b"{}")

    def unary(self, events: int) -> tuple[dict[str, str], bytes]:
        usage = Usage(PROMPT_TOKENS, events, PROMPT_TOKENS + events, PromptTokensDetails())
        answer = ChatCompletion(
            id="chatcmpl-0123456789abcdef",
            created=CREATED,
            model=MODEL,
            choices=[ChatChoice(0, AssistantMessage(" token" * events), "length")],
            usage=usage,
            system_fingerprint="fp_paced",
        )
        headers = {**_JSON, CLOSING_HEADER: encode_closing(_closing(events)).decode()}
        return headers, msgspec.json.encode(answer)

    async def handle(self, request: ServerRequest, responder: ServerResponder) -> None:
        """A request over HTTP/2."""
        body = await request.body(len_max=BODY_LEN_MAX, deadline_s=BODY_DEADLINE_S)
        if not body:
            await responder.send(200, _JSON, self.fixed(request.path))
            return
        wants = msgspec.json.decode(body, type=_Wants)
        events = wants.max_tokens or 16
        if not wants.stream:
            await responder.send(200, *self.unary(events))
            return
        await responder.start_stream(200, _SSE)
        stream = _Http2Stream()
        self.ticker.streams.add(stream)
        try:
            for _ in range(events):
                await stream.due.wait()
                stream.due.clear()
                await responder.write(_EVENT)
            await responder.write(_ending(events))
            await responder.finish()
        finally:
            self.ticker.streams.discard(stream)


class _Http2Stream:
    def __init__(self) -> None:
        self.due = asyncio.Event()

    def tick(self) -> None:
        self.due.set()


class Http1Connection(asyncio.Protocol):
    """One kept-alive connection over HTTP/1.1."""

    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._events = self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.ticker.streams.discard(self)

    def tick(self) -> None:
        self._transport.write(_chunk(_EVENT))
        self._left -= 1
        if self._left == 0:
            self._engine.ticker.streams.discard(self)
            self._transport.write(_chunk(_ending(self._events)) + b"0\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        lengths = (int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
        length = next(lengths, 0)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._answer(head.split(b" ", 2)[1].decode(), rest[:length])

    def _answer(self, path: str, body: bytes) -> None:
        if not body:
            self._send(_JSON, self._engine.fixed(path))
            return
        wants = msgspec.json.decode(body, type=_Wants)
        self._events = self._left = wants.max_tokens or 16
        if wants.stream:
            self._transport.write(_head({**_SSE, "transfer-encoding": "chunked"}))
            self._engine.ticker.streams.add(self)
        else:
            self._send(*self._engine.unary(self._events))

    def _send(self, headers: dict[str, str], body: bytes) -> None:
        self._transport.write(_head({**headers, "content-length": str(len(body))}) + body)


def _head(headers: dict[str, str]) -> bytes:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _closing(completion_tokens: int) -> Closing:
    return Closing(end_reason="ok", prompt_tokens=PROMPT_TOKENS, completion_tokens=completion_tokens)


def _ending(events: int) -> bytes:
    return DONE + closing_comment(_closing(events))


async def serve(port: int, interval_s: float, model_dir: Path) -> None:
    engine = PacedEngine(Ticker(interval_s), model_dir)

    async def handle(request: ServerRequest, responder: ServerResponder) -> None:
        with contextlib.suppress(ClientGone):
            await engine.handle(request, responder)

    http2 = Http2Server(handle)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: SniffingProtocol(http2.protocol, lambda: Http1Connection(engine)),
        "127.0.0.1",
        port,
        backlog=2048,
    )
    async with server:
        await engine.ticker.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=20.0, help="time between two events of a stream")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model whose tokenizer is served")
    options = parser.parse_args()
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(serve(options.port, options.interval_ms / 1000, options.tokenizer))


if __name__ == "__main__":
    main()
