"""An engine without a model, which answers with paced streams, for measuring a gateway in front of it.

All streams emit on one clock tick, as a real engine's do when a step ends. It speaks the hop, HTTP/2 and
HTTP/1.1 on one port, with the tokenizer endpoint and the closing comment, so that a gateway in front does all
of its work. The number of events is the request's `max_tokens`, and their length its `event_len`. Its
HTTP/1.1 is the least that a load needs: no pipelining, no chunked requests. Run as `python -m
tests.bench.gateway.paced_engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec

from engine.api.http.http2_server import Http2Server, ServerRequest, ServerResponder
from engine.api.http.sniff import SniffingProtocol
from shared.apis.chat import AssistantMessage, ChatChoice, ChatCompletion
from shared.apis.generation import PromptTokensDetails, Usage
from shared.apis.models import Model, ModelList
from shared.process.loops import loop_factory
from shared.text.tokenizer import TokenizerBundle
from shared.wire.http import ClientGone
from shared.wire.ids import TOKENIZER_HEADER
from shared.wire.shapes import BODY_LEN_MAX
from shared.wire.sse import CLOSING_HEADER, DONE, Closing, closing_comment, encode_closing

MODEL: Final = "paced"
PROMPT_TOKENS: Final = 16
CREATED: Final = 1_700_000_000
CONTEXT_LEN: Final = 1_000_000
"""The context length: long enough for a stream to run for as long as a bench measures."""
BODY_DEADLINE_S: Final = 60.0
_EVENT_HEAD: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"paced","choices":[{"index":0,"delta":{"content":"'
)
_EVENT_TAIL: Final = b'"},"finish_reason":null}]}\n\n'
_FOREIGN_USAGE: Final = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"paced","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
) + DONE
EVENT_LEN: Final = len(_EVENT_HEAD + b" token" + _EVENT_TAIL)
STATS: Final = "/paced/stats"
"""The path of a GET that returns `Stats`."""


class StreamStats(msgspec.Struct):
    event_len: int
    written_len: int
    """Bytes of events that were written."""
    waits: bool
    """True if the reader is behind by a whole tick."""


class Stats(msgspec.Struct):
    streams: list[StreamStats]
    """The open streams."""


class _Wants(msgspec.Struct):
    stream: bool | None = None
    max_tokens: int | None = None
    event_len: int | None = None

    @property
    def event(self) -> bytes:
        return _EVENT_HEAD + b" token".ljust(self._text_len, b"-") + _EVENT_TAIL

    @property
    def _text_len(self) -> int:
        return (self.event_len or EVENT_LEN) - len(_EVENT_HEAD + _EVENT_TAIL)


class Ticking(Protocol):
    event: bytes
    written_len: int
    waits: bool

    def tick(self) -> None:
        """Emit one event, without waiting."""
        ...


class Ticker:
    """One clock for all streams: each emits an event at every tick."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.streams: set[Ticking] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self.tick()

    def tick(self) -> None:
        for stream in list(self.streams):
            stream.tick()

    def stats(self) -> Stats:
        return Stats([StreamStats(len(one.event), one.written_len, one.waits) for one in self.streams])


