"""OpenAI's embeddings at the gateway."""

from __future__ import annotations

from typing import Final

from gateway.endpoints.endpoint import Endpoint
from shared.apis.embeddings import Embeddings, EmbeddingsRequest

EMBEDDINGS: Final = Endpoint(
    shape=EmbeddingsRequest,
    answer=Embeddings,
    summary="Embed texts.",
    passes=frozenset(
        {
            *("model", "input", "encoding_format", "dimensions", "user"),  # OpenAI's
            *("truncate_prompt_tokens", "add_special_tokens"),  # vLLM's, of how an input becomes tokens
        }
    ),
    is_optional=True,
    maxima=(),
    nested=(),
)
