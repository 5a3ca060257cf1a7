"""Request bodies for the tests of validation, and the refusal of a bad one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.generation import GenerationRequest
from shared.apis.request import Request
from shared.apis.responses.request import ResponsesRequest
from shared.apis.validation import parse
from shared.wire.errors import InvalidRequest

REQUESTS: list[type[GenerationRequest]] = [ChatRequest, CompletionRequest, ResponsesRequest]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {"role": "assistant", "content": "hi"}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
MINIMAL: dict[type, dict[str, Any]] = {
    ChatRequest: CHAT,
    CompletionRequest: COMPLETION,
    ResponsesRequest: {"model": "m", "input": "hi"},
}


def chat(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({**COMPLETION, **fields}).encode()


def refused(body: bytes, type_: type[Request] = ChatRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, type_)
    assert caught.value.status == 400
    return caught.value
