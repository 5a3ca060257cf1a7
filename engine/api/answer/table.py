"""The encoder of each API, by the type of its requests. A further API is a module beside this one, and a
line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from engine.api.answer.chat import ChatEncoder
from engine.api.answer.completions import CompletionEncoder
from engine.api.answer.encoder import Answered, AnswerEncoder, Heading, Vocabulary
from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.generation import GenerationRequest
from shared.wire import sse
from shared.wire.errors import ApiError


class AnswerApi(Struct, frozen=True):
    """The way in which an API writes its answers."""

    id_prefix: str
    """The beginning of the id of each answer."""
    encoder: Callable[[Heading, Vocabulary, Answered], AnswerEncoder]
    error_event: Callable[[ApiError], bytes] = sse.error_event
    """Makes the event that ends a stream which fails after its first byte."""


ANSWERS: Final[Mapping[type[GenerationRequest], AnswerApi]] = {
    ChatRequest: AnswerApi("chatcmpl-", ChatEncoder),
    CompletionRequest: AnswerApi("cmpl-", CompletionEncoder),
}
