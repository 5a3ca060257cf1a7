"""The APIs whose requests generate. A further one is a module beside this one, and a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shared.apis.chat import ChatRequest
from shared.apis.completions import CompletionRequest
from shared.apis.decisions import DecisionsRequest
from shared.apis.embeddings import EmbeddingsRequest
from shared.apis.generation import GenerationRequest
from shared.apis.messages import MessagesRequest
from shared.apis.rerank import RERANKING
from shared.apis.responses.request import ResponsesRequest

GENERATING: Final[tuple[type[GenerationRequest], ...]] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
)
"""The requests that generate tokens."""
OPERATIONS: Final[Mapping[str, str]] = {
    **{kind.path: kind.operation for kind in GENERATING},
    EmbeddingsRequest.path: EmbeddingsRequest.operation,
    **{kind.path: kind.operation for kind in (*RERANKING, DecisionsRequest)},
}
"""The operation of each path that costs tokens, as spans name it."""
