"""The APIs whose answers are streamed, for tests of what holds for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.engine.api.conftest import MODEL


@dataclass(frozen=True, slots=True)
class Api:
    path: str
    asked: dict[str, Any]
    """A request for an answer to `hello`."""
    maximum: str
    """The field that bounds the answer."""
    choices: dict[str, Any]
    """The fields that ask for the most choices, of two, that the API has."""
    text_of: Callable[[dict[str, Any]], str]
    """The text of one event."""

    @property
    def count(self) -> int:
        """The number of those choices."""
        return int(self.choices.get("n", 1))

    def streamed_text(self, stream: bytes) -> str:
        """The text of a whole stream."""
        lines = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {")]
        return "".join(map(self.text_of, map(json.loads, lines)))


def _of_chunk(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _of_event(event: dict[str, Any]) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _of_delta(event: dict[str, Any]) -> str:
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


CHAT: Final = Api(
    "/v1/chat/completions",
    {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
    "max_tokens",
    {"n": 2},
    _of_chunk,
)
RESPONSES: Final = Api(
    "/v1/responses", {"model": MODEL, "input": "hello"}, "max_output_tokens", {}, _of_event
)
MESSAGES: Final = Api(
    "/v1/messages",
    {"model": MODEL, "max_tokens": 8000, "messages": [{"role": "user", "content": "hello"}]},
    "max_tokens",
    {},
    _of_delta,
)
each_api = pytest.mark.parametrize(
    "api", [CHAT, RESPONSES, MESSAGES], ids=lambda api: api.path.rpartition("/")[2]
)
