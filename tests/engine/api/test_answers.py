"""The table of answers: an API that is added there is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from engine.api.answer.encoder import Answered, Heading, Vocabulary, encode
from engine.api.answer.outputs import Delta, RequestOutput
from engine.api.answer.table import ANSWERS, AnswerApi
from engine.api.http.generate import generate
from engine.api.http.handlers import EXACT
from shared.apis.chat import ChatRequest
from shared.apis.generation import Usage
from shared.wire import sse
from shared.wire.errors import InvalidRequest, RequestTimeout
from shared.wire.ids import REQUEST_TIMEOUT_HEADER
from tests.added_api import ALIVE, OPEN, OVER, EchoAnswer, EchoRequest, error_body, error_event
from tests.engine.api.conftest import MODEL, Serve, Served, until
from tests.fakes import VirtualClock


class EchoEncoder:
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        """Nothing of these is told."""

    def opening(self, usage: Usage) -> bytes:
        return OPEN % usage.prompt_tokens

    def events(self, delta: Delta) -> Iterator[bytes]:
        if delta.parts:
            yield sse.event(encode(EchoAnswer(delta.text)))

    def ending(self, usage: Usage) -> bytes:
        return OVER

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[bytes]:
        yield encode(EchoAnswer(deltas[0].text))


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(ANSWERS, dict)
    api = AnswerApi("echo-", EchoEncoder, error_body, error_event, opens_early=True, keepalive=ALIVE)
    monkeypatch.setitem(ANSWERS, EchoRequest, api)
    monkeypatch.setitem(EXACT, EchoRequest.path, {"POST": partial(generate, kind=EchoRequest)})


async def test_an_added_api_is_answered(served: Served) -> None:
    served.says(" jumps")
    asked = {"model": MODEL, "text": "the fox"}
    whole = await served.http.post(EchoRequest.path, json=asked)
    assert (whole.status_code, whole.json()) == (200, {"text": " jumps"})
    streamed = await served.http.post(EchoRequest.path, json={**asked, "stream": True})
    opened = OPEN % len(served.ids("the fox"))
    assert streamed.content.startswith(opened)
    told, _, comment = streamed.content.removeprefix(opened).partition(OVER)
    texts = [json.loads(line[6:])["text"] for line in told.decode().splitlines() if line]
    assert ("".join(texts), comment[:10]) == (" jumps", b": penstock")
    refused = await served.http.post(EchoRequest.path, json={"model": MODEL, "text": ""})
    assert refused.content == error_body(InvalidRequest("Empty."), refused.headers["x-request-id"])


async def test_its_streams_fail_as_it_says(served: Served) -> None:
    served.says(" jumps", ends=False)
    asked = {"model": MODEL, "text": "the fox", "stream": True}
    headers = {REQUEST_TIMEOUT_HEADER: "0.2"}
    answer = await served.http.post(EchoRequest.path, json=asked, headers=headers)
    assert error_event(RequestTimeout("Over."), answer.headers["x-request-id"]) in answer.content
    assert OVER not in answer.content


class Reader:
    """A stream that is read as it comes."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces, self._read = pieces, b""

    async def sees(self, expected: bytes) -> None:
        """Assert that the next bytes are these."""
        while len(self._read) < len(expected):
            self._read += await anext(self._pieces)
        assert self._read.startswith(expected)
        self._read = self._read[len(expected) :]


@asynccontextmanager
async def reading(served: Served, path: str, **asked: object) -> AsyncIterator[Reader]:
    body = {"model": MODEL, "stream": True, **asked}
    async with served.http.stream("POST", path, json=body) as answer:
        yield Reader(answer.aiter_raw())


async def test_a_stream_that_opens_early_opens_at_admission(serve: Serve) -> None:
    clock = VirtualClock()
    async with serve(clock=clock, stream_keepalive_s=10.0) as served:
        served.says(" jumps")
        core = served.core
        core.is_held = True
        async with reading(served, EchoRequest.path, text="the fox") as reader:
            await until(lambda: bool(core.waiting))
            for _ in range(2):  # a queued request is told nothing but that it is heard
                clock.advance(10.0)
                await reader.sees(sse.KEEPALIVE)
            ids = core.script(core.added[0])
            core.script = lambda _: []
            core.step()
            await reader.sees(OPEN % len(served.ids("the fox")))
            clock.advance(10.0)  # something was written in this time
            await asyncio.sleep(0)
            clock.advance(10.0)
            await reader.sees(ALIVE)
            [running] = core.running.values()
            running.script = ids
            core.release()
            await reader.sees(b"data: ")
        await until(lambda: not core.running)
        served.assert_nothing_leaks()


async def test_a_comment_keeps_a_chat_alive_where_an_operator_wants_it(serve: Serve) -> None:
    clock = VirtualClock()
    messages = [{"role": "user", "content": "the fox"}]
    for keepalive_s, expected in (10.0, sse.KEEPALIVE), (None, b""):
        async with serve(clock=clock, stream_keepalive_s=keepalive_s) as served:
            served.says(" jumps")
            served.core.is_held = True
            async with reading(served, ChatRequest.path, messages=messages) as reader:
                await until(partial(bool, served.core.waiting))
                clock.advance(10.0)
                await reader.sees(expected)
                served.core.release()
                await reader.sees(b"data: {")


async def test_a_client_that_does_not_read_is_sent_no_keepalive(serve: Serve) -> None:
    output = RequestOutput(1)
    waiting = asyncio.create_task(output.take())
    await asyncio.sleep(0)
    assert output.is_awaited
    output.stir()
    assert (await waiting, output.is_awaited) == ([], False)
