"""An engine that does what a test tells it to, step by step, and remembers what was done to it.

It listens as the real one does, for HTTP/2 and HTTP/1.1 on one port. Delays are events that the test
sets, never sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import tokenizers
from multidict import CIMultiDict
from tokenizers import decoders, models, pre_tokenizers

from engine.api.http.app import AioResponder, HttpServer
from engine.api.http.http2_server import ServerResponder
from shared.http2.connection_errors import ErrorCode
from shared.text.tokenizer import TokenizerBundle
from shared.wire import sse
from shared.wire.http import ClientGone, HttpRequest, Responder
from shared.wire.ids import TOKENIZER_HEADER
from shared.wire.load_report import LOAD_HEADER, LoadReport, encode_load
from shared.wire.shapes import BODY_LEN_MAX

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}assistant:"
)


def byte_bundle() -> TokenizerBundle:
    """One token per byte: what a prompt counts can be told by looking at it."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerBundle(tokenizer_json=tokenizer.to_str(), chat_template=CHAT_TEMPLATE)


class Headers:
    """The step at which the status and headers are sent."""


@dataclass(frozen=True)
class Cut:
    """The step at which the connection breaks."""

    code: ErrorCode = ErrorCode.INTERNAL_ERROR
    """What HTTP/2 tells of it."""


class Counted:
    """The step at which a request is in the queue: its load is told, other than by headers."""


HEADERS, CUT, COUNTED = Headers(), Cut(), Counted()
UNREAD = Cut(ErrorCode.REFUSED_STREAM)
"""The step at which a request over HTTP/2 is refused as one that was not looked at."""
Step = bytes | asyncio.Event | Headers | Cut | Counted


