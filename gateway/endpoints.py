"""The endpoints that engines serve behind the gateway: for each path, the type of its requests and the
dialect of its streams.

Everything that differs between endpoints is here; every stage is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from shared import sse
from shared.errors import ApiError
from shared.openai import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerationRequest,
    TokenizeRequest,
    TokenizeResponse,
)

ProxiedRequest = GenerationRequest | TokenizeRequest | DetokenizeRequest


class Dialect(Struct, frozen=True):
    """The events that end a stream: the last one of a whole answer, and an error."""

    done: bytes
    """The last event of a whole answer."""

    def error_event(self, error: ApiError) -> bytes:
        return sse.error_event(error)


CHUNKS: Final = Dialect(done=sse.DONE)
"""The dialect of chat and completions."""


class Endpoint(Struct, frozen=True):
    path: str
    shape: type[ProxiedRequest]
    answer: type[Struct]
    """The shape of its answers."""
    summary: str
    """A sentence for the API's description."""
    event: type[Struct] | None = None
    """The shape of a stream's events. None where nothing streams."""
    dialect: Dialect = CHUNKS

    @property
    def generates(self) -> bool:
        """True if its requests generate tokens, which are counted and reserved."""
        return issubclass(self.shape, GenerationRequest)


ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", ChatRequest, ChatCompletion, "Answer a chat.", ChatChunk),
        Endpoint("/v1/completions", CompletionRequest, Completion, "Complete prompts.", Completion),
        Endpoint("/tokenize", TokenizeRequest, TokenizeResponse, "Turn text into token ids."),
        Endpoint("/detokenize", DetokenizeRequest, DetokenizeResponse, "Turn token ids into text."),
    )
}
"""The endpoints by path."""
