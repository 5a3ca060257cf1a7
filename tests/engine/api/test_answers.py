"""The table of answers: an API that is added there is served."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from engine.api.answer.encoder import Answered, Heading, Vocabulary, encode
from engine.api.answer.outputs import Delta
from engine.api.answer.table import ANSWERS, AnswerApi
from engine.api.http.generate import generate
from engine.api.http.handlers import EXACT
from shared.apis.generation import Usage
from shared.wire import sse
from shared.wire.errors import RequestTimeout
from shared.wire.ids import REQUEST_TIMEOUT_HEADER
from tests.added_api import OVER, EchoAnswer, EchoRequest, error_event
from tests.engine.api.conftest import MODEL, Served


class EchoEncoder:
    def __init__(self, heading: Heading, vocabulary: Vocabulary, answered: Answered) -> None:
        """Nothing of these is told."""

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
    monkeypatch.setitem(ANSWERS, EchoRequest, AnswerApi("echo-", EchoEncoder, error_event))
    monkeypatch.setitem(EXACT, EchoRequest.path, {"POST": partial(generate, kind=EchoRequest)})


async def test_an_added_api_is_answered(served: Served) -> None:
    served.says(" jumps")
    asked = {"model": MODEL, "text": "the fox"}
    whole = await served.http.post(EchoRequest.path, json=asked)
    assert (whole.status_code, whole.json()) == (200, {"text": " jumps"})
    streamed = await served.http.post(EchoRequest.path, json={**asked, "stream": True})
    told, _, comment = streamed.content.partition(OVER)
    texts = [json.loads(line[6:])["text"] for line in told.decode().splitlines() if line]
    assert ("".join(texts), comment[:10]) == (" jumps", b": penstock")
    refused = await served.http.post(EchoRequest.path, json={"model": MODEL, "text": ""})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text")


async def test_its_streams_fail_as_it_says(served: Served) -> None:
    served.says(" jumps", ends=False)
    asked = {"model": MODEL, "text": "the fox", "stream": True}
    headers = {REQUEST_TIMEOUT_HEADER: "0.2"}
    answer = await served.http.post(EchoRequest.path, json=asked, headers=headers)
    assert error_event(RequestTimeout("Over.")) in answer.content
    assert OVER not in answer.content