@dataclass
class Script:
    """One answer. Without HEADERS among the steps they come first."""

    steps: Sequence[Step]
    status: int = 200
    content_type: str = ""
    """The type of the answer. Empty: the one that was asked for."""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """One request as the engine saw it."""

    path: str
    headers: CIMultiDict[str]
    body: dict[str, Any]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """The client, the gateway that is, closed its connection before the answer's end."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "logprobs": None}
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
        "system_fingerprint": "fp",
    }
    return sse.event(msgspec.json.encode(value))


def closing(prompt: int = 10, completion: int = 3, reason: str = "ok") -> sse.Closing:
    return sse.Closing(
        end_reason=reason, prompt_tokens=prompt, completion_tokens=completion, cached_tokens=4, queue_ms=1.5
    )


def stream(*steps: Step, end: sse.Closing | None = None) -> Script:
    """A whole stream around the steps."""
    return Script([*steps, sse.DONE, sse.closing_comment(end or closing())])


def unary(text: str = "hello", *, end: sse.Closing | None = None, before: Sequence[Step] = ()) -> Script:
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
        "system_fingerprint": "fp",
    }
    headers = {sse.CLOSING_HEADER: sse.encode_closing(end or closing()).decode()}
    return Script([*before, HEADERS, msgspec.json.encode(value)], 200, "application/json", headers)


def as_asked(seen: Seen) -> Script:
    """A whole answer, as a stream where one was asked for."""
    return stream(chunk("a"), chunk("b"), chunk("c")) if seen.body.get("stream") else unary()


def refusal(status: int, code: str, message: str = "no", **headers: str) -> Script:
    error = {"message": message, "type": "t", "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    return Script([body], status, "application/json", {k.replace("_", "-"): v for k, v in headers.items()})


class FakeEngine:
    """`async with FakeEngine() as engine:`; `engine.script` says how to answer the next requests."""

    def __init__(
        self,
        *,
        bundle: TokenizerBundle | None = None,
        max_model_len: int | None = 4096,
        context_len: int | None = None,
    ) -> None:
        self.bundle = bundle
        self.max_model_len = max_model_len
        self.owned_by: str | None = None
        """Whose it says that it is."""
        self.capabilities: dict[str, bool] | None = None
        """The abilities that it tells of its model."""
        self.context_len = context_len
        """The model's context, which it lists if its KV cache holds less."""
        self.script: Script | Callable[[Seen], Script] = as_asked
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()
        """Set at every request that is to be answered by the script."""
        self.active = 0
        self.reports: sse.Closing | None = None
        """What it says of every answer when that is over, cut off or not."""
        self.load: LoadReport | None = None
        """What it says of its load in its headers, and at `COUNTED`."""
        self.written = 0
        """Bytes of bodies, accepted by the socket."""
        self.url = ""

    async def __aenter__(self) -> FakeEngine:
        self._server = HttpServer(self._handle, host="127.0.0.1", port=0, keepalive_timeout_s=60.0)
        self.url = f"http://127.0.0.1:{await self._server.start()}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop()

    def push(self, payload: LoadReport | bytes) -> None:
        """Tell all gateways a load."""
        self._server.push_load(payload if isinstance(payload, bytes) else encode_load(payload))

    def drain(self) -> None:
        """Over HTTP/2: finish what runs, take nothing more."""
        self._server.retire()

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        match request.path:
            case "/v1/models":
                model: dict[str, Any] = {"id": "tiny", "object": "model", "created": 7}
                model["max_model_len"] = self.max_model_len
                if self.capabilities is not None:
                    model["capabilities"] = self.capabilities
                if self.owned_by is not None:
                    model["owned_by"] = self.owned_by
                if self.context_len is not None:
                    model["context_len"] = self.context_len
                listed = msgspec.json.encode({"object": "list", "data": [model]})
                await responder.send(200, self._named(), listed)
            case "/penstock/tokenizer":
                if self.bundle is None:
                    await responder.send(404, {}, b"")
                    return
                await responder.send(200, self._named(), msgspec.json.encode(self.bundle))
            case _:
                await self._answer(request, responder)

    def _named(self) -> dict[str, str]:
        return {} if self.bundle is None else {TOKENIZER_HEADER: self.bundle.hash}

    async def _answer(self, request: HttpRequest, responder: Responder) -> None:
        body = await request.body(len_max=2 * BODY_LEN_MAX, deadline_s=60.0)
        seen = Seen(request.path, CIMultiDict(request.headers), msgspec.json.decode(body))
        self.seen.append(seen)
        self.active += 1
        self.arrived.set()
        try:
            script = self.script(seen) if callable(self.script) else self.script
            asked = "text/event-stream" if seen.body.get("stream") else "application/json"
            await self._play(responder, script, script.content_type or asked)
        except (asyncio.CancelledError, ClientGone):
            seen.cancelled.set()
            raise
        finally:
            self.active -= 1
            seen.finished.set()
            if self.reports is not None:
                responder.report(sse.encode_closing(self.reports))

    async def _play(self, responder: Responder, script: Script, content_type: str) -> None:
        headers = {"content-type": content_type, **script.headers}
        if self.bundle is not None:
            headers[TOKENIZER_HEADER] = self.bundle.hash
        if self.load is not None:
            headers[LOAD_HEADER] = encode_load(self.load).decode()
        steps = list(script.steps)
        if HEADERS not in steps:
            steps.insert(0, HEADERS)
        for step in steps:
            match step:
                case Headers():
                    await responder.start_stream(script.status, headers)
                case bytes():
                    await responder.write(step)
                    self.written += len(step)
                case asyncio.Event():
                    await step.wait()
                case Counted():
                    responder.tell_load(encode_load(self.load or LoadReport()))
                case Cut():
                    _cut(responder, step.code)
                    raise ClientGone
        await responder.finish()


def _cut(responder: Responder, code: ErrorCode) -> None:
    """Break off: the stream on HTTP/2, the whole connection on HTTP/1.1."""
    if isinstance(responder, ServerResponder):
        responder._stream.reset(code)
    else:
        assert isinstance(responder, AioResponder)
        assert responder._request.transport is not None
        responder._request.transport.abort()
