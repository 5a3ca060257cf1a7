"""The encoder of each API, by the type of its requests. A further API is a module beside this one, and a
line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Raw, Struct

from engine.api.answer.chat import ChatEncoder
from engine.api.answer.completions import CompletionEncoder
from engine.api.answer.decisions import DecisionsEncoder, decided
from engine.api.answer.embeddings import EmbeddingsEncoder
from engine.api.answer.encoder import Answered, AnswerEncoder, Heading, Repeated, Vocabulary
from engine.api.answer.messages import MessagesEncoder
from engine.api.answer.rerank import RerankEncoder, ranked
from engine.api.answer.responses import ResponsesEncoder, failing_of
from shared.apis import message_answers
from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.decisions import DecisionsRequest
from shared.apis.embeddings import EmbeddingsRequest
from shared.apis.generation import GenerationRequest
from shared.apis.messages import MessagesRequest
from shared.apis.models import VERSION_HEADER
from shared.apis.rerank import RERANKING
from shared.apis.responses.repeated import repeated
from shared.apis.responses.request import ResponsesRequest
from shared.wire import sse
from shared.wire.envelope import error_envelope
from shared.wire.errors import ApiError, status_of


class AnswerApi(Struct, frozen=True):
    """The way in which an API writes its answers."""

    id_prefix: str
    """The beginning of the id of each answer."""
    encoder: Callable[[Heading, Vocabulary, Answered], AnswerEncoder]
    error_body: Callable[[ApiError, str], bytes] = error_envelope
    """Makes the body of an error from it and the request's id."""
    error_event: Callable[[ApiError, str], bytes] = sse.error_event
    """Makes the event that ends a stream which fails after its first byte, from the same."""
    error_status: Callable[[type[ApiError]], int] = status_of
    """The status of an answer with an error of a class."""
    id_header: str = ""
    """The header in which an answer has the request's id once more. Empty for none."""
    opens_early: bool = False
    """True if a stream begins with events that tell nothing of the answer. They are sent once the core has
    admitted the request."""
    keepalive: bytes = sse.KEEPALIVE
    """The bytes that a stream is sent where it has nothing to say for a while, behind those events."""
    keepalive_s: float | None = None
    """The time after which they are sent, in seconds, where no operator has set one. None for never."""
    repeats: Callable[[Any, Mapping[str, Raw]], Repeated] | None = None
    """The function that picks what an answer repeats, from its request and the fields of its body. None where
    it repeats nothing."""
    failing: Callable[[AnswerEncoder], Callable[[ApiError, str], bytes]] | None = None
    """The function that makes `error_event` of a stream from its encoder, where that must know the stream."""


ANSWERS: Final[Mapping[type[GenerationRequest], AnswerApi]] = {
    ChatRequest: AnswerApi("chatcmpl-", ChatEncoder),
    CompletionRequest: AnswerApi("cmpl-", CompletionEncoder),
    ResponsesRequest: AnswerApi(
        "resp_", ResponsesEncoder, opens_early=True, repeats=repeated, failing=failing_of
    ),
    DecisionsRequest: AnswerApi("decision-", DecisionsEncoder, repeats=decided),
    **dict.fromkeys(RERANKING, AnswerApi("rerank-", RerankEncoder, repeats=ranked)),
    EmbeddingsRequest: AnswerApi("embd-", EmbeddingsEncoder),
    MessagesRequest: AnswerApi(
        "msg_",
        MessagesEncoder,
        message_answers.error_body,
        message_answers.error_event,
        message_answers.error_status,
        message_answers.ID_HEADER,
        opens_early=True,
        keepalive=message_answers.PING,
        keepalive_s=10.0,
    ),
}


def api_at(path: str, headers: Mapping[str, str]) -> AnswerApi:
    """The API that a path belongs to. One that is below that of none is Anthropic's where a request names the
    version of that, else OpenAI's."""
    own = next((api for kind, api in ANSWERS.items() if f"{path}/".startswith(f"{kind.path}/")), None)
    return own or ANSWERS[MessagesRequest if VERSION_HEADER in headers else ChatRequest]