class PacedEngine:
    """The answers, for either protocol."""

    def __init__(self, ticker: Ticker, model_dir: Path, *, is_foreign: bool = False) -> None:
        """`is_foreign`: it does without what only engines of ours have, as one of another make does."""
        model = Model(id=MODEL, created=CREATED, max_model_len=CONTEXT_LEN)
        bundle = TokenizerBundle.from_dir(model_dir)
        self.ticker = ticker
        self.is_foreign = is_foreign
        self.sse = {"content-type": "text/event-stream", TOKENIZER_HEADER: bundle.hash}
        self.json = {"content-type": "application/json", TOKENIZER_HEADER: bundle.hash}
        self._fixed = {
            "/penstock/tokenizer": msgspec.json.encode(bundle),
            "/v1/models": msgspec.json.encode(ModelList(data=[model])),
        }
        if is_foreign:
            del self.sse[TOKENIZER_HEADER], self.json[TOKENIZER_HEADER], self._fixed["/penstock/tokenizer"]

    def got(self, path: str) -> bytes:
        """The body of the answer to a GET."""
        return msgspec.json.encode(self.ticker.stats()) if path == STATS else self._fixed.get(path, b"{}")

    def knows(self, path: str) -> bool:
        """False for what an engine of another make has not."""
        return not (self.is_foreign and path.startswith("/penstock/"))

    def ending(self, events: int) -> bytes:
        """The end of a stream."""
        return (
            _FOREIGN_USAGE % (PROMPT_TOKENS, events, PROMPT_TOKENS + events)
            if self.is_foreign
            else _ending(events)
        )

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
        headers = {**self.json, CLOSING_HEADER: encode_closing(_closing(events)).decode()}
        return headers, msgspec.json.encode(answer)

    async def handle(self, request: ServerRequest, responder: ServerResponder) -> None:
        """Answer a request over HTTP/2."""
        body = await request.body(len_max=BODY_LEN_MAX, deadline_s=BODY_DEADLINE_S)
        if not body:
            await responder.send(200, self.json, self.got(request.path))
            return
        wants = msgspec.json.decode(body, type=_Wants)
        events = wants.max_tokens or 16
        if not wants.stream:
            await responder.send(200, *self.unary(events))
            return
        await responder.start_stream(200, self.sse)
        stream = _Http2Stream(wants.event)
        self.ticker.streams.add(stream)
        try:
            for _ in range(events):
                await stream.due.wait()
                await responder.write(stream.event)
                stream.wrote()
            await responder.write(self.ending(events))
            await responder.finish()
        finally:
            self.ticker.streams.discard(stream)


class _Http2Stream:
    """A stream over HTTP/2. A tick that comes while a write still waits is lost, as a step is to a stalled
    sequence."""

    def __init__(self, event: bytes) -> None:
        self.due = asyncio.Event()
        self.event = event
        self.written_len = 0
        self.waits = False

    def tick(self) -> None:
        self.waits = self.due.is_set()
        self.due.set()

    def wrote(self) -> None:
        self.due.clear()
        self.waits = False
        self.written_len += len(self.event)


class Http1Connection(asyncio.Protocol):
    """A kept-alive connection over HTTP/1.1."""

    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._events = self._left = 0
        self.event = b""
        self.written_len = 0
        self.waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.ticker.streams.discard(self)

    def pause_writing(self) -> None:
        self.waits = True

    def resume_writing(self) -> None:
        self.waits = False

    def tick(self) -> None:
        if self.waits:
            return
        self._transport.write(_chunk(self.event))
        self.written_len += len(self.event)
        self._left -= 1
        if self._left == 0:
            self._engine.ticker.streams.discard(self)
            self._transport.write(_chunk(self._engine.ending(self._events)) + b"0\r\n\r\n")

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
        if not self._engine.knows(path):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        if not body:
            self._send(self._engine.json, self._engine.got(path))
            return
        wants = msgspec.json.decode(body, type=_Wants)
        self._events = self._left = wants.max_tokens or 16
        if wants.stream:
            self.event = wants.event
            self._transport.write(_head({**self._engine.sse, "transfer-encoding": "chunked"}))
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


async def serve(port: int, interval_s: float, model_dir: Path, *, is_foreign: bool) -> None:
    engine = PacedEngine(Ticker(interval_s), model_dir, is_foreign=is_foreign)

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
    parser.add_argument("--foreign", action="store_true", help="be an engine of another make")
    options = parser.parse_args()
    interval_s = options.interval_ms / 1000
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(options.port, interval_s, options.tokenizer, is_foreign=options.foreign))


if __name__ == "__main__":
    main()
