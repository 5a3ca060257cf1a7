"""An API that neither service has: `/v1/echoes`, whose prompt is a `text`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

from shared.apis.generation import GenerationRequest
from shared.apis.nothing import EXTENSIONS, Nothing
from shared.apis.prompt import TextPrompt
from shared.wire.errors import ApiError
from shared.wire.shapes import TOKENS_MAX

OPEN: Final = b"event: open\ndata: [%d]\n\n"
"""The event that opens a stream, with the number of the prompt's tokens."""
ALIVE: Final = b"event: alive\ndata: {}\n\n"
"""What is sent where there is nothing to say."""
OVER: Final = b"event: over\ndata: {}\n\n"
"""The last event of a whole answer."""


class EchoRequest(GenerationRequest, kw_only=True):
    path: ClassVar[str] = "/v1/echoes"
    operation: ClassVar[str] = "text_completion"
    prompt_param: ClassVar[str] = "text"
    nothing: ClassVar[Mapping[str, Nothing]] = EXTENSIONS

    text: str
    max_output_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None

    @property
    def prompt_form(self) -> TextPrompt:
        return TextPrompt(self.text, "text")

    @property
    def output_tokens_max(self) -> int | None:
        return self.max_output_tokens

    @property
    def max_tokens_param(self) -> str:
        return "max_output_tokens"


class EchoAnswer(Struct):
    text: str


def error_body(error: ApiError, request_id: str) -> bytes:
    return msgspec.json.encode({"type": "error", "problem": error.code, "of": request_id})


def error_event(error: ApiError, request_id: str) -> bytes:
    return b"event: failed\ndata: " + error_body(error, request_id) + b"\n\n"
